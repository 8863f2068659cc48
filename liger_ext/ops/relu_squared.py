"""Squared ReLU: function, module, and registration of the op."""

from __future__ import annotations

from torch import Tensor, nn

from liger_ext.ops._register import register

__all__ = ["LigerReLUSquared", "liger_relu_squared", "relu_squared"]


def relu_squared(x: Tensor) -> Tensor:
    """Computes ``y = max(x, 0)^2`` (So et al., Primer, arXiv:2109.08668).

    The arithmetic is in float32 (float64 for float64), with one rounding at the end. A NaN stays NaN, as in
    ``F.relu(x).square()``.

    Args:
        x: ``(..., n)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: a tensor without dimensions, or a dtype that is not supported.
    """
    return _relu_squared(x)


class LigerReLUSquared(nn.Module):
    """:func:`liger_ext.functional.relu_squared`: ``max(x, 0)^2``."""

    def forward(self, x: Tensor) -> Tensor:
        return relu_squared(x)


liger_relu_squared = relu_squared


_relu_squared = register("relu_squared", fake=lambda x: x.new_empty(x.shape))
