"""The shared libraries: every instruction set computes right results, and a failed load raises an error that helps.
Also tests the package's public names."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import liger_ext
from liger_ext import _load, compat, functional, modules, ops

HERE = Path(__file__).parent
PACKAGE = Path(liger_ext.__file__).parents[1]
OPS = [path.stem for path in sorted(Path(ops.__path__[0]).glob("[a-z]*.py"))]


def python(*args, **env):
    path = os.pathsep.join([str(PACKAGE), str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has one instruction set")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_every_instruction_set(isa):
    """All other tests run the best instruction set."""
    done = python(HERE / "isa_subset.py", LIGER_EXT_CPU_ISA=isa)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"isa {isa} measured \d\d\d", done.stdout), done.stdout


def test_a_folder_without_libraries(tmp_path):
    done = python("-c", "import liger_ext", LIGER_EXT_LIB=str(tmp_path))
    assert done.returncode != 0 and "ImportError" in done.stderr
    assert f"LIGER_EXT_LIB names {tmp_path}, which has no libliger_ext_cpu.so" in done.stderr


def older(library: Path) -> None:
    version = f'"version": "{liger_ext.__version__}"'.encode()
    assert version in library.read_bytes()
    library.write_bytes(library.read_bytes().replace(version, b'"version": "0.0.9"'))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda package: None, ""),
        (lambda package: (package / "lib/libliger_ext_cpu.so").unlink(), "does not exist: install liger_ext again"),
        (lambda package: next(package.glob("_C.*")).unlink(), "_C does not exist: install liger_ext again"),
        (lambda package: (package / "lib/libliger_ext_plans.so").unlink(), "does not load: libliger_ext_plans.so"),
        (lambda package: older(package / "lib/libliger_ext_plans.so"), "is mixed of two versions"),
        (
            lambda package: (shutil.rmtree(package / "lib"), (package.parent / "CMakeLists.txt").touch()),
            "does not load",
        ),
        (
            lambda package: (next(package.glob("_C.*")).unlink(), (package.parent / "CMakeLists.txt").touch()),
            "these sources are not built. Run `make build`",
        ),
    ],
    ids=["nothing", "cpu", "_C", "plans", "versions", "lib", "sources"],
)
def test_a_spoiled_installation(spoil, words, tmp_path):
    package = tmp_path / "liger_ext"
    ignored = shutil.ignore_patterns("host", "ahead", "async", "__pycache__", "libliger_ext_cuda.so", "*_hip.so")
    shutil.copytree(PACKAGE / "liger_ext", package, ignore=ignored)
    spoil(package)
    (tmp_path / "use.py").write_text("import liger_ext; print(liger_ext.__file__)")
    done = python(tmp_path / "use.py")
    assert (done.returncode == 0) == (not words) and words in done.stderr, done.stderr


def test_a_second_copy_is_refused(tmp_path):
    """Two copies would define every op twice and crash the process."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        shutil.copy(_load.library_folder() / "libliger_ext_cpu.so", tmp_path / name)
    script = f"""
import os, sys
os.environ["LIGER_EXT_LIB"] = {str(tmp_path / "first")!r}
import liger_ext
for name in [n for n in sys.modules if n.startswith("liger_ext")]:
    del sys.modules[name]
os.environ["LIGER_EXT_LIB"] = {str(tmp_path / "second")!r}
import liger_ext
"""
    done = python("-c", script)
    assert "ImportError" in done.stderr, done.stderr
    assert str(tmp_path / "first") in done.stderr and str(tmp_path / "second") in done.stderr


def test_import_neither_starts_cuda_nor_loads_transformers():
    done = python(
        "-c", "import sys, torch, liger_ext; print(torch.cuda.is_initialized(), 'transformers' in sys.modules)"
    )
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_public_names_exist():
    for name in liger_ext.__all__:
        if name not in liger_ext._PATCHING:
            assert getattr(liger_ext, name).__doc__, name


@pytest.mark.parametrize("op", OPS)
def test_the_list_of_ops_has_every_file(op):
    """A file's public names are also in liger_ext and in exactly one of the namespaces."""
    line = f"from liger_ext.ops.{op} import *"
    assert line in Path(ops.__file__).read_text().splitlines(), f"liger_ext/ops/__init__.py has no line: {line}"
    made = importlib.import_module(f"liger_ext.ops.{op}")
    assert made.__all__ == sorted(set(made.__all__))
    for name in made.__all__:
        homes = [space for space in (functional, modules, compat) if hasattr(space, name)]
        assert len(homes) == 1 and name in homes[0].__all__ and name in liger_ext.__all__, name
        assert getattr(liger_ext, name) is getattr(made, name), f"another file has {name}, too"
        assert getattr(homes[0], name) is getattr(made, name)


def test_nothing_else_is_public():
    listed = [name for op in OPS for name in importlib.import_module(f"liger_ext.ops.{op}").__all__]
    assert sorted(listed) == list(ops.PUBLIC)
    for space in (functional, modules, compat):
        more = ["install"] if space is compat else []
        assert [name for name in dir(space) if not name.startswith("_")] == sorted(space.__all__ + more)
    assert all(name.startswith("Liger") for name in modules.__all__)


def test_the_self_test_passes(device):
    from liger_ext.testing import self_test

    measured = list(self_test(device))
    assert {m.dtype for m in measured} >= {torch.float32, torch.bfloat16, torch.float16}
    assert all(m.ratio <= 1 for m in measured), max(measured, key=lambda m: m.ratio)
