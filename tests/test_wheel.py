"""Packages that `pip install`, an editable install, a source distribution and `make wheels` build, and that they work
once installed. The tests build in a copy of the checkout, because other tests use the checkout's libraries."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from test_cuda_code import NVCC

from liger_ext import _fit

ROOT = Path(__file__).parent.parent
NOT_SOURCES = shutil.ignore_patterns(".*", "build", "dist", "lib", "_C*.so", "__pycache__", "*.egg-info", "demo_out")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
pytestmark = pytest.mark.slow

USE = """
import torch, liger_ext, liger_ext.functional as F
assert "site-packages" in liger_ext.__file__, liger_ext.__file__
x = torch.randn(5, 33, requires_grad=True)
w = torch.ones(33, requires_grad=True)
y = F.rms_norm(x, w)
y.square().sum().backward()
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (33,), w, 1e-6))
assert x.grad.abs().sum() > 0

from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)), torch.arange(32).reshape(2, 16)
want = model(ids, labels=ids).loss
liger_ext.apply_liger_kernel_to_llama(model=model)
loss = model(ids, labels=ids).loss
loss.backward()
torch.testing.assert_close(loss, want)
print("works")
"""

PLANS = """
import glob, importlib.util, sys
file = next(f for f in glob.glob(sys.argv[1] + "/_C.*") if ".cpython-%d%d-" % sys.version_info[:2] in f)
spec = importlib.util.spec_from_file_location("liger_ext._C", file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(len(module.plans("stream_copy", module.profile("H200"), (((8, 8), "torch.float32", (8, 1), 0), 4))), "plans")
"""


def run(*command, cwd, ok=True, **settings) -> str:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("LIGER_EXT_")}
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = kept | {"LIGER_EXT_GPU": "none", "PATH": tools} | settings
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


def build(source: Path, out: Path, ok=True, **settings) -> str:
    """Runs `pip wheel` on a folder or a source distribution; returns the output."""
    command = *PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", out, source
    return run(*command, cwd=out, ok=ok, **settings)


def a_wheel(source: Path, out: Path, **settings) -> Path:
    build(source, out, **settings)
    return next(out.glob("liger_ext-*.whl"))


def names_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}


def environment(folder: Path, python: str = sys.executable) -> Path:
    """Creates an environment that also sees this process's torch and transformers; returns the path of its Python."""
    if python == sys.executable:
        venv.create(folder, with_pip=False, symlinks=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "torch_of_the_tests.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    else:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def install(python: Path, *what) -> None:
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", *what, cwd=python.parent)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources, with dummy files in place of the outputs of `make build`."""
    copy = tmp_path_factory.mktemp("source") / "liger_ext"
    shutil.copytree(ROOT, copy, ignore=NOT_SOURCES)
    (copy / "liger_ext/lib").mkdir()
    for name in ("lib/libliger_ext_cpu.so", "lib/libliger_ext_cuda.so", "_C.cpython-38-x86_64-linux-gnu.so"):
        (copy / "liger_ext" / name).write_text("of `make build`")
    return copy


def built_files(source: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in source.glob("liger_ext/**/*.so")}


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """The wheel under test: the one in LIGER_EXT_WHEEL, or one built here without a GPU library."""
    if named := os.environ.get("LIGER_EXT_WHEEL"):
        return Path(named)
    before = built_files(source)
    made = a_wheel(source, tmp_path_factory.mktemp("wheel"))
    assert built_files(source) == before, "pip's build has overwritten the files of make build"
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    python = environment(tmp_path_factory.mktemp("environment"))
    install(python, wheel)
    return python


def test_wheel_holds_package_libraries_and_module_and_nothing_else(wheel):
    names = names_in(wheel)
    assert {"liger_ext/lib/libliger_ext_cpu.so", "liger_ext/lib/libliger_ext_plans.so"} <= names
    assert "liger_ext/run_path/liger_kernel-0.8.5.dist-info/METADATA" in names
    assert any(name.startswith(f"liger_ext/_C.cpython-{sys.version_info[0]}{sys.version_info[1]}-") for name in names)
    packaged = {name for name in names if name.endswith(".py")}
    assert packaged == {path.relative_to(ROOT).as_posix() for path in (ROOT / "liger_ext").rglob("*.py")}
    types = {path.relative_to(ROOT).as_posix() for path in (ROOT / "liger_ext").rglob("*.pyi")}
    assert types and {"liger_ext/py.typed", "liger_ext/hub_kernels/metadata.json", *types} <= names
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and "liger_ext" in tops, tops  # the other one is the dist-info
    licences = {name.rpartition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "THIRD_PARTY_NOTICES.md"}
    assert not any("cpython-38" in name for name in names)


def test_links_of_the_readme_work_on_a_package_index(wheel):
    files = zipfile.ZipFile(wheel)
    text = files.read(next(name for name in files.namelist() if name.endswith("METADATA"))).decode()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15 and all(link.startswith(("https://", "#")) for link in links), links


def test_wheel_works_in_a_fresh_environment(installed, tmp_path):
    """Without a compiler: PATH is empty."""
    assert "works" in run(installed, "-c", USE, cwd=tmp_path, PATH="")
    printed = run(installed, "-m", "liger_ext", cwd=tmp_path, PATH="")
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"{version} in {installed.parents[1]}" in printed and torch.__version__ in printed
    assert run(installed, "-m", "liger_ext", "doctor", cwd=tmp_path, PATH="").rstrip().endswith("OK")


def test_a_module_that_is_gone_does_not_stay(source, tmp_path):
    extra = source / "liger_ext/gone.py"
    extra.write_text("")
    assert "liger_ext/gone.py" in names_in(a_wheel(source, tmp_path))
    extra.unlink()
    assert "liger_ext/gone.py" not in names_in(a_wheel(source, tmp_path))


def test_a_touched_file_is_compiled_alone(source, wheel, tmp_path):
    build(source, tmp_path)
    (source / "csrc/launch/softmax.cpp").touch()
    compiled = re.findall(r"Building \S+ object (\S+)", build(source, tmp_path))
    assert [Path(name).name for name in compiled] == ["softmax.cpp.o"]


def test_an_editable_install_has_module_and_libraries_from_one_place(tmp_path):
    source = tmp_path / "liger_ext"
    shutil.copytree(ROOT, source, ignore=NOT_SOURCES)
    python = environment(tmp_path / "environment")
    install(python, "--no-build-isolation", "-e", source)
    code = "import liger_ext; from liger_ext import _C, _load; print(_C.__file__, _load.library_folder())"
    module, libraries = run(python, "-c", code, cwd=tmp_path).split()
    assert Path(module).parent == Path(libraries).parent == source / "liger_ext"


def test_a_release_of_sources_builds_offline(source, tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", tmp_path, source, cwd=tmp_path)
    release = next(tmp_path.glob("liger_ext-*.tar.gz"))
    assert "liger_ext/lib/libliger_ext_cpu.so" in names_in(a_wheel(release, tmp_path, PIP_NO_INDEX="1"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"LIGER_EXT_GPU": "metal"}, "LIGER_EXT_GPU is 'metal', expected auto, none, cuda, hip or 'cuda;hip'"),
        ({"LIGER_EXT_PYTHONS": "/bin/ls"}, "LIGER_EXT_PYTHONS is '/bin/ls', and '/bin/ls' is no Python that runs here"),
        ({"LIGER_EXT_PYTHONS": "{fake}"}, "Python.h does not exist. Install them (Debian, Ubuntu: apt "),
        ({"PATH": "{empty}"}, "liger_ext is built by cmake and ninja, and the PATH has no "),
    ],
    ids=["backend", "pythons", "headers", "tools"],
)  # fmt: skip
def test_what_is_missing_gets_a_sentence(settings, words, source, tmp_path):
    fake, empty = tmp_path / "python3.12", tmp_path / "bin"
    fake.write_text('#!/bin/sh\ncase "$2" in *version*) echo cp312;; *) echo "/nowhere;.cpython-312.so";; esac\n')
    fake.chmod(0o755)
    empty.mkdir()
    settings = {name: value.format(fake=fake, empty=empty) for name, value in settings.items()}
    if "PATH" not in settings:
        assert words in " ".join(build(source, tmp_path, ok=False, **settings).split())
        return
    script = "import runpy, sys; sys.executable = '/nowhere/python'; runpy.run_path('setup.py')"
    assert words in run(sys.executable, "-c", script, "build_ext", cwd=source, ok=False, **settings)


CLANG = shutil.which("clang++-19")


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="needs a torch for CPUs")
@pytest.mark.parametrize("gpu", ["auto", "cuda"])
def test_by_default_a_torch_for_cpus_gets_no_gpu_library(gpu, tmp_path):
    if gpu == "cuda" and not NVCC:
        pytest.skip("needs nvcc")
    said = run("cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path, f"-DPython_EXECUTABLE={sys.executable}",
               f"-DLIGER_EXT_GPU={gpu}", cwd=tmp_path)  # fmt: skip
    is_built = "libliger_ext_cuda.so" in (tmp_path / "build.ninja").read_text()
    assert (is_built, "is built for CPUs alone" in said) == ((False, True) if gpu == "auto" else (True, False))


