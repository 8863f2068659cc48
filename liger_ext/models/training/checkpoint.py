"""Counts the runs of a decoder layer inside a checkpoint.

torch.utils.checkpoint runs a function once without saving tensors, and a second time, in the backward, to compute the
tensors that the backward needs. The result of the second run is only differentiated, never read, so in that run the
layer leaves out the matmuls that only compute the result.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from liger_ext.models.patching.forwards import find_foreign
from liger_ext.models.training.offload import inputs_on_host

_current: contextvars.ContextVar[_Region | None] = contextvars.ContextVar("region", default=None)


class _Region:
    """A layer's forward that a checkpoint calls once, and again in the backward."""

    def __init__(self, layer: nn.Module, forward: Callable) -> None:
        self.layer, self.forward, self.runs = layer, forward, 0

    def __call__(self, *args, **kwargs):
        self.runs += 1
        outer = _current.set(self)
        try:
            return self.forward(*args, **kwargs)
        finally:
            _current.reset(outer)


def counting_runs(
    layer: nn.Module, function: Callable, is_forward: Callable[[Callable], bool], on_host: bool
) -> Callable:
    """Wraps `function`, by which `layer` checkpoints its forward: `checkpoint_run` then counts the runs, and with
    `on_host` the layer's input waits in host memory.

    Counts only a forward that `is_forward` accepts: nothing around it may read its result. Returns `function` itself if
    it is not torch's own checkpoint, or has a `context_fn`, which may store results of the first run.
    """
    is_partial = isinstance(function, functools.partial)
    called, options = (function.func, function.keywords) if is_partial else (function, {})
    foreign = find_foreign(called, "torch.utils.checkpoint", "checkpoint", trusted=("torch",)) is not None
    if foreign or "context_fn" in options:
        return function

    def run(forward: Callable, *args, **kwargs):
        waits = on_host and args and isinstance(args[0], Tensor)
        with inputs_on_host(args[0]) if waits else contextlib.nullcontext():
            return function(_Region(layer, forward) if is_forward(forward) else forward, *args, **kwargs)

    return run


def checkpoint_run(layer: nn.Module) -> int:
    """Returns the number of the current run, 1, 2, ... Returns 0 outside a checkpoint of exactly this layer, and in a
    graph of torch.compile, because every run executes the same graph."""
    region = None if torch.compiler.is_compiling() else _current.get()
    return region.runs if region is not None and region.layer is layer else 0


def is_differentiated() -> bool:
    """Returns whether a backward may follow: gradients are on, or a checkpoint runs a layer. A reentrant checkpoint's
    first run has gradients off."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and _current.get() is not None)
