"""liger_ext: Liger-Kernel's training kernels as native PyTorch ops for NVIDIA and AMD GPUs and the CPU."""

import importlib

from liger_ext import _load, _tuned, compat, functional, modules  # _load is first: it loads the libraries
from liger_ext import losses as losses
from liger_ext.compat import *  # noqa: F403
from liger_ext.functional import *  # noqa: F403
from liger_ext.models import FAMILIES as _FAMILIES
from liger_ext.modules import *  # noqa: F403

__version__ = _load.cpu_facts.version
_tuned.load()

# Patching needs transformers, which is imported when one of these is first used.
_PATCHING = (
    "AutoLigerKernelForCausalLM",
    "apply_liger_kernel",
    "apply_liger_kernel_to_instance",
    *(f"apply_liger_kernel_to_{model_type}" for model_type in _FAMILIES),
)

__all__ = [*_PATCHING, *compat.__all__, *functional.__all__, *modules.__all__]


def __getattr__(name: str):
    if name in _PATCHING:
        return getattr(importlib.import_module("liger_ext.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PATCHING})