@pytest.mark.parametrize(
    ("gpu", "archs", "words"),
    [
        ("cuda", "nonsense", "LIGER_EXT_CUDA_ARCHS is 'nonsense', expected architectures such as '8.0;9.0a;7.5+PTX'"),
        ("hip", "gfx942;gfx9999", "LIGER_EXT_HIP_ARCHS has 'gfx9999', which"),
    ],
)
def test_architectures_that_the_compiler_does_not_have(gpu, archs, words, source, tmp_path):
    if not {"cuda": NVCC, "hip": CLANG}[gpu]:
        pytest.skip("needs nvcc or clang-19")
    settings = {"LIGER_EXT_GPU": gpu, f"LIGER_EXT_{gpu.upper()}_ARCHS": archs}
    assert words in " ".join(build(source, tmp_path, ok=False, **settings).split())


# One wheel for every machine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(source) -> Path:
    """The wheel of `make wheels`, for the architectures of `.ci/run`, whose objects a compiler cache holds."""
    if named := os.environ.get("LIGER_EXT_WHEEL"):
        return Path(named)
    if not NVCC or not CLANG:
        pytest.skip("needs nvcc and clang-19")
    settings = [f"PYTHON={sys.executable}", "NO_VENV=1", "CUDA_ARCHS=8.0;9.0a", "HIP_ARCHS=gfx942;gfx1100"]
    printed = run("make", "wheels", *settings, cwd=source)
    assert "PASSED" in printed and ": OK" in printed, printed
    return next((source / "dist").glob("*.whl"))


