"""Squared ReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import check_device, check_rows, check_same_dtype, check_same_shape
from liger_ext.ops._register import register

_relu_squared_backward = torch.ops.liger_ext.relu_squared_backward.default


def relu_squared(x: Tensor) -> Tensor:
    """``y = max(x, 0)^2`` (So et al., Primer, arXiv:2109.08668).

    Computed in float32 (float64 for float64), with one rounding at the end. A NaN stays one, as in
    ``F.relu(x).square()``.

    Args:
        x: ``(..., n)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: a tensor without dimensions, or a dtype that is not supported.
    """
    return _relu_squared(x)


def _fake(x):
    check_rows("relu_squared", x, "x")
    return x.new_empty(x.shape)


def _fake_backward(dy, x):
    op = "relu_squared_backward"
    check_device(op, dy, "dy", x, "x")
    check_same_shape(op, dy, "dy", x, "x")
    check_same_dtype(op, dy, "dy", x, "x")
    check_rows(op, x, "x")
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, saved, dy):
    return None if dy is None else _relu_squared_backward(dy, *saved)


_relu_squared = register(
    "relu_squared", fake=_fake, fake_backward=_fake_backward, setup_context=_setup_context, backward=_backward
)
