"""Calls of squared ReLU for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from calls import Call, Draw
from cases import example, laid_out, normal
from plan_model import row_tiles

import liger_ext
from liger_ext import functional as F

EXAMPLES = [example("relu_squared", x=(3, 5, 33))]


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple]:
    for rows, cols in ((3, 1024), (3, 33), (130, 16), (2, 5000)):
        yield "relu_squared", f"{rows}x{cols}", cols == 33, lambda r=rows, c=cols: {"x": normal(r, c, dtype=dtype)}
    for layout in ("offset", "padded"):
        yield "relu_squared", layout, False, lambda how=layout: {"x": laid_out(normal(3, 40, dtype=dtype), how)}


def relu_squared(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return Call("relu_squared", {"x": draw.normal(*lead, n, dtype=dtype, scale=3)})


DRAWS = {"relu_squared": relu_squared}


BAD = [
    ("relu_squared", "integers", {"x": normal(3, 8).int()}, ["x", "torch.int32"]),
]  # fmt: skip

LARGE = {"relu_squared": lambda a, b, _: F.relu_squared(a)}


_KERNELS = ("ReluSquaredForwardKernel", "ReluSquaredBackwardKernel")
PLAN_MODELS = dict.fromkeys(_KERNELS, lambda launch, call: row_tiles(launch, 4))
STREAMS = {kernel: {"load", "store"} for kernel in _KERNELS}

MODULES = [liger_ext.LigerReLUSquared()]
