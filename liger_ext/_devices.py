"""The GPUs of this machine as liger_ext sees them, and whether its library has code for them. Torch and the driver
know the rest."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _C, _load


def coverage(architectures: str, major: int, minor: int) -> str:
    """How a build for these CUDA architectures ("8.0 9.0a 7.5+PTX") runs on a GPU of compute capability major.minor:
    "machine code", "PTX" (compiled by the driver at the first call) or "nothing".

    Code for a capability runs on later ones of its major version, "9.0a" on 9.0 alone, PTX on everything later.
    """
    found = "nothing"
    for architecture in architectures.split():
        number = tuple(int(part) for part in architecture.removesuffix("+PTX").rstrip("af").split("."))
        if architecture.endswith("+PTX"):
            if number <= (major, minor) and found == "nothing":
                found = "PTX"
        elif number == (major, minor) or (not architecture.endswith("a") and number[0] == major and number[1] <= minor):
            found = "machine code"
    return found


def code_for(architecture: str) -> str:
    """What this build holds for a GPU of an architecture ("9.0", "gfx942"): "machine code", "PTX" or "nothing"."""
    if architecture.startswith("gfx"):
        covered = _C.gpu_backend == "hip" and architecture in _C.gpu_architectures.split()
        return "machine code" if covered else "nothing"
    built = _C.gpu_architectures if _C.gpu_backend == "cuda" else ""
    return coverage(built, *map(int, architecture.split(".")))


def rebuild(architecture: str) -> str:
    """The command that makes a library with code for an architecture."""
    backend, variable = "cuda", "LIGER_EXT_CUDA_ARCHS"
    if architecture.startswith("gfx"):
        backend, variable = "hip", "LIGER_EXT_HIP_ARCHS"
    install = "pip install --no-build-isolation --force-reinstall --no-deps ."
    return f"LIGER_EXT_GPU={backend} {variable}={architecture} {install}"


@dataclass(frozen=True)
class Device:
    """A GPU that torch can use. ``code``: what the build holds for it: "machine code", "PTX" or "nothing"."""

    index: int
    name: str
    architecture: str
    code: str
    total_bytes: int
    free_bytes: int
    profile: _C.DeviceProfile | None  # None where liger_ext's GPU library is not loaded


def running_profile(index: int) -> _C.DeviceProfile | None:
    """What the library has read from the driver, from which it makes its plans."""
    library = _load.gpu_kernels()
    if library is None:
        return None
    profile, read = _C.DeviceProfile(), library.liger_ext_gpu_profile
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return profile if read(index, profile.address, profile.size) == 0 else None


def devices() -> list[Device]:
    """All GPUs that torch can use."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            architecture = properties.gcnArchName.split(":")[0]
        else:
            architecture = f"{properties.major}.{properties.minor}"
        code = code_for(architecture)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(index, properties.name, architecture, code, total, free, running_profile(index)))
    return found


def driver() -> str:
    """The kernel driver's version: NVIDIA's or AMD's, "none" or "unknown"."""
    nvidia, amd = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
    if nvidia.exists():
        number = re.search(r"\b\d{3,}\.\d+(\.\d+)?", nvidia.read_text())
        return f"NVIDIA {number.group()}" if number else "NVIDIA, unknown version"
    if amd.exists():
        return f"amdgpu {amd.read_text().strip()}"
    return "unknown" if torch.cuda.is_available() else "none"


def toolkit() -> str:
    """What torch and liger_ext's GPU library were compiled with."""
    of_torch = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    of_torch = of_torch if torch.version.cuda or torch.version.hip else "no GPU toolkit"
    return f"torch with {of_torch}, liger_ext's GPU library with {_C.gpu_compiler}"


def cpu_isa() -> str:
    """The instruction set that the CPU library has chosen: baseline, avx2 or avx512."""
    read = ctypes.CDLL(str(_load.library_folder() / "libliger_ext_cpu.so")).liger_ext_cpu_isa
    read.restype = ctypes.c_char_p
    return read().decode()
