"""Softmax over the last dimension."""

from __future__ import annotations

from torch import Tensor, nn

from liger_ext.ops._register import register_row_op

__all__ = ["LigerSoftmax", "liger_softmax", "softmax"]


def softmax(x: Tensor) -> Tensor:
    """``y = exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension.

    Computed in float32 (float64 for float64), with one rounding at the end.

    Args:
        x: ``(..., n)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: a tensor without dimensions, or a dtype that is not supported.
    """
    return _softmax(x)


class LigerSoftmax(nn.Module):
    """:func:`liger_ext.functional.softmax`: softmax over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x)


liger_softmax = softmax


_softmax = register_row_op("softmax", keeps_output=True)