def test_one_wheel_for_every_machine(wheels, tmp_path):
    assert wheels.stat().st_size < 40 << 20
    tag = re.fullmatch(r"liger_ext-[\d.]+-((?:cp3\d+\.?)+)-none-manylinux_2_(\d+)_x86_64\.whl", wheels.name)
    assert int(tag[2]) <= 34
    modules = {re.search(r"cpython-(\d+)-", name)[1] for name in names_in(wheels) if "/_C." in name}
    assert {f"cp{python}" for python in modules} == set(tag[1].split("."))
    zipfile.ZipFile(wheels).extractall(tmp_path)
    for backend in ("cpu", "cuda", "hip", "plans"):
        assert _fit.read_facts(tmp_path / f"liger_ext/lib/libliger_ext_{backend}.so").backend == backend


def test_it_works_in_a_fresh_environment(wheels, tmp_path):
    python = environment(tmp_path / "environment")
    install(python, wheels)
    assert "works" in run(python, "-c", USE, cwd=tmp_path, PATH="")
    assert "cuda for 8.0 9.0a" in (printed := run(python, "-m", "liger_ext", "doctor", cwd=tmp_path, PATH=""))
    assert "hip for gfx942 gfx1100" in printed and printed.rstrip().endswith("OK")


def test_every_python_that_is_here_loads_its_module(wheels, tmp_path):
    pythons = run("make", "-s", "pythons", cwd=ROOT).strip().split(";")
    for number, found in enumerate(pythons):
        python = environment(tmp_path / str(number), found)
        install(python, wheels)
        package = next((tmp_path / str(number) / "lib").glob("python*/site-packages/liger_ext"))
        assert run(python, "-c", PLANS, package, cwd=tmp_path).split()[1] == "plans", found
