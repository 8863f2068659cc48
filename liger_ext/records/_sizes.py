"""Helpers that compute the records' scales: the magnitudes of intermediate values, to which rounding errors are
proportional."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator

Tensors = Mapping[str, Tensor]


def stored_steps(dtype: torch.dtype) -> float:
    """Returns the error of one rounding to ``dtype`` in units of four roundings of the accumulator, as the rule counts
    them; at least 1."""
    return max(1.0, torch.finfo(dtype).eps / torch.finfo(accumulator(dtype)).eps / 4)


def peak(t: Tensor) -> Tensor:
    """Returns the largest magnitude of each row, with shape ``(..., 1)``."""
    return t.abs().amax(-1, keepdim=True) if t.shape[-1] else t.new_zeros(*t.shape[:-1], 1)
