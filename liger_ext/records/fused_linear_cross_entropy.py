"""The record of the fused loss: cross entropy's formula and baseline, applied to the logits of a head; the scales of
rounding errors (magnitudes of intermediate values), which include the roundings of logits that are stored in 16 bits;
and the facts from which its launch plans follow. benchmarks/flce.py times the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import accumulator
from liger_ext.ops._loss_arguments import FusedLossCall
from liger_ext.ops._loss_devices import profile_index
from liger_ext.ops._loss_plan import chunk_rows
from liger_ext.records._record import InputFactory, Record, Roundings, Size
from liger_ext.records._sizes import Tensors, stored_steps
from liger_ext.records.cross_entropy import (
    LOSS_ROUNDINGS,
    cross_entropy,
    cross_entropy_scales,
    torch_cross_entropy,
)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _loss_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drops the options that do not change the formula: those of memory and dtypes."""
    return {k: v for k, v in options.items() if k not in ("accum_dtype", "memory", "compute_dtype", "stored")}


def _with_head(loss: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def fused(
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        return loss(_logits(x, weight, bias), target, ce_weight, **_loss_options(options))

    return fused


fused_linear_cross_entropy = _with_head(cross_entropy)
torch_fused_linear_cross_entropy = _with_head(torch_cross_entropy)


def fused_linear_cross_entropy_scales(
    inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors
) -> dict[str, Tensor | float]:
    """Returns the scales of cross entropy, and adds the roundings of stored logits and of their gradient G, which may
    have the matmuls' dtype. These roundings are independent, so a mean loss has the error eps * |logits| / sqrt(rows),
    dx has eps * sqrt(G^2 @ W^2), and dweight and dbias have the same with x and ones in place of W."""
    x, weight, bias, target = (inputs.get(name) for name in ("x", "weight", "bias", "target"))
    if not x.numel():
        return {}
    options = _loss_options(
        {k: v for k, v in inputs.items() if k not in ("x", "weight", "bias", "target", "ce_weight")}
    )
    options["weight"] = inputs.get("ce_weight")
    with torch.enable_grad():
        logits = _logits(x, weight, bias).detach().requires_grad_()
        loss = cross_entropy(logits, target, **options)["loss"]
        g = torch.autograd.grad(loss, logits, grads["loss"])[0] if "loss" in grads else torch.zeros_like(logits)
    scales = cross_entropy_scales({**options, "logits": logits, "target": target}, outputs, grads)
    stored = stored_steps(inputs["compute_dtype"])
    rows, vocab = logits.shape
    # The error of a logit: its own rounding, and those of the products in its sum.
    off = logits.detach().abs().amax(1) * stored + (x.abs() @ weight.abs().T).amax(1)
    # The classes whose logits may be the largest within the roundings.
    largest = logits.detach().amax(1, keepdim=True)
    step = 2 * torch.finfo(accumulator(inputs["compute_dtype"])).eps  # four roundings, as stored_steps counts them
    scales["predicted_tokens"] = logits.detach() >= largest - 2 * step * off[:, None]
    if options.get("reduction", "mean") == "none":
        scales["loss"] = scales["loss"] + off
    else:
        share = scales["loss"] / (logits.detach().abs().amax(1).sum() + rows).clamp(min=1)
        scales["loss"] = scales["loss"] + share * off.square().sum().sqrt()
    moved = torch.maximum(g.abs(), scales.get("dlogits by its logit", g.abs()))
    square = (moved * stored).square() + scales.get("dlogits", g).square()
    scales["dx"] = 2 * (square @ weight.square()).sqrt() * max(1.0, vocab**0.5 / stored)
    scales["dweight"] = 2 * (square.T @ x.square()).sqrt() * max(1.0, rows**0.5 / stored)
    scales["dbias"] = 2 * square.sum(0).sqrt() * max(1.0, rows**0.5 / stored)
    if stored > 1:
        # The absolute rounding error of a logit is the relative error of its exponential, and so of the gradient. The
        # z-loss is the square of lse, so it multiplies the error of lse by twice its size (reach).
        reach = 1 + logits.detach().abs().amax()
        scales |= {f"{name} bound": reach * scales[name] for name in ("dx", "dweight", "dbias")}
        # The roundings of the largest logits change lse, and so a whole row of the gradient: these do not cancel.
        scales["dx bound"] = scales["dx bound"] + reach * stored * (g.abs() @ weight.abs())
        by_rows = off if options.get("reduction", "mean") == "none" else scales["loss"] / reach
        scales["z_loss bound"] = scales["z_loss"] + 2 * (options.get("lse_square_scale") or 0.0) * reach * by_rows
    return scales


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    tensors = {"x": make.leaf(size.rows, size.hidden), "weight": make.leaf(size.cols, size.hidden, scale=0.1)}
    return tensors | {"target": make.targets(size.rows, size.cols)}


def _call(size: Size, dtype: torch.dtype, profile: _C.DeviceProfile) -> FusedLossCall:
    return FusedLossCall.uniform(size.rows, size.hidden, size.cols, dtype, profile_index(profile))


def _as_tuned(size: Size, dtype: torch.dtype, profile: _C.DeviceProfile) -> tuple[Size, dict[str, int]]:
    """Returns one chunk of rows, with so small a hidden size that the matmuls take little of the measured time."""
    rows = chunk_rows(_call(size, dtype, profile), "low")
    return replace(size, rows=rows, hidden=64), {"memory": 1 << 50}


def _moved(size: Size, width: int) -> tuple[int, int]:
    """Counts reads of x and the head, and writes of their gradients. The op is bound by its matmuls."""
    operands = (size.rows + size.cols) * size.hidden * width
    return operands, operands


FUSED_LINEAR_CROSS_ENTROPY = Record(
    name="fused_linear_cross_entropy",
    reference=fused_linear_cross_entropy,
    baseline=torch_fused_linear_cross_entropy,
    scales=fused_linear_cross_entropy_scales,
    # With 16-bit matmuls, the scales contain the roundings of stored logits and gradients.
    roundings={**LOSS_ROUNDINGS, **dict.fromkeys(("dx", "dweight", "dbias"), Roundings(12, 1))},
    inputs=_inputs,
    example=lambda tokens, hidden, vocab: Size(tokens, vocab, hidden=hidden),
    llama=Size(8192, 128_256, hidden=4096),
    moved=_moved,
    timed=(),  # benchmarks/flce.py
    outputs=("loss",),
    constants=("ce_weight",),
    computes_in=("x", "weight"),
    as_tuned=_as_tuned,
    row_length=lambda inputs: inputs["weight"].shape[0],
    rounded=lambda inputs: ("dx",) if inputs.get("reduction") == "none" else (),
    native=True,
)
