"""Calls of softmax for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from typing import Any

import torch
from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases
from plan_model import check_columns, check_rows, check_singles, reduction_bytes, row_registers

import liger_ext
from liger_ext import _C

EXAMPLES = [example("softmax", x=(3, 5, 33))]


def _special(inputs: dict[str, Any]) -> None:
    x, cols = inputs["x"], inputs["x"].shape[1]
    x[0, : cols // 2], x[1, cols // 2], x[2, : cols - 1] = -torch.inf, torch.nan, -torch.inf


# Rows at every offset from a multiple of 16 bytes; longer rows, a part of which lies in shared memory or in neither.
KERNEL_CASES = [
    *kernel_cases("softmax", (5, 64), (7, 1024), quick=True),
    *kernel_cases("softmax", (3, 5001), (3, 8192), (2, 40000), (200, 1), (9, 16384), (9, 512), (9, 128), (9, 32)),
    *kernel_cases("softmax", (9, 4096), (13, 3), (2, 70016), (9, 2048), (3, 16384), (9, 519), (9, 1001), (2, 140001)),
    *kernel_cases("softmax", (5, 100), (5, 5001), (5, 40000), note="special", change=_special),
    # x and y have different offsets from a multiple of 16 bytes.
    *kernel_cases("softmax", (4, 1032), (4, 5000), layout="offset"),
]


EXACT = kernel_cases("softmax", (512, 1000), (512, 16_000))


def softmax(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return Call("softmax", {"x": draw.normal(*lead, n, dtype=dtype, scale=3)})


DRAWS = {"softmax": softmax}


BAD = [
    ("softmax", "integers", {"x": normal(3, 8).int()}, ["x", "torch.int32"]),
    ("softmax", "scalar", {"x": ()}, ["x", "dimensions"]),
]  # fmt: skip


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
