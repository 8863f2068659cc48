"""LayerNorm: functions, module, fake implementation and autograd formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_ext.ops._checks import accumulator
from liger_ext.ops._modules import NormModule, last_size
from liger_ext.ops._register import register

__all__ = ["LigerLayerNorm", "layer_norm", "liger_layer_norm"]


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Applies layer normalisation over the last dimension (Ba, Kiros and Hinton, 2016, arXiv:1607.06450).

    ``y = (x - mean) * rstd * weight + bias`` with ``rstd = 1 / sqrt(var + eps)`` and the biased variance. Statistics
    and all arithmetic are in float32 (float64 for float64), with one rounding at the end; the backward sums the
    gradients of weight and bias in float32 over all rows.

    Args:
        x: ``(..., hidden_size)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.
        weight, bias: ``(hidden_size,)`` or None; their dtypes may differ from that of ``x``.
        eps: added to the variance.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: a dtype that is not supported, or a weight or bias of another shape or device.
    """
    return _layer_norm(x, weight, bias, eps)[0]


class LigerLayerNorm(NormModule):
    """:func:`liger_ext.functional.layer_norm` as a module with a weight and a bias.

    Args:
        hidden_size: size of the last dimension of the input.
        eps: added to the variance.
        bias: accepted for compatibility, without effect: the module has a bias parameter either way, as in
            Liger-Kernel's checkpoints, and it is initialised with zeros (Liger-Kernel: random values if True).
            ``bias=False`` of ``torch.nn.LayerNorm`` is ``with_bias=False`` here.
        init_fn: the initial values of the weight: ``"ones"`` or ``"zeros"``.
        impl, mode, backend: accepted for compatibility, without effect.
        elementwise_affine: False: neither weight nor bias.
        with_bias: False: no bias parameter.
        device, dtype: of the parameters; by default torch's.

    Raises:
        TypeError, ValueError: ``hidden_size`` is no positive integer, or ``init_fn`` another value.
    """

    bias: nn.Parameter  # or None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        impl: str | None = None,
        mode: str | None = None,
        backend: str | None = None,
        *,
        elementwise_affine: bool = True,
        with_bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden_size = last_size(self, "hidden_size", hidden_size)
        self.hidden_size = hidden_size
        has_bias = elementwise_affine and with_bias
        self._make_parameters(hidden_size, init_fn, eps, device, dtype, weight=elementwise_affine, bias=has_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}{self._absent('elementwise_affine')}"


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """Calls :func:`liger_ext.functional.layer_norm`."""
    return layer_norm(X, W, B, eps)


def _fake(x):
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_backward(x, weight, bias_dtype, need_dx, need_dweight, need_dbias):
    return fake_gradients(x, weight, x.shape[-1:], bias_dtype, need_dx, need_dweight, need_dbias)


def fake_gradients(x, weight, bias_shape, bias_dtype, need_dx, need_dweight, need_dbias):
    """Returns the gradients of a norm's input, weight and bias without data. A gradient that is not needed, or whose
    parameter is None, is empty."""
    dweight = x.new_empty(0) if weight is None else weight.new_empty(weight.shape if need_dweight else 0)
    need_dbias = need_dbias and bias_dtype is not None
    dbias = x.new_empty(bias_shape if need_dbias else 0, dtype=x.dtype if bias_dtype is None else bias_dtype)
    return x.new_empty(x.shape if need_dx else 0), dweight, dbias


_layer_norm = register("layer_norm", fake=_fake, fake_backward=_fake_backward)
