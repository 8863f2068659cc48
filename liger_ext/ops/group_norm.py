"""GroupNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.ops._register import register
from liger_ext.ops.layer_norm import fake_gradients

_group_norm_backward = torch.ops.liger_ext.group_norm_backward.default


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Normalisation over groups of channels (Wu and He, 2018, arXiv:1803.08494).

    ``y = (x - mean) * rstd * weight[channel] + bias[channel]`` with ``rstd = 1 / sqrt(var + eps)``, mean and biased
    variance being those of a group: ``channels / num_groups`` channels of one sample. Statistics and all arithmetic are
    in float32 (float64 for float64), with one rounding at the end; the backward adds up the gradients of weight and
    bias in float32, in a fixed order.

    Args:
        x: ``(batch, channels, *)``, float32, bfloat16 or float16 (float64 on the CPU), any strides; what is not
            contiguous is copied.
        num_groups: a divisor of ``channels``.
        weight, bias: ``(channels,)`` or None; their dtypes may differ from that of ``x``.
        eps: added to the variance.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: fewer than two dimensions, channels that ``num_groups`` does not divide, a dtype that is not
            supported, or a weight or bias of another shape or device.
    """
    return _group_norm(x, weight, bias, num_groups, eps)[0]


def _fake(x, weight, bias, num_groups, eps):
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=accumulator(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_backward(dy, x, weight, mean, rstd, bias_dtype, num_groups, need_dx, need_dweight, need_dbias):
    return fake_gradients(x, weight, x.shape[1:2], bias_dtype, need_dx, need_dweight, need_dbias)


def _setup_context(ctx, inputs, output):
    x, weight, bias, num_groups, _ = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.bias_dtype, ctx.num_groups = None if bias is None else bias.dtype, num_groups


def _backward(ctx, saved, dy, *_):
    if dy is None:
        return (None,) * 5
    x, weight, mean, rstd = saved
    needs = ctx.needs_input_grad[:3]
    grads = _group_norm_backward(dy, x, weight, mean, rstd, ctx.bias_dtype, ctx.num_groups, *needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None


_group_norm = register(
    "group_norm", fake=_fake, fake_backward=_fake_backward, setup_context=_setup_context, backward=_backward
)
