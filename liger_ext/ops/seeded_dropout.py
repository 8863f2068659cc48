"""Registers ``torch.ops.liger_ext.seeded_dropout`` and ``seeded_dropout_add_``, LoRA's dropout in the autograd nodes of
patched models. Their masks depend on seed, stream, row and column only, so that a backward computes them again
(csrc/kernels/seeded_dropout.h). The ops have no public function.

* ``seeded_dropout(x, seed, stream, count, first_row, p)`` returns the dropouts of x, [rows, columns], with `count`
  masks, of the streams from `stream` on: [count, rows, columns].
* ``seeded_dropout_add_(total, x, seed, stream, first_row, p)`` adds the dropouts of the matrices x, [count, rows,
  columns], each with its own mask, to `total`, and rounds the sum once.

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
        (seed,), (stream, _, first_row, p) = ctx.saved_tensors, ctx.options
        torch.ops.liger_ext.seeded_dropout_add_(dx := dy.new_zeros(dy.shape[1:]), dy, seed, stream, first_row, p)
        return dx, None, None, None, None, None


def _add_(total: Tensor, x: Tensor, seed: Tensor, stream: int, first_row: int, p: float) -> None:
    """Computes ``seeded_dropout_add_`` with its bits, by ops that autograd records."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [_dropout(part.to(wide), seed, stream + i, 1, first_row, p)[0] for i, part in enumerate(x)]
    total.copy_(sum(parts, total.to(wide)))


register_without_derivative(
    "seeded_dropout",
    lambda x, count: x.new_empty((count, *x.shape)),
    lambda *args: applied(_SeededDropout, *args),
)
register_without_derivative("seeded_dropout_add_", lambda: None, _add_)
