"""Checks whether a GPU library fits this machine's torch, driver and GPU, by comparing versions and architectures.

``misfit_reason`` takes numbers and names only, so that a table of cases can test it. No function of this file loads a
library of liger_ext or initialises a GPU.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_MARK = b"liger_ext build facts: "  # csrc/build_facts.cpp.in


@dataclass(frozen=True)
class BuildFacts:
    """The facts that a library records of its build. ``backend``: cpu, cuda, hip, host or emulated. ``torch``: the
    version whose headers it was built with. ``compiler``: of its kernels, such as "CUDA 12.9.86". ``architectures``: of
    a GPU library, such as "8.0 9.0a 7.5+PTX" or "gfx90a gfx942"."""

    version: str
    torch: str
    backend: str
    compiler: str
    architectures: str


def read_facts(library: Path) -> BuildFacts:
    """Reads the facts from a library's file, without loading it. Raises OSError if the file cannot be read, ValueError
    if it has no facts."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = content.find(_MARK) + len(_MARK)
        if start < len(_MARK):
            raise ValueError(f"{library} is not a library of this version of liger_ext")
        return BuildFacts(**json.loads(content[start : content.find(b"\0", start)]))


@dataclass(frozen=True)
class Machine:
    """The torch and the driver that a GPU library must fit. ``cuda`` and ``hip``: torch's runtime. ``driver``: its name
    and version, or "none". ``driver_cuda``: the newest CUDA that NVIDIA's driver runs."""

    torch: str
    cuda: str | None
    hip: str | None
    driver: str = "none"
    driver_cuda: tuple[int, int] | None = None

    @property
    def backend(self) -> str | None:
        return "cuda" if self.cuda else "hip" if self.hip else None


def this_machine() -> Machine:
    return Machine(torch.__version__, torch.version.cuda, torch.version.hip, gpu_driver(), _driver_cuda())


def gpu_driver() -> str:
    """Returns the kernel driver's name and version: NVIDIA's or AMD's, or "none"."""
    nvidia, amd = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
    if nvidia.exists():
        number = re.search(r"\b\d{3,}\.\d+(\.\d+)?", nvidia.read_text())
        return f"NVIDIA {number.group()}" if number else "NVIDIA, unknown version"
    return f"amdgpu {amd.read_text().strip()}" if amd.exists() else "none"


def _driver_cuda() -> tuple[int, int] | None:
    try:
        driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:  # needs no cuInit
        return None
    return version.value // 1000, version.value % 1000 // 10


def coverage(architectures: str, major: int, minor: int) -> str:
    """Returns the code that a GPU of compute capability major.minor runs from a build for these CUDA architectures
    ("8.0 9.0a 7.5+PTX"): "machine code", "PTX" (compiled by the driver at the first call) or "nothing".

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


def code_for(architecture: str, libraries: Mapping[str, BuildFacts]) -> str:
    """Returns the code that libraries have for an architecture ("9.0", "gfx942"): "machine code", "PTX", "nothing"."""
    is_amd = architecture.startswith("gfx")
    library = libraries.get("hip" if is_amd else "cuda")
    if library is None:
        return "nothing"
    if is_amd:
        return "machine code" if architecture in library.architectures.split() else "nothing"
    return coverage(library.architectures, *map(int, architecture.split(".")))


def rebuild(architecture: str) -> str:
    """Returns the command that builds a library with code for an architecture."""
    backend, variable = "cuda", "LIGER_EXT_CUDA_ARCHS"
    if architecture.startswith("gfx"):
        backend, variable = "hip", "LIGER_EXT_HIP_ARCHS"
    install = "pip install --no-build-isolation --force-reinstall --no-deps ."
    return f"LIGER_EXT_GPU={backend} {variable}={architecture} {install}"


def misfit_reason(
    libraries: Mapping[str, BuildFacts], version: str, machine: Machine, architecture: str | None = None
) -> str | None:
    """Returns a sentence that explains why no library of ``libraries`` (by backend) fits this machine and names the
    remedy; None if one fits. ``version``: the package's. ``architecture``: of one GPU ("9.0", "gfx942"); None: the
    check is independent of the GPU.
    """
    library = libraries.get(machine.backend)
    if machine.backend is None:
        found = "" if machine.driver == "none" else f", though this machine has a driver for GPUs ({machine.driver})"
        return (
            f"torch {machine.torch} is a build for the CPU only{found}, so liger_ext's GPU library is not loaded. "
            "For a GPU, install a torch for CUDA or ROCm"
        )
    runtime, toolkit = ("CUDA", "CUDA's nvcc") if machine.cuda else ("ROCm", "ROCm")
    if library is None:
        return (
            f"this liger_ext has no library for {runtime}, which torch {machine.torch} is built for (it has: "
            f"{', '.join(['cpu', *libraries])}). Install a wheel that has it, or install {toolkit} and build again: "
            "pip install --no-build-isolation ."
        )
    if library.version != version:
        return (
            f"liger_ext's {runtime} library is of version {library.version}, the package of version {version}. "
            "Remove liger_ext and install it again"
        )
    built, runs = tuple(map(int, re.findall(r"\d+", library.compiler)[:2])), machine.driver_cuda
    newer = machine.cuda is not None and runs is not None and built > runs
    if newer and built[0] > runs[0]:  # CUDA guarantees that machine code runs within one major version
        return (
            f"liger_ext's CUDA library is built with CUDA {built[0]}.{built[1]}, and the driver ({machine.driver}) "
            f"runs CUDA up to {runs[0]}.{runs[1]}. Update the driver, or install a liger_ext built with CUDA {runs[0]}"
        )
    if architecture is None:
        return None
    code = code_for(architecture, {machine.backend: library})
    if code == "nothing":
        return (
            f"liger_ext's {runtime} library has no code for {architecture}; it was built for {library.architectures}. "
            f"Build it again, in liger_ext's source folder: {rebuild(architecture)}"
        )
    if code == "PTX" and newer:
        return (
            f"liger_ext's CUDA library has only PTX for {architecture}, made by CUDA {built[0]}.{built[1]}, and the "
            f"driver ({machine.driver}) compiles PTX of CUDA {runs[0]}.{runs[1]} and older. Update the driver"
        )
    return None
