"""The search for the BLAS functions of GPU matmuls (gpu/symbols.h) finds those of the library that torch is linked to,
even if another version of that library was loaded before. The test's libraries are fakes."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

BLAS = 'extern "C" int {name}() {{ return {version}; }}'
TORCH = """
extern "C" int fakeblas_gemm();
extern "C" int torch_handle() { return fakeblas_gemm(); }
"""
OURS = """
#include "gpu/symbols.h"
extern "C" int torch_handle();
extern "C" int call(const char* name, bool of_torch) {
  const void* neighbour = of_torch ? reinterpret_cast<const void*>(&torch_handle) : nullptr;
  void* found = liger::gpu::find_symbol(neighbour, name);
  return found ? reinterpret_cast<int (*)()>(found)() : -1;
}
"""


def build(folder, name, source, *libraries):
    (folder / f"{name}.cpp").write_text(source)
    command = [COMPILER, "-std=c++20", "-shared", "-fPIC", "-I", ROOT / "csrc", folder / f"{name}.cpp"]
    linked = [folder / library for library in libraries]
    origin = ["-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}", "-Wl,--no-as-needed"]
    subprocess.run([*command, "-o", folder / name, *origin, *linked, "-ldl"], check=True)


def test_a_library_of_another_version_is_not_taken(tmp_path):
    build(tmp_path, "libfakeblas.so.12", BLAS.format(name="fakeblas_gemm", version=12))
    build(tmp_path, "libfakeblas.so.13", BLAS.format(name="fakeblas_gemm", version=13))
    build(tmp_path, "libonly_here.so", BLAS.format(name="fakeblas_elsewhere", version=7))
    build(tmp_path, "libfaketorch.so", TORCH, "libfakeblas.so.13")
    build(tmp_path, "libours.so", OURS, "libfaketorch.so")
    other, elsewhere = (
        ctypes.CDLL(str(tmp_path / name), mode=ctypes.RTLD_GLOBAL) for name in ("libfakeblas.so.12", "libonly_here.so")
    )
    assert (other.fakeblas_gemm(), elsewhere.fakeblas_elsewhere()) == (12, 7)
    assert ctypes.CDLL(None).fakeblas_gemm() == 12  # a search of the whole process finds this version
    ours = ctypes.CDLL(str(tmp_path / "libours.so"))
    assert [ours.call(b"fakeblas_gemm", of_torch) for of_torch in (True, False)] == [13, 12]
    assert [ours.call(b"fakeblas_elsewhere", of_torch) for of_torch in (True, False)] == [-1, 7]
