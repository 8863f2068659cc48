"""The functions of ``liger_kernel.utils``: checks of the installed packages, devices and versions."""

import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch
from packaging.version import Version

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_hip() -> bool:
    return torch.version.hip is not None


def is_npu_available() -> bool:
    """Returns False: liger_ext has no kernels for Ascend."""
    return False


def infer_device() -> str:
    """Returns ``"cuda"``, also for AMD's GPUs, or ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def infer_comm_backend() -> str:
    """Returns the backend of torch.distributed for this machine: ``"nccl"`` or ``"gloo"``."""
    return "nccl" if torch.distributed.is_nccl_available() and torch.cuda.is_available() else "gloo"


def get_total_gpu_memory() -> int:
    """Returns the memory of the first GPU, in GiB.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("get_total_gpu_memory needs a GPU, and torch.cuda.is_available() is False")
    return torch.cuda.get_device_properties(0).total_memory // 1024**3


def transformers_version_dispatch(
    required_version: str,
    before_fn: Callable,
    after_fn: Callable,
    before_args: tuple = (),
    after_args: tuple = (),
    before_kwargs: dict | None = None,
    after_kwargs: dict | None = None,
) -> object:
    """Calls ``after_fn`` with transformers ``required_version`` and newer, and ``before_fn`` with an older one."""
    if Version(importlib.metadata.version("transformers")) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
