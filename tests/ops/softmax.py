"""Calls of softmax."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from calls import Call, Draw
from cases import example, laid_out, normal
from plan_model import row_registers, row_reread

import liger_ext
from liger_ext import functional as F

EXAMPLES = [example("softmax", x=(3, 5, 33))]


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple]:
    def softmax(rows: int, cols: int, layout: str = "contiguous", special: bool = False):
        x = normal(rows, cols, dtype=dtype, scale=3)
        if special:
            x[0, : cols // 2], x[1, cols // 2], x[2, : cols - 1] = -torch.inf, torch.nan, -torch.inf
        return {"x": laid_out(x, layout)}

    sizes = [
        (5, 64),
        (7, 1024),
        (3, 5001),
        (3, 8192),
        (2, 40000),
        (200, 1),
        (9, 16384),
        (9, 512),
        (9, 128),
        (9, 32),
        (9, 4096),
    ]
    for rows, cols in [*sizes, (13, 3), (2, 70016), (9, 2048), (3, 16384)]:
        yield "softmax", f"{rows}x{cols}", (rows, cols) in (sizes[0], sizes[1]), lambda r=rows, c=cols: softmax(r, c)
    for cols in (100, 5001, 40000):
        yield "softmax", f"special {cols}", False, lambda c=cols: softmax(5, c, special=True)
    yield "softmax", "offset", False, lambda: softmax(4, 1032, "offset")


def softmax(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return Call("softmax", {"x": draw.normal(*lead, n, dtype=dtype, scale=3)})


DRAWS = {"softmax": softmax}


BAD = [
    ("softmax", "integers", {"x": normal(3, 8).int()}, ["x", "torch.int32"]),
    ("softmax", "scalar", {"x": ()}, ["x", "dimensions"]),
]  # fmt: skip

LARGE = {"softmax": lambda a, b, _: F.softmax(a)}


# Which elements a launch takes --------------------------------------------------------------------------------------


PLAN_MODELS = {
    "SoftmaxRegisters": row_registers,
    "SoftmaxReread": row_reread,
    "SoftmaxBackwardRegisters": row_registers,
    "SoftmaxBackwardReread": row_reread,
}

MODULES = [liger_ext.LigerSoftmax()]
