"""What this machine is and what of liger_ext will run on it, in words: ``python -m liger_ext``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

import torch

from . import _C, _load

TRANSFORMERS_RANGE = ("4.51.3", "5.23.0")  # the versions that the tests ran with, from oldest to newest


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())


def gpu_covered(architectures: str, major: int, minor: int) -> bool:
    """Does a build for these CUDA architectures ("8.0 9.0a 7.5+PTX") run on a GPU of compute capability major.minor?

    Code for a capability runs on later ones of its major version, "9.0a" on 9.0 alone, PTX on everything later.
    """
    for architecture in architectures.split():
        number = tuple(int(part) for part in architecture.removesuffix("+PTX").rstrip("af").split("."))
        if architecture.endswith("+PTX"):
            covered = number <= (major, minor)
        elif architecture.endswith("a"):
            covered = number == (major, minor)
        else:
            covered = number[0] == major and number[1] <= minor
        if covered:
            return True
    return False


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return ["none that torch can use"]
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            architecture = properties.gcnArchName.split(":")[0]
            covered = _C.gpu_backend == "hip" and architecture in _C.gpu_architectures.split()
        else:
            architecture = f"{properties.major}.{properties.minor}"
            covered = _C.gpu_backend == "cuda" and gpu_covered(_C.gpu_architectures, properties.major, properties.minor)
        verdict = "covered by this build" if covered else "NOT covered by this build"
        memory = properties.total_memory / 2**30
        lines.append(f"{index}: {properties.name}, {architecture}, {memory:.0f} GiB: {verdict}")
    return lines


def _transformers() -> str:
    if importlib.util.find_spec("transformers") is None:
        return "not installed (the ops and modules need no transformers, the Llama patch does)"
    version = importlib.metadata.version("transformers")
    oldest, newest = TRANSFORMERS_RANGE
    if _numbers(version) < _numbers(oldest):
        return f"{version}: too old, the Llama patch needs {oldest} or newer"
    if _numbers(version) > _numbers(newest):
        return f"{version}: newer than {newest}, the newest that was tested"
    return f"{version}: supported"


def report() -> list[tuple[str, list[str]]]:
    """What is installed: headings, and lines under each."""
    isa, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    gpu_build = f"{_C.gpu_backend} for {_C.gpu_architectures}" if _C.gpu_backend != "none" else "not built"
    return [
        ("liger_ext", [f"{_C.version} in {Path(__file__).parent}, built with torch {_C.torch_version}"]),
        ("torch", [torch.__version__]),
        ("transformers", [_transformers()]),
        ("CPU library", [f"{_load.library_folder() / 'libliger_ext_cpu.so'}"]),
        ("GPU library", [gpu_build, _load.gpu_status()]),
        ("CPU", [f"{_cpu()}, {threads} threads; torch uses {isa}"]),
        ("GPU", _devices()),
    ]


def main() -> int:
    """Prints the report; the exit status."""
    for heading, lines in report():
        for number, line in enumerate(lines):
            print(f"{heading if number == 0 else '':14}{line}")
    return 0
