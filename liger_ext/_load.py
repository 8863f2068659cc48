"""Finds and loads the native libraries, and explains why the GPU library is not loaded.

``libliger_ext_cpu.so`` (schemas and the CPU backend) must load. ``libliger_ext_cuda.so`` or ``libliger_ext_hip.so`` is
loaded if it exists and fits torch and the driver. The environment variable ``LIGER_EXT_LIB`` names another folder for
these libraries, for developers with several builds. Import this module before ``_C``: it raises an error with advice if
``_C`` is absent.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import os
import sys
import sysconfig
from pathlib import Path

import torch

from . import _fit

MINIMUM_TORCH = (2, 11)

cpu_facts: _fit.BuildFacts
gpu_facts: dict[str, _fit.BuildFacts] = {}
"""The build facts of each GPU library in the folder, by backend, whether it is loaded or not."""
_gpu_error: str | None = None
_folder: Path


def library_folder() -> Path:
    """Returns the folder from which the libraries are loaded."""
    return Path(os.environ.get("LIGER_EXT_LIB") or Path(__file__).parent / "lib").resolve()


def gpu_library() -> Path:
    """Returns the path of the GPU library for torch's build, whether the file exists or not."""
    return library_folder() / f"libliger_ext_{'hip' if torch.version.hip else 'cuda'}.so"


def gpu_available() -> bool:
    """Returns whether the GPU library is loaded. It may be loaded on a machine without a GPU."""
    return _gpu_error is None


def gpu_status() -> str:
    """Returns a sentence that names the loaded GPU library, or explains why none is loaded and names the remedy."""
    return f"loaded {gpu_library()}" if _gpu_error is None else _gpu_error


def gpu_kernels() -> ctypes.CDLL | None:
    """Returns the loaded library that launches GPU kernels: the GPU library, or the host target if it replaces the CPU
    library (CONTRIBUTING.md). None without either."""
    library = ctypes.CDLL(str(gpu_library() if gpu_available() else _folder / "libliger_ext_cpu.so"))
    return library if hasattr(library, "liger_ext_gpu_profile") else None


def _check_torch_version() -> None:
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed < MINIMUM_TORCH:
        needed = ".".join(map(str, MINIMUM_TORCH))
        raise ImportError(
            f"liger_ext needs torch >= {needed}, but torch {torch.__version__} is installed. Upgrade torch."
        )


def _check_python(package: Path) -> None:
    """Imports the module ``_C``; raises ImportError if it does not exist for this Python or does not load."""
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    if any((package / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        try:
            importlib.import_module("liger_ext._C")
        except ImportError as error:
            raise ImportError(
                f"liger_ext's module for {here} does not load: {error}. Install liger_ext again."
            ) from error
        return
    tags = sorted((path.name.split("-")[1] for path in package.glob("_C.cpython-*.so")), key=lambda tag: int(tag[1:]))
    served = ", ".join(f"{tag[0]}.{tag[1:]}" for tag in tags)
    if not served:
        raise _absent(package, f"module {package / '_C'}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise ImportError(
            f"liger_ext has no module for a free-threaded Python ({sys.executable} is one); it has one for each of "
            f"Python {served}. Use a Python with the GIL."
        )
    raise ImportError(
        f"liger_ext in {package} is built for Python {served}, and {sys.executable} is {here}. Install it with this "
        f"Python: {sys.executable} -m pip install --force-reinstall --no-deps liger_ext"
    )


def _absent(package: Path, what: str) -> ImportError:
    """Returns the error for a missing file of the package."""
    if (package.parent / "CMakeLists.txt").exists():
        advice = (
            "these sources are not built. Run `make build` or `pip install --no-build-isolation -e .` there; or leave "
            "this folder, whose sources hide an installed liger_ext"
        )
    else:
        advice = "install liger_ext again: pip install --force-reinstall --no-deps liger_ext"
    return ImportError(f"liger_ext's {what} does not exist: {advice}.")


def _claim_process(folder: Path) -> None:
    # Two copies of the libraries in one process define the same ops twice and crash it. torch.ops survives a
    # re-import of this package, so the folder's path is stored there.
    namespace = vars(torch.ops.liger_ext)
    loaded = namespace.setdefault("_library_folder", folder)
    if loaded != folder:
        raise ImportError(
            f"liger_ext is already loaded in this process from {loaded}; a second copy from {folder} cannot be. "
            "Remove one of the two from sys.path (or unset LIGER_EXT_LIB)."
        )


def _load_gpu(folder: Path) -> str | None:
    """Loads the GPU library that fits this machine. Returns None, or the reason why none is loaded."""
    for backend in ("cuda", "hip"):
        if (path := folder / f"libliger_ext_{backend}.so").exists():
            try:
                gpu_facts[backend] = _fit.read_facts(path)
            except (OSError, ValueError) as error:
                return f"liger_ext's GPU library {path} cannot be read: {error}. Install liger_ext again"
    machine = _fit.this_machine()
    if reason := _fit.misfit_reason(gpu_facts, cpu_facts.version, machine):
        return reason
    try:
        torch.ops.load_library(gpu_library())
    except OSError as error:
        return f"liger_ext's GPU library does not load with torch {torch.__version__} ({machine.backend}): {error}"
    return None


def load() -> None:
    """Loads the libraries into the process, once."""
    global _gpu_error, _folder, cpu_facts
    _check_torch_version()
    package = Path(__file__).parent
    _check_python(package)
    _folder = library_folder()
    path = _folder / "libliger_ext_cpu.so"
    if not path.exists():
        if os.environ.get("LIGER_EXT_LIB"):
            raise ImportError(f"the environment variable LIGER_EXT_LIB names {_folder}, which has no {path.name}.")
        raise _absent(package, f"library {path}")
    _claim_process(_folder)
    try:
        torch.ops.load_library(path)
        cpu_facts = _fit.read_facts(path)
    except (OSError, ValueError) as error:
        raise ImportError(f"liger_ext's library does not load with torch {torch.__version__}: {error}") from error
    if (plans := _fit.read_facts(package / "lib" / "libliger_ext_plans.so").version) != cpu_facts.version:
        raise ImportError(
            f"liger_ext is mixed of two versions: {path} is of {cpu_facts.version}, its launch plans are of {plans}. "
            "Remove liger_ext and install it again."
        )
    _gpu_error = _load_gpu(_folder)


load()
