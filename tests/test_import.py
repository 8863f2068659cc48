"""`import liger_ext` imports no module that takes long, besides torch; and the packages of liger_ext.models import each
other in one direction only."""

import ast
from pathlib import Path

import torch
from cases import python

import liger_ext
from liger_ext.ops import _compile

# Modules of torch and of Python, besides our own.
SMALL = "sysconfig", "_sysconfigdata", "importlib.metadata"


def test_import_is_light():
    """torch._dynamo, sympy and transformers take 1 to 10 seconds each, and are imported on first use."""
    said = python(
        "-c",
        "import sys, torch; before = set(sys.modules); import liger_ext; print(*sorted(set(sys.modules) - before))",
    )
    found = [name for name in said.splitlines()[-1].split() if not name.startswith(("liger_ext", *SMALL))]
    assert found == []
    assert "liger_ext.ops.rope" in said.split() and "liger_ext.models.patching.swap" not in said.split()


def test_flops_are_counted():
    """torch's counter counts our ops, whether it is imported before liger_ext or after."""
    count = (
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "x, w, y = torch.ones(3, 4), torch.ones(5, 4), torch.zeros(3, dtype=torch.int64)\n"
        "with FlopCounterMode(display=False) as counter: liger_ext.fused_linear_cross_entropy(x, w, y)\n"
        "print(counter.get_total_flops())\n"
    )
    look = "import importlib.util; importlib.util.find_spec('torch.utils.flop_counter')\n"
    for before in ("", "from torch.utils import flop_counter\n"):
        assert python("-c", f"import torch\n{before}import liger_ext\n{look}{count}").split()[-1] == str(2 * 3 * 4 * 5)


def test_decorators_are_torchs():
    """Our decorators set the attributes that `torch.compiler`'s set, which torch may change."""
    ours, theirs = (lambda: 0), (lambda: 0)
    assert vars(_compile.assume_constant_result(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
    name = "_torchdynamo_disable"
    assert getattr(_compile.disabled_in_graphs(ours), name) == getattr(torch.compiler.disable(theirs), name)


# For each part of liger_ext.models, the other parts that it may import. The last may import none.
PARTS = {
    "auto": {"families", "model_types", "patching"},
    "families": {"llama", "model_types", "modules", "patches", "patching", "recognise"},
    "patches": {"llama", "modules", "patching", "recognise"},
    "llama": {"modules", "patching", "training"},
    "modules": {"patching", "recognise", "training"},
    "training": {"patching"},
    "recognise": {"patching"},
    "patching": set(),
}


def test_rooms_import_downwards():
    """Each package imports only the packages that PARTS lists for it, also inside functions. So no import relies on
    another package being loaded first."""
    folder = Path(liger_ext.__file__).parent / "models"
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).with_suffix("").parts[0]
        if room not in PARTS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms = {name.split(".")[2] for name in names if name.startswith("liger_ext.models.")}
            assert rooms <= PARTS[room] | {room}, path
