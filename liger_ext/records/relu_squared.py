"""The record of squared ReLU: its formula, ``F.relu(x).square()`` as the baseline, the magnitudes of intermediate
values (the scales of rounding errors), and the shapes to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.records._record import Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors


def relu_squared(x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0, x).square()


def torch_relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def relu_squared_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    x = inputs["x"]
    scales = {"out": x.square()}
    if "out" in grads:
        scales["dx"] = 2 * x.abs() * grads["out"].abs()
    return scales


RELU_SQUARED = Record(
    name="relu_squared",
    reference=relu_squared,
    baseline=torch_relu_squared,
    scales=relu_squared_scales,
    roundings={"out": Roundings(1), "dx": Roundings(2)},
    inputs=lambda make, size: {"x": make.leaf(size.rows, size.cols, scale=2)},
    example=lambda tokens, hidden, vocab: Size(tokens, hidden),
    llama=Size(8192, 14_336),
    moved=matrices(2, 3),
    timed=(Timed(sizes((8192, 11008), (8192, 14336), (8192, 8192)), sizes((2048, 1536), (1024, 11008))),),
)
