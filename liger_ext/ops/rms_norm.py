"""RMSNorm, and RMSNorm of a sum (a norm fused with the residual connection before it): functions and modules."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import CASTING_MODES, accumulator, mode_code
from liger_ext.ops._modules import NormModule, last_size
from liger_ext.ops._register import register

__all__ = [
    "LigerFusedAddRMSNorm",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "add_rms_norm",
    "liger_fused_add_rms_norm",
    "liger_rms_norm",
    "rms_norm",
]

_add_rms_norm_backward = torch.ops.liger_ext.add_rms_norm_backward.default


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str | int = "llama"
) -> Tensor:
    """Applies root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019, arXiv:1910.07467).

    ``y = x * rstd * (weight + offset)`` with ``rstd = 1 / sqrt(mean(x**2) + eps)``. All arithmetic is in float32
    (float64 for float64). The result is rounded at the end, with ``"llama"`` also before the product with the weight.
    The backward sums the weight's gradient in float32 over all rows.

    Args:
        x: ``(..., hidden_size)``, float32, bfloat16 or float16 (float64 on the CPU), any strides.
        weight: ``(hidden_size,)``, of any of these dtypes, not necessarily that of ``x``; None for no weight and no
            offset.
        eps: added to the mean of squares.
        offset: added to the weight (1.0 in Gemma).
        casting_mode: with ``"llama"``, ``x * rstd`` is rounded to the dtype of ``x`` before the product with the
            weight, as in the Llama reference; with ``"gemma"`` and ``"none"`` it is not rounded.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: an unknown casting mode, a dtype that is not supported, or a weight of another shape or device.
    """
    return _rms_norm(x, weight, eps, offset, mode_code("rms_norm", "casting_mode", casting_mode, CASTING_MODES))[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str | int = "llama",
) -> tuple[Tensor, Tensor]:
    """Adds the residual and normalises the sum in one pass: ``s = x + residual``, ``y = rms_norm(s, weight, ...)``.

    Args:
        x: ``(..., hidden_size)``.
        residual: the shape of ``x``; its dtype may differ (a float32 residual stream with bfloat16 layers).
        weight, eps, offset, casting_mode: as in :func:`rms_norm`.

    Returns:
        ``(y, s)``, both with the shape of ``x`` and the promoted dtype of ``x`` and ``residual``. The norm is applied
        to the rounded sum. Both are differentiable.

    Raises:
        ValueError: as in :func:`rms_norm`, or a residual of another shape or device.
    """
    return _add_rms_norm(
        x, residual, weight, eps, offset, mode_code("add_rms_norm", "casting_mode", casting_mode, CASTING_MODES)
    )[:2]


class LigerRMSNorm(NormModule):
    """:func:`liger_ext.functional.rms_norm` as a module with a weight.

    Args:
        hidden_size: size of the last dimension of the input.
        eps, offset, casting_mode: as in :func:`liger_ext.functional.rms_norm`.
        init_fn: the initial values of the weight: ``"ones"`` or ``"zeros"``.
        in_place, row_mode: accepted for compatibility, without effect: no input or upstream gradient is ever written,
            and the launch is planned from the device and the shape.
        elementwise_affine: False: no weight.
        device, dtype: of the weight; by default torch's.

    Raises:
        TypeError, ValueError: ``hidden_size`` is no positive integer, or ``init_fn`` another value.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden_size = last_size(self, "hidden_size", hidden_size)
        self._make_parameters(hidden_size, init_fn, eps, device, dtype, weight=elementwise_affine)
        mode_code(type(self).__name__, "casting_mode", casting_mode, CASTING_MODES)
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place
        self.row_mode = row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        size = "" if self.weight is None else f"{self.weight.shape[0]}, "
        return f"{size}eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """:class:`LigerRMSNorm` of Gemma: the factor is 1 + weight, and the result is rounded once."""

    init_fn = "zeros"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode, device=device, dtype=dtype
        )


class LigerRMSNormForGemma2(LigerRMSNormForGemma):
    """:class:`LigerRMSNormForGemma` under another name of Liger-Kernel's."""


