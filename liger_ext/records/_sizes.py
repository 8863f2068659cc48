"""Sizes of intermediate values, for the records' scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator

Tensors = Mapping[str, Tensor]


def stored_steps(dtype: torch.dtype) -> float:
    """How many roundings of the accumulator (in fours, as the rule counts them) one rounding to ``dtype`` is worth."""
    return max(1.0, torch.finfo(dtype).eps / torch.finfo(accumulator(dtype)).eps / 4)


def peak(t: Tensor) -> Tensor:
    """The largest magnitude of each row, kept as a column."""
    return t.abs().amax(-1, keepdim=True) if t.shape[-1] else t.new_zeros(*t.shape[:-1], 1)
