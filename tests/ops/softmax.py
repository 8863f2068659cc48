"""Calls of softmax for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from calls import Call, Draw
from cases import example, laid_out, normal
from plan_model import check_columns, check_rows, check_singles, reduction_bytes, row_registers

import liger_ext
from liger_ext import _C
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
    # Rows at every offset from a multiple of 16 bytes; longer rows, a part of which lies in shared memory or in
    # neither.
    for rows, cols in [*sizes, (13, 3), (2, 70016), (9, 2048), (3, 16384), (9, 519), (9, 1001), (2, 140001)]:
        yield "softmax", f"{rows}x{cols}", (rows, cols) in (sizes[0], sizes[1]), lambda r=rows, c=cols: softmax(r, c)
    for cols in (100, 5001, 40000):
        yield "softmax", f"special {cols}", False, lambda c=cols: softmax(5, c, special=True)
    for cols in (1032, 5000):  # x and y have different offsets from a multiple of 16 bytes
        yield "softmax", f"offset {cols}", False, lambda c=cols: softmax(4, c, "offset")


def softmax(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return Call("softmax", {"x": draw.normal(*lead, n, dtype=dtype, scale=3)})


DRAWS = {"softmax": softmax}


BAD = [
    ("softmax", "integers", {"x": normal(3, 8).int()}, ["x", "torch.int32"]),
    ("softmax", "scalar", {"x": ()}, ["x", "dimensions"]),
]  # fmt: skip

LARGE = {"softmax": lambda a, b, _: F.softmax(a)}


# Which elements a launch processes ----------------------------------------------------------------------------------


def row_in_parts(launch, call) -> None:
    """Checks the whole vectors in registers and shared memory (``plan.slots`` per thread), and the single elements. The
    kernel reads the remaining vectors (Path.two_pass) twice, in batches after them."""
    plan, vec = launch.plan, launch.instance[0]
    check_rows(plan, launch.rows)
    threads, slots = plan.threads_per_row, plan.slots
    inputs = 2 if "Backward" in launch.kernel else 1
    assert plan.shared_offset == reduction_bytes(2, plan.cluster)
    assert plan.smem >= plan.shared_offset + slots * inputs * plan.block * 16
    if vec == 1:
        assert slots == 0
    else:
        check_singles(threads, vec, launch.cols)
        assert slots == 0 or threads == plan.cluster * plan.block
    most = launch.cols // vec
    assert (plan.path == _C.Path.regs) == (most <= threads * (plan.k + plan.slots))
    for vectors in {most, max(0, most - 1)} if launch.cols % vec else {most}:  # fewer if unaligned
        check_columns(threads, plan.k + plan.slots, vec, 0, vectors * vec)


PLAN_MODELS = {
    "SoftmaxRegisters": row_registers,
    "SoftmaxLong": row_in_parts,
    "SoftmaxBackwardRegisters": row_registers,
    "SoftmaxBackwardLong": row_in_parts,
}

MODULES = [liger_ext.LigerSoftmax()]
