"""Lists the GPUs of this machine, and for each GPU whether liger_ext's GPU library has machine code, PTX or nothing for
it. Also names the driver, the compilers and the CPU's instruction set. The doctor and tune use both."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _C, _fit, _load


@dataclass(frozen=True)
class Device:
    """A GPU that torch can use. ``code``: the code that liger_ext's build has for it: "machine code", "PTX" or
    "nothing"."""

    index: int
    name: str
    architecture: str
    code: str
    total_bytes: int
    free_bytes: int
    profile: _C.DeviceProfile | None  # None where liger_ext's GPU library is not loaded


def running_profile(index: int) -> _C.DeviceProfile | None:
    """Returns the device profile that the GPU library reads from the driver and plans launches for; None without a
    library."""
    library = _load.gpu_kernels()
    if library is None:
        return None
    profile, read = _C.DeviceProfile(), library.liger_ext_gpu_profile
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return profile if read(index, profile.address, profile.size) == 0 else None


def devices() -> list[Device]:
    """Returns all GPUs that torch can use."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            architecture = properties.gcnArchName.split(":")[0]
        else:
            architecture = f"{properties.major}.{properties.minor}"
        code = _fit.code_for(architecture, _load.gpu_facts)
        free, total = torch.cuda.mem_get_info(index)
        found.append(Device(index, properties.name, architecture, code, total, free, running_profile(index)))
    return found


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())}, {torch.get_num_threads()} threads"


def driver() -> str:
    """Returns the kernel driver's name and version: NVIDIA's or AMD's, "none" or "unknown"."""
    found = _fit.gpu_driver()
    return "unknown" if found == "none" and torch.cuda.is_available() else found


def toolkit() -> str:
    """Returns the compilers of torch and of liger_ext's GPU libraries, in words."""
    torch_toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    torch_toolkit = torch_toolkit if torch.version.cuda or torch.version.hip else "no GPU toolkit"
    our_compilers = ", ".join(facts.compiler for facts in _load.gpu_facts.values())
    return f"torch with {torch_toolkit}, liger_ext's GPU library with {our_compilers or 'none'}"


def cpu_isa() -> str:
    """Returns the instruction set that the CPU library has chosen: baseline, avx2 or avx512."""
    read = ctypes.CDLL(str(_load.library_folder() / "libliger_ext_cpu.so")).liger_ext_cpu_isa
    read.restype = ctypes.c_char_p
    return read().decode()
