"""Finds and loads the two libraries, and says why the GPU one is missing where it is.

``libliger_ext_cpu.so`` (schemas and the CPU backend) must load; ``libliger_ext_gpu.so`` may be absent. The environment
variable ``LIGER_EXT_LIB`` names another folder to take them from, for developers with several builds.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

MINIMUM_TORCH = (2, 11)

_gpu_error: str | None = None
_folder: Path


def library_folder() -> Path:
    """The folder that the libraries are, or will be, loaded from."""
    return Path(os.environ.get("LIGER_EXT_LIB") or Path(__file__).parent / "lib").resolve()


def gpu_available() -> bool:
    """Is the GPU library loaded? (Says nothing about whether there is a GPU.)"""
    return _gpu_error is None


def gpu_status() -> str:
    """One sentence: which GPU library is loaded, or why none is and what to do about it."""
    return f"loaded {_folder / 'libliger_ext_gpu.so'}" if _gpu_error is None else _gpu_error


def gpu_kernels() -> ctypes.CDLL | None:
    """The loaded library that launches the GPU's kernels: the GPU library, or the host target where that has taken the
    CPU library's place (CONTRIBUTING.md)."""
    name = "libliger_ext_gpu.so" if gpu_available() else "libliger_ext_cpu.so"
    library = ctypes.CDLL(str(_folder / name))
    return library if hasattr(library, "liger_ext_gpu_profile") else None


def _check_torch_version() -> None:
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"liger_ext needs torch >= {needed}, but torch {torch.__version__} is installed. Upgrade torch."
        )


def _claim_process(folder: Path) -> None:
    # Two copies of the libraries in one process define the same ops twice and crash it. torch.ops outlives any
    # re-import of this package, so the folder is remembered there.
    namespace = vars(torch.ops.liger_ext)
    loaded = namespace.setdefault("_library_folder", folder)
    if loaded != folder:
        raise ImportError(
            f"liger_ext is already loaded in this process from {loaded}; a second copy from {folder} cannot be. "
            "Remove one of the two from sys.path (or unset LIGER_EXT_LIB)."
        )


def _load_gpu(folder: Path) -> str | None:
    """Loads the GPU library; returns why it could not."""
    runtime = "CUDA" if torch.version.cuda else "ROCm" if torch.version.hip else None
    if runtime is None:
        return f"torch {torch.__version__} is a build for the CPU only, so liger_ext's GPU library is not loaded"
    path = folder / "libliger_ext_gpu.so"
    if not path.exists():
        toolkit = "CUDA's nvcc" if runtime == "CUDA" else "ROCm"
        return (
            f"liger_ext was built without its GPU library ({path} does not exist). Install {toolkit} and build again: "
            "pip install --no-build-isolation ."
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"liger_ext's GPU library does not load with torch {torch.__version__} ({runtime} build): {error}"
    return None


def load() -> None:
    """Loads the libraries into the process, once."""
    global _gpu_error, _folder
    _check_torch_version()
    _folder = library_folder()
    path = _folder / "libliger_ext_cpu.so"
    if not path.exists():
        raise ImportError(
            f"liger_ext's library {path} does not exist: the package is not built. In its source folder run: "
            "pip install --no-build-isolation ."
        )
    _claim_process(_folder)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"liger_ext's library does not load with torch {torch.__version__}: {error}") from error
    _gpu_error = _load_gpu(_folder)


load()
