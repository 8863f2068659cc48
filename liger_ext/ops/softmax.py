"""Softmax over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import check_device, check_rows, check_same_dtype, check_same_shape
from liger_ext.ops._register import register

_softmax_backward = torch.ops.liger_ext.softmax_backward.default


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


def _fake(x):
    check_rows("softmax", x, "x")
    return x.new_empty(x.shape)


def _fake_backward(dy, y):
    op = "softmax_backward"
    check_device(op, dy, "dy", y, "y")
    check_same_shape(op, dy, "dy", y, "y")
    check_same_dtype(op, dy, "dy", y, "y")
    check_rows(op, y, "y")
    return y.new_empty(y.shape)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)


def _backward(ctx, saved, dy):
    return None if dy is None else _softmax_backward(dy, *saved)


_softmax = register(
    "softmax", fake=_fake, fake_backward=_fake_backward, setup_context=_setup_context, backward=_backward
)
