"""The record of LayerNorm: its formula, ``F.layer_norm`` as the baseline, the magnitudes of intermediate values (the
scales of rounding errors), and the shapes to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.records._norms import NORM_DX, NORM_SUMS, NORM_TIMED, gradient_scale, norm_example
from liger_ext.records._record import InputFactory, Record, Roundings, Size, matrices
from liger_ext.records._sizes import Tensors, peak


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def torch_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    centred = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    w = torch.ones_like(x) if weight is None else weight.expand_as(x)
    scales = {"out": rstd * peak(x) * w.abs() + (0 if bias is None else bias.abs())}
    if "out" in grads:
        dy = grads["out"]
        scales["dx"] = gradient_scale(centred * rstd, rstd, dy, weight, 0.0) * (1 + rstd * peak(x))
        # dweight sums dy * n, and n has the error of x - mean.
        scales["dweight"] = (dy.abs() * rstd * peak(x)).sum(tuple(range(x.dim() - 1)))
    return scales


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    weight = {"weight": make.leaf(size.cols, mean=1, scale=0.3), "bias": make.leaf(size.cols)}
    return {"x": make.leaf(size.rows, size.cols, mean=3), **weight}


LAYER_NORM = Record(
    name="layer_norm",
    reference=layer_norm,
    baseline=torch_layer_norm,
    scales=layer_norm_scales,
    roundings={"out": Roundings(10, 1), "dx": NORM_DX, **NORM_SUMS},
    inputs=_inputs,
    example=norm_example,
    llama=Size(8192, 4096),
    moved=matrices(2, 3, statistics=8),
    timed=(NORM_TIMED,),
    parameters=("weight", "bias"),
)
