"""A wheel has everything, installs into a fresh environment and works there."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow

USE = """
import torch, liger_ext, liger_ext.functional as F
assert "site-packages" in liger_ext.__file__, liger_ext.__file__
x = torch.randn(5, 33, requires_grad=True)
w = torch.ones(33, requires_grad=True)
y = F.rms_norm(x, w)
y.square().sum().backward()
want = torch.nn.functional.rms_norm(x, (33,), w, 1e-6)
torch.testing.assert_close(y, want)
assert x.grad.abs().sum() > 0
print("works")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel under test: the one in LIGER_EXT_WHEEL, or one built here without its GPU library."""
    if named := os.environ.get("LIGER_EXT_WHEEL"):
        return Path(named)
    out = tmp_path_factory.mktemp("wheel")
    # Built beside the checkout's own libraries, which other tests use meanwhile.
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(out)]
    command += ["--config-settings", f"build-dir={ROOT}/build/test-wheel", str(ROOT)]
    options = {"LIGER_EXT_GPU": "none", "SKBUILD_CMAKE_DEFINE": f"LIGER_EXT_OUTPUT={out}/built/lib"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | options)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("liger_ext-*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel in it, and this process's torch beside it; its Python."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    return python


def python_in(environment: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LIGER_EXT_LIB")}
    return subprocess.run([str(environment), *arguments], cwd=cwd, env=clean, capture_output=True, text=True)


def test_wheel_holds_package_libraries_and_module_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "liger_ext/lib/libliger_ext_cpu.so" in names
    assert any(name.startswith("liger_ext/_C.") and name.endswith(".so") for name in names)
    packaged = {name for name in names if name.endswith(".py")}
    assert packaged == {path.relative_to(ROOT).as_posix() for path in (ROOT / "liger_ext").rglob("*.py")}
    assert "liger_ext/hub_kernels/metadata.json" in names
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and "liger_ext" in tops, tops  # the other is the dist-info
    assert any(name.endswith("licenses/LICENSE") for name in names)
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{python}-{python}-" in wheel.name  # _C is compiled for this Python


def test_wheel_works_in_a_fresh_environment(environment, tmp_path):
    done = python_in(environment, "-c", USE, cwd=tmp_path)
    assert done.returncode == 0 and "works" in done.stdout, done.stdout + done.stderr


def test_python_m_liger_ext_of_the_wheel(environment, tmp_path):
    done = python_in(environment, "-m", "liger_ext", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("version = "))
    assert done.stdout.startswith("liger_ext") and version.split('"')[1] in done.stdout
    assert torch.__version__ in done.stdout