class LigerRMSNormForQwen3Next(LigerRMSNormForGemma):
    """:class:`LigerRMSNormForGemma` under another name of Liger-Kernel's."""


class LigerRMSNormForGemma3(LigerRMSNormForGemma):
    """:class:`LigerRMSNormForGemma`, whose first argument is called ``dim``."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = "gemma",
        init_fn: str = "zeros",
        in_place: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim = last_size(self, "dim", dim)
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, device=device, dtype=dtype)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """:class:`LigerRMSNorm` of Gemma 4: rounded once, without offset; with ``with_scale=False`` also without weight."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        init_fn: str = "ones",
        in_place: bool = False,
        with_scale: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        dim = last_size(self, "dim", dim)
        super().__init__(
            dim,
            eps,
            offset,
            casting_mode,
            init_fn,
            in_place,
            elementwise_affine=with_scale,
            device=device,
            dtype=dtype,
        )
        self.with_scale = with_scale


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """:class:`LigerRMSNorm` under another name of Liger-Kernel's. By default it rounds as Llama's norm, as in
    Liger-Kernel; OLMo 2's norm in transformers rounds once, as with ``casting_mode="gemma"``."""


class LigerRMSNormForGlm4(LigerRMSNorm):
    """:class:`LigerRMSNorm` under another name of Liger-Kernel's."""


class LigerFusedAddRMSNorm(NormModule):
    """:func:`liger_ext.functional.add_rms_norm` as a module with a weight.

    ``forward(hidden_states, residual) -> (normed, sum)``. Arguments as in :class:`LigerRMSNorm`; ``in_place`` has no
    effect.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        hidden_size = last_size(self, "hidden_size", hidden_size)
        self._make_parameters(hidden_size, init_fn, eps, device, dtype, weight=True)
        mode_code(type(self).__name__, "casting_mode", casting_mode, CASTING_MODES)
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    extra_repr = LigerRMSNorm.extra_repr


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """Calls :func:`liger_ext.functional.rms_norm`; ``in_place`` has no effect."""
    return rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """Calls :func:`liger_ext.functional.add_rms_norm`; ``in_place`` has no effect."""
    return add_rms_norm(X, R, W, eps, offset, casting_mode)


def _fake(x):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype))


_rms_norm = register("rms_norm", fake=_fake)


def _fake_add(x, residual):
    dtype = torch.promote_types(x.dtype, residual.dtype)
    y, total = (x.new_empty(x.shape, dtype=dtype) for _ in range(2))
    return y, total, x.new_empty(x.shape[:-1], dtype=accumulator(dtype))


def _fake_add_backward(sum, weight, need_dx, need_dweight):
    dx = sum.new_empty(sum.shape if need_dx else 0)
    return dx, sum.new_empty(0) if weight is None else weight.new_empty(weight.shape if need_dweight else 0)


def _setup_add_context(ctx, x, residual, weight, offset, sum, rstd):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(sum, weight, rstd)
    ctx.offset, ctx.dtypes = offset, (x.dtype, residual.dtype)


def _add_backward(ctx, saved, dy, dsum):
    need_x, need_residual, need_dweight = ctx.needs_input_grad[:3]
    dx, dweight = dsum, None  # if only the sum has an upstream gradient, dx equals it
    if dy is not None:
        total, weight, rstd = saved
        dx, dweight = _add_rms_norm_backward(
            dy, dsum, total, weight, rstd, ctx.offset, need_x or need_residual, need_dweight
        )
    need_x, need_residual = (need and dx is not None for need in (need_x, need_residual))
    return {
        "x": dx.to(ctx.dtypes[0]) if need_x else None,
        "residual": dx.to(ctx.dtypes[1]) if need_residual else None,
        "weight": dweight if need_dweight else None,
    }


_add_rms_norm = register(
    "add_rms_norm",
    fake=_fake_add,
    fake_backward=_fake_add_backward,
    setup_context=_setup_add_context,
    backward=_add_backward,
)
