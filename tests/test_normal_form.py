"""The normal form of a function's source (the text by which recognition compares functions): it is equal in every
Python version, and different wherever the function's result may differ.

With LIGER_EXT_MODELS=full (`make test-models`) the test reads all models of transformers, and otherwise every fifth.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from liger_ext.models.patching import source
from liger_ext.models.recognise import normal_form

# Patterns of the names of classes and functions that are typically recognised by their code.
CLASSES = re.compile(r"(Norm\w*|MLP|Mlp|Experts|Layer|Attention|ForCausalLM|ForConditionalGeneration)$")
FUNCTIONS = re.compile(r"apply_rotary_|rotate_half|ForCausalLMLoss|fixed_cross_entropy|slice_logits_to_keep")
METHODS = "forward", "_norm", "_apply_gate"
STEP = 1 if os.environ.get("LIGER_EXT_MODELS") == "full" else 5
DIGESTS = """
import importlib.util, json, sys, types

def load(name, path):  # without the package, which imports torch
    for end in range(len(name.split(".")) - 1):
        package = ".".join(name.split(".")[: end + 1])
        sys.modules.setdefault(package, types.ModuleType(package))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

source = load("liger_ext.models.patching.source", sys.argv[3])
form = load("liger_ext.models.recognise.normal_form", sys.argv[1])
found = []
for text in json.load(open(sys.argv[2])):
    numbered = lambda tree: form.number_names(tree, {}, bool)
    for normal in (lambda tree: tree, form.reduce_layer, form.reduce_head, numbered):
        tree = normal(source.definition_in(text))
        found.append(None if tree is None else form.digest(form.dump_tree(tree), *map(str, source.names_read(tree))))
print(json.dumps(found))
"""


def pythons() -> dict[str, str]:
    """{version: path} of this machine's other Pythons that liger_ext supports."""
    folders = [*map(Path, os.environ["PATH"].split(os.pathsep)), *Path(sys.base_prefix).parent.glob("*/bin")]
    others = [f"3.{minor}" for minor in range(10, 20) if minor != sys.version_info.minor]
    found = {v: [f / f"python{v}" for f in folders if (f / f"python{v}").exists()] for v in others}
    running = {version: next(filter(_runs, paths), None) for version, paths in found.items()}
    return {version: str(path) for version, path in running.items() if path is not None}


def _runs(python: Path) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def transformers_sources() -> list[str]:
    """Functions of transformers' models that are recognised by their code, and functions with similar names."""
    folder = Path(transformers.__file__).parent
    paths = sorted(folder.glob("models/*/modeling_*.py"))[::STEP]
    found = {}
    for path in (folder / "loss/loss_utils.py", folder / "models/llama/modeling_llama.py", *paths):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            functions = [node] if isinstance(node, ast.FunctionDef) and FUNCTIONS.search(node.name) else []
            if isinstance(node, ast.ClassDef) and CLASSES.search(node.name):
                functions = [part for part in node.body if getattr(part, "name", "") in METHODS]
            found.update(("".join(lines[f.lineno - 1 : f.end_lineno]), None) for f in functions)
    return list(found)


def digests(python: str, corpus: Path) -> list[str | None]:
    arguments = [python, "-c", DIGESTS, normal_form.__file__, str(corpus), source.__file__]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources") / "sources.json"
    path.write_text(json.dumps(transformers_sources()))
    return path


@pytest.fixture(scope="module")
def expected(corpus):
    found = digests(sys.executable, corpus)
    assert len(set(found)) > 200
    return found


@pytest.mark.slow
@pytest.mark.parametrize("version", sorted(pythons()) or ["another"])
def test_every_python_makes_the_same(version, corpus, expected):
    if version == "another":
        pytest.skip("this machine has no other Python")
    assert digests(pythons()[version], corpus) == expected


PLAIN = """
def f(self, x, n=1):
    a, b = x
    return self.g(a) + h(b) * n
"""
SAME = """
    @auto_docstring(custom_args=1)
    def f(self, x: Tensor, n: int = 1) -> Tensor:
        '''What it does.'''
        (a, b) = x  # a pair
        return self.g(a) + (h(b) * n)
"""


def test_what_does_not_matter():
    assert written(SAME) == written(PLAIN)


CHANGES = [
    "n=1:n=2",
    "a, b:b, a",
    "+:-",
    "self.g:self.h",
    "(a) +:(a) + 0 +",
    ") * n: * n)",
    "def:@torch.no_grad()\ndef",
]


@pytest.mark.parametrize("old, new", [change.split(":", 1) for change in CHANGES])
def test_what_matters(old, new):
    assert written(PLAIN.replace(old, new, 1)) != written(PLAIN)


def test_what_is_called_elsewhere():
    assert source.names_read(source.definition_in(PLAIN)) == (["h"], ["g"])


def test_a_line_at_another_place_is_another_difference():
    lines = "a\nb\nc\nd\n"
    differences = {normal_form.difference(lines, lines.replace(old, f"{old}x\n")) for old in ("a\n", "b\n", "c\n")}
    assert len(differences) == 3


def written(text: str) -> str:
    return normal_form.dump_tree(source.definition_in(text))
