"""Tests of the check whether a GPU library fits torch, driver and GPU (a table; no GPU needed), and of the build facts
that library files contain."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from liger_ext import _fit, _load
from liger_ext._fit import BuildFacts, Machine

CUDA_13 = BuildFacts("0.1.0", "2.13.0+cpu", "cuda", "CUDA 13.0.88", "7.5 8.0 9.0a 7.5+PTX")
CUDA_12 = BuildFacts("0.1.0", "2.13.0+cpu", "cuda", "CUDA 12.9.86", "7.0 8.0 9.0a 7.5+PTX")
HIP = BuildFacts("0.1.0", "2.13.0+cpu", "hip", "clang version 19.1.7", "gfx90a gfx942")
BOTH = {"cuda": CUDA_13, "hip": HIP}


def nvidia(driver_cuda, torch="2.11.0", cuda="13.0"):
    return Machine(f"{torch}+cu{cuda.replace('.', '')}", cuda, None, "NVIDIA 570.86", driver_cuda)


ROCM = Machine("2.11.0+rocm7.1", None, "7.1.25424", "amdgpu 6.12")
CPU = Machine("2.13.0+cpu", None, None)


@pytest.mark.parametrize(
    ("libraries", "machine", "architecture", "words"),
    [
        # fits
        (BOTH, nvidia((13, 0)), None, None),
        (BOTH, nvidia((13, 2)), "9.0", None),
        (BOTH, nvidia((13, 0), cuda="12.8"), "8.6", None),  # an older torch with a driver that is new enough
        (BOTH, nvidia((14, 0)), "7.5", None),
        (BOTH, nvidia((13, 0)), "10.0", None),  # PTX
        ({"cuda": CUDA_12}, nvidia((12, 2), cuda="12.6"), "9.0", None),  # minor versions of CUDA are compatible
        ({"cuda": CUDA_12}, nvidia((13, 0)), "9.0", None),
        (BOTH, nvidia(None), None, None),  # a torch for CUDA on a machine without a driver
        (BOTH, ROCM, None, None),
        (BOTH, ROCM, "gfx942", None),
        # does not fit
        (BOTH, nvidia((12, 8), cuda="12.8"), None, "and the driver (NVIDIA 570.86) runs CUDA up to 12.8. Update the"),
        (BOTH, nvidia((12, 8), cuda="12.8"), "9.0", "install a liger_ext built with CUDA 12"),
        ({"cuda": CUDA_12}, nvidia((12, 2), cuda="12.6"), "10.0", "only PTX for 10.0, made by CUDA 12.9"),
        ({"cuda": CUDA_12}, nvidia((12, 9)), "6.1", "no code for 6.1; it was built for 7.0 8.0 9"),
        (BOTH, ROCM, "gfx1100", "LIGER_EXT_GPU=hip LIGER_EXT_HIP_ARCHS=gfx1100 pip install"),
        ({"hip": HIP}, nvidia((13, 0)), None, "which torch 2.11.0+cu130 is built for (it has: cpu, hip)"),
        ({"cuda": CUDA_13}, ROCM, None, "has no library for ROCm"),
        ({}, nvidia((13, 0)), None, "(it has: cpu). Install a wheel that has it, or install CUDA's nvcc"),
        (BOTH, CPU, None, "torch 2.13.0+cpu is a build for the CPU only, so liger_ext's GPU"),
        (BOTH, Machine("2.13.0", None, None, "NVIDIA 580.95", (13, 0)), None, "has a driver for GPUs (NVIDIA 580.95)"),
        ({"cuda": replace(CUDA_13, version="0.0.9")}, nvidia((13, 0)), None, "is of version 0.0.9, the package"),
    ],
)  # fmt: skip
def test_misfit(libraries, machine, architecture, words):
    reason = _fit.misfit_reason(libraries, "0.1.0", machine, architecture)
    assert reason is None if words is None else words in reason, reason


@pytest.mark.parametrize(
    ("architectures", "capability", "code"),
    [
        ("7.5 8.0 9.0a", (8, 0), "machine code"),
        ("7.5 8.0 9.0a", (8, 9), "machine code"),  # code for 8.0 runs on later 8.x
        ("7.5 8.6 9.0a", (8, 0), "nothing"),
        ("7.5 9.0a", (9, 0), "machine code"),
        ("9.0a", (9, 1), "nothing"),
        ("9.0a", (10, 0), "nothing"),
        ("9.0a 7.5+PTX", (10, 0), "PTX"),
        ("7.5+PTX 10.0", (10, 0), "machine code"),
        ("8.0 7.5+PTX", (7, 0), "nothing"),
        ("10.0", (12, 0), "nothing"),
        ("", (8, 0), "nothing"),
    ],
)
def test_coverage(architectures, capability, code):
    assert _fit.coverage(architectures, *capability) == code


def test_facts_of_a_library():
    facts = _fit.read_facts(_load.library_folder() / "libliger_ext_cpu.so")
    assert facts == _load.cpu_facts and facts.torch[0] == "2" and facts.version.count(".") == 2


def test_files_without_facts(tmp_path):
    empty, other = tmp_path / "empty.so", tmp_path / "other.so"
    empty.write_bytes(b"")
    other.write_bytes(b"\x7fELF" + bytes(10_000))
    for file in (empty, other):
        with pytest.raises(ValueError):
            _fit.read_facts(file)


@pytest.mark.parametrize(
    ("files", "free_threaded", "words"),
    [
        (["_C.cpython-38-x86_64-linux-gnu.so", "_C.cpython-310-x86_64-linux-gnu.so"], 0, "for Python 3.8, 3.10, and"),
        (["_C.cpython-310-x86_64-linux-gnu.so"], 1, "no module for a free-threaded Python"),
        ([], 0, "_C does not exist: install liger_ext again"),
        ([f"_C.cpython-{sys.version_info.major}{sys.version_info.minor}-x86_64-linux-gnu.so"], 0, "does not load"),
    ],
)  # fmt: skip
def test_a_python_without_its_module(files, free_threaded, words, tmp_path, monkeypatch):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    config = {"Py_GIL_DISABLED": free_threaded}
    monkeypatch.setattr(_load.sysconfig, "get_config_var", config.get)
    monkeypatch.setattr(_load.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("empty")))
    with pytest.raises(ImportError, match=words):
        _load._check_python(Path(tmp_path))
