"""Which run of a decoder layer inside of a checkpoint this is.

torch.utils.checkpoint runs what it is given once without keeping anything, and again for what the backward needs. What
the second run returns is only differentiated, never read: its last matmuls need not run.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def counting_runs(layer: nn.Module, function: Callable) -> Callable:
    """`function`, by which `layer` checkpoints its forward, so that `run_of` tells its runs; others than torch's own,
    which may do anything, and those with contexts, which may keep what the first run computed, are left alone."""
    options = function.keywords if isinstance(function, functools.partial) else {}
    called = function.func if isinstance(function, functools.partial) else function
    if called is not checkpoint or "context_fn" in options:
        return function
    return lambda forward, *args, **kwargs: function(_Region(layer, forward), *args, **kwargs)


def run_of(layer: nn.Module) -> int:
    """0 outside of a checkpoint of this layer alone, and in graphs, which are the same in each run; else 1, 2, ..."""
    region = None if torch.compiler.is_compiling() else _current.get()
    return region.runs if region is not None and region.layer is layer else 0
