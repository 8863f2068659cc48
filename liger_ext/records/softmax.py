"""The record of softmax over rows: ``torch.softmax`` as the formula and as the baseline, the magnitude of the
intermediate values of dx (the scale of its rounding errors), and the shapes to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_ext.records._record import Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors, peak, stored_steps


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


torch_softmax = softmax


def softmax_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    """Returns the scale of dx. The backward reads the stored y, so y * (dy - sum(dy * y)) has a rounding of y in both
    factors."""
    if "out" not in grads:
        return {}
    compute, y, dy = inputs["compute_dtype"], outputs["out"], grads["out"]
    if torch.finfo(compute).bits == 16:  # subnormal values of a dtype have a constant rounding error
        y = y.clamp(min=torch.finfo(compute).smallest_normal)
    y_rounding = y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
    return {"dx": stored_steps(compute) * y_rounding + peak(y_rounding)}


SOFTMAX = Record(
    name="softmax",
    reference=softmax,
    baseline=torch_softmax,
    scales=softmax_scales,
    # Two exponentials (with a thread's maximum, and the correction to the row's maximum), sum, reciprocal and products.
    roundings={"out": Roundings(12, 1), "dx": Roundings(6, 1)},
    inputs=lambda make, size: {"x": make.leaf(size.rows, size.cols, scale=3)},
    example=lambda tokens, hidden, vocab: Size(tokens, vocab),
    llama=Size(8192, 8192),
    moved=matrices(2, 3),
    timed=(Timed(sizes((4096, 32768), (32768, 1024), (8192, 128256)), sizes((2048, 32768))),),
    native=True,
)
