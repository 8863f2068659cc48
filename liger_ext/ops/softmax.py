"""Softmax over the last dimension: function, module, and registration of the op."""

from __future__ import annotations

from torch import Tensor, nn

from liger_ext.ops._checks import check_integer, check_tensors, shape_text
from liger_ext.ops._register import register

__all__ = ["LigerSoftmax", "liger_softmax", "softmax"]


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Computes ``y = exp(x - max(x)) / sum(exp(x - max(x)))`` over the last dimension.

    The arithmetic is in float32 (float64 for float64), with one rounding at the end.

    Args:
        x: ``(..., n)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.
        dim: the last dimension, -1 or ``x.dim() - 1``. For another dimension:
            ``softmax(x.transpose(dim, -1)).transpose(dim, -1)``.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        TypeError: ``dim`` is no integer.
        ValueError: a tensor without dimensions, a ``dim`` that is not the last one, or a dtype that is not supported.
    """
    if type(dim) is not int or dim != -1:
        _check_dim(x, dim)
    return _softmax(x)


def _check_dim(x: Tensor, dim: int) -> None:
    check_tensors("softmax", x=x)
    check_integer("softmax", dim=dim)
    if x.dim() and dim not in (-1, x.dim() - 1):
        raise ValueError(
            f"softmax: dim is {dim}, expected the last dimension of x, -1 or {x.dim() - 1}: x has shape "
            f"{shape_text(x)}. For another one: softmax(x.transpose(dim, -1)).transpose(dim, -1)"
        )


class LigerSoftmax(nn.Module):
    """:func:`liger_ext.functional.softmax`: softmax over the last dimension.

    Args:
        dim: the last dimension of the input, as -1 or as its index.
    """

    dim = -1  # for instances that were pickled by versions without this attribute

    def __init__(self, dim: int = -1):
        super().__init__()
        check_integer("LigerSoftmax", dim=dim)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


liger_softmax = softmax


_softmax = register("softmax", fake=lambda x: x.new_empty(x.shape), fake_backward=lambda y: y.new_empty(y.shape))
