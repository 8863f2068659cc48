"""The record of GroupNorm: its formula, ``torch.group_norm`` as the baseline, the magnitudes of intermediate values
(the scales of rounding errors), and the feature maps to time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_ext.records._norms import NORM_DX, NORM_SUMS, gradient_scale
from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, matrices
from liger_ext.records._sizes import Tensors, peak


def _rows(t: Tensor, num_groups: int) -> Tensor:
    """Reshapes t so that each group of one sample is a row."""
    batch, channels, *elements = t.shape
    return t.reshape(batch, num_groups, channels // num_groups * math.prod(elements))


def _channel_view(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.view(-1, *[1] * (x.dim() - 2)).expand_as(x)


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    rows = _rows(x, num_groups)
    centred = rows - rows.mean(-1, keepdim=True)
    y = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    y = y if weight is None else y * _channel_view(weight, x)
    return y if bias is None else y + _channel_view(bias, x)


def torch_group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    if x.numel() == 0:  # PyTorch's group_norm then returns no gradients of weight and bias
        return group_norm(x, num_groups, weight, bias, eps)
    if weight is None and bias is not None:  # PyTorch's group_norm returns no gradient of a bias without a weight
        return torch_group_norm(x, num_groups, eps=eps) + _channel_view(bias, x)
    # Not F.group_norm, which raises for a group of one element. Contiguous, since torch 2.13 crashes with channels last
    # if x requires no gradient.
    return torch.group_norm(x.contiguous(), num_groups, weight, bias, eps)


def group_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    x, num_groups, weight, bias = (inputs.get(name) for name in ("x", "num_groups", "weight", "bias"))
    rows = _rows(x, num_groups)
    centred = rows - rows.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    w = torch.ones_like(x) if weight is None else _channel_view(weight, x)
    b = 0 if bias is None else _channel_view(bias, x).abs()
    normalised = (rstd * peak(rows)).expand_as(rows).reshape(x.shape)
    scales = {"out": normalised * w.abs() + b}
    if "out" in grads:
        dy = grads["out"]
        g = _rows(dy * w, num_groups)
        dx = gradient_scale(centred * rstd, rstd, g, None, 0.0) * (1 + rstd * peak(rows))
        scales["dx"] = dx.expand_as(rows).reshape(x.shape)
        # dweight sums dy * n, and n has the error of x - mean.
        scales["dweight"] = (dy.abs() * normalised).sum([d for d in range(x.dim()) if d != 1])
    return scales


def _elements(size: Size) -> int:
    """Returns the elements of a channel: the largest divisor of the row's length that divides ``size.hidden``."""
    return math.gcd(size.cols, size.hidden or 4096)


def _groups(size: Size) -> int:
    """Returns the groups of an image. There are ``size.batch`` images, or if it is 1, as many as have 32 groups."""
    return max(1, size.rows // size.batch) if size.batch > 1 else math.gcd(size.rows, 32)


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    groups, elements = _groups(size), _elements(size)
    channels = groups * (size.cols // elements)
    x = make.leaf(size.rows // groups, channels, elements, mean=3)
    weight = {"weight": make.leaf(channels, mean=1, scale=0.3), "bias": make.leaf(channels)}
    return {"x": x, "num_groups": groups, **weight}


def _row_length(inputs: Mapping[str, Any]) -> int:
    x = inputs["x"]
    return x.shape[1] // inputs["num_groups"] * math.prod(x.shape[2:])


def _feature_maps(*shapes: tuple[int, int, int]) -> tuple[Size, ...]:
    """Returns the sizes of feature maps (batch, channels, elements of a channel) in 32 groups."""
    return tuple(Size(32 * batch, channels // 32 * elements, hidden=elements) for batch, channels, elements in shapes)


GROUP_NORM = Record(
    name="group_norm",
    reference=group_norm,
    baseline=torch_group_norm,
    scales=group_norm_scales,
    roundings={"out": Roundings(10, 1), "dx": NORM_DX, **NORM_SUMS},
    row_length=_row_length,
    inputs=_inputs,
    example=lambda tokens, hidden, vocab: Size(tokens, hidden, hidden=4),
    llama=Size(8192, 4096),
    moved=matrices(2, 3, statistics=8),
    # A diffusion model's feature maps, from 64 x 64 to 8 x 8, and the last one of an image decoder.
    timed=(
        Timed(
            _feature_maps(
                (16, 320, 4096), (8, 640, 4096), (16, 640, 1024), (16, 1280, 256), (16, 1280, 64), (8, 128, 262_144)
            ),
            _feature_maps((2, 320, 1024), (2, 1280, 64)),
        ),
    ),
    parameters=("weight", "bias"),
)
