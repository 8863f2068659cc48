"""Replaces verl's ``linear_cross_entropy`` by this library's op: :func:`install`.

verl (0.9) calls the function in its FSDP engine with ``use_fused_kernels=True`` and the backend "triton", and looks it
up at each call.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_ext.functional import linear_log_probs

if TYPE_CHECKING:
    from liger_ext.models.patching.handle import PatchHandle

__all__ = ["install", "linear_cross_entropy"]

_MODULE, _NAME = "verl.utils.kernel.linear_cross_entropy", "linear_cross_entropy"
_PARAMETERS = ("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: torch.distributed.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the log-probability of each label and the entropy at its position, by :func:`linear_log_probs`.

    Args:
        hidden: ``(..., hidden_size)``.
        weight: ``(vocab_size, hidden_size)``.
        labels: the shape of hidden without its last dimension, int64; -100 is ignored.
        temperature: as in linear_log_probs; verl's function takes only a number.
        reduction: "none".
        dist_process_group: None, or a group of one process.

    Returns:
        The log-probabilities and the entropies, float32, ``(tokens,)``: flat, as verl's. Both are differentiable.

    Raises:
        ValueError: another reduction, or a group of several processes. For such a group linear_log_probs sums the
            gradient of hidden over the processes, while verl's function leaves the sum to Megatron.
    """
    if reduction != "none":
        raise ValueError(f"linear_cross_entropy: reduction is {reduction!r}, expected 'none'")
    if _processes(dist_process_group) > 1:
        raise ValueError("linear_cross_entropy: dist_process_group has several processes, expected None or one process")
    if isinstance(temperature, Tensor):
        temperature = temperature.reshape(-1)
    found = linear_log_probs(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), temperature=temperature, entropy=True
    )
    return found.log_probs, found.entropy


def install() -> PatchHandle:
    """Runs verl's ``linear_cross_entropy`` in this process on :func:`linear_cross_entropy`.

    Calls with a group of several processes (Megatron's tensor parallelism) or with another reduction still run verl's
    function, and so do calls of modules that imported the function by name before. If verl's function has other
    parameters, or other code has replaced it, verl runs unchanged, and a warning gives the reason.

    Returns:
        A handle, whose ``.revert()`` restores verl's function. As a context manager it reverts at the end.

    Raises:
        ImportError: verl is not installed.
    """
    from liger_ext.models.patching.handle import PatchHandle

    handle = PatchHandle()
    module = importlib.import_module(_MODULE)
    found, stock = getattr(module, _NAME, None), getattr(module, "LinearCrossEntropy", None)
    if getattr(found, "__wrapped__", None) is linear_cross_entropy:
        return handle
    reason = _refusal_reason(found, stock)
    if reason is not None:
        warnings.warn(f"liger_ext.verl.install: {reason}; verl runs unchanged", stacklevel=2)
        return handle
    handle.replace(module, _NAME, _or_stock(found))
    return handle


def _processes(group: torch.distributed.ProcessGroup | None) -> int:
    return 1 if group is None else torch.distributed.get_world_size(group)


def _or_stock(stock: Callable) -> Callable:
    def function(hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        taken = reduction == "none" and _processes(dist_process_group) == 1
        return (linear_cross_entropy if taken else stock)(
            hidden, weight, labels, temperature, reduction, dist_process_group
        )

    function.__name__, function.__wrapped__ = _NAME, linear_cross_entropy
    return function


def _refusal_reason(found: object, stock: object) -> str | None:
    if found is None or stock is None:
        return f"this version of verl has no {_MODULE}.{_NAME}"
    if found != stock.apply:
        return f"{_MODULE}.{_NAME} was replaced by {found!r}"
    parameters = tuple(inspect.signature(stock.forward).parameters)
    if parameters != _PARAMETERS:
        return f"{_MODULE}.{_NAME} takes {', '.join(parameters)}, expected {', '.join(_PARAMETERS)}"
    return None
