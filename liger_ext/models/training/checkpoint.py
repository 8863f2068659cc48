"""Which run of a decoder layer inside of a checkpoint this is.

torch.utils.checkpoint runs what it is given once without keeping anything, and again for what the backward needs. What
the second run returns is only differentiated, never read: its last matmuls need not run.
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
    """One call of a layer's forward that a checkpoint makes, and makes again."""

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
    """`function`, by which `layer` checkpoints its forward, so that `run_of` tells its runs, and the layer's input, if
    wanted, waits on the host.

    Only those of what `is_forward` says is the forward, with nothing around it that could read its result, by torch's
    own function without contexts, which may keep what the first run computed. Other functions may do anything.
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


def run_of(layer: nn.Module) -> int:
    """0 outside of a checkpoint of this layer alone, and in graphs, which are the same in each run; else 1, 2, ..."""
    region = None if torch.compiler.is_compiling() else _current.get()
    return region.runs if region is not None and region.layer is layer else 0
