"""Calls of squared ReLU for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases
from plan_model import row_tiles

import liger_ext

EXAMPLES = [example("relu_squared", x=(3, 5, 33))]


KERNEL_CASES = [
    *kernel_cases("relu_squared", (3, 1024), (3, 33), (130, 16), (2, 5000), quick=[(3, 33)]),
    *kernel_cases("relu_squared", (3, 40), layout="offset"),
    *kernel_cases("relu_squared", (3, 40), layout="padded"),
]


def relu_squared(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return Call("relu_squared", {"x": draw.normal(*lead, n, dtype=dtype, scale=3)})


DRAWS = {"relu_squared": relu_squared}


BAD = [
    ("relu_squared", "integers", {"x": normal(3, 8).int()}, ["x", "torch.int32"]),
]  # fmt: skip


_KERNELS = ("ReluSquaredForwardKernel", "ReluSquaredBackwardKernel")
PLAN_MODELS = dict.fromkeys(_KERNELS, lambda launch, call: row_tiles(launch, 4))
STREAMS = {kernel: {"load", "store"} for kernel in _KERNELS}

MODULES = [liger_ext.LigerReLUSquared()]
