"""Registers ``torch.ops.liger_ext.seeded_dropout`` and ``seeded_dropout_add_``, LoRA's dropout in the autograd nodes of
patched models. Their mask depends on seed, stream, row and column only, so that a backward computes it again
(csrc/kernels/seeded_dropout.h). The ops have no public function.

Dropout is linear in x, and its derivative is the same dropout. So both ops have derivatives of any order, which a node
needs if its backward runs with ``create_graph=True``."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._register import applied, register_without_derivative

__all__: list[str] = []

_dropout = torch.ops.liger_ext.seeded_dropout.default


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, *options):
        ctx.save_for_backward(seed)
        ctx.options = options
        with torch._C._AutoDispatchBelowAutograd():
            return _dropout(x, seed, *options)

    @staticmethod
    def backward(ctx, dy):
        return _dropout(dy, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _add_(total: Tensor, x: Tensor, *arguments) -> None:
    """Computes ``seeded_dropout_add_`` with its bits, by ops that autograd records."""
    total.add_(_dropout(x.to(torch.promote_types(x.dtype, torch.float32)), *arguments))


register_without_derivative(
    "seeded_dropout", lambda x, *_: x.new_empty(x.shape), lambda *args: applied(_SeededDropout, *args)
)
register_without_derivative("seeded_dropout_add_", lambda *_: None, _add_)
