"""Calls of GroupNorm for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

import torch
from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases

import liger_ext
from liger_ext.records import Size

EXAMPLES = [
    example("group_norm", x=(3, 6, 5), num_groups=2, weight=(6,), bias=(6,)),
    example("group_norm", "plain", x=(2, 4, 3, 8), num_groups=4),
    example("group_norm", "one_element", x=(4, 12), num_groups=3, weight=(12,), bias=(12,)),
]

# (batch, groups, channels of a group, elements of a channel). The channels have whole vectors, a few elements, one, or
# many. Several rows share a block, a block holds a row, or blocks process parts of a row: within a channel, of several
# whole channels, or across channels.
_SHAPES = [
    (3, 2, 4, 16),
    (3, 2, 3, 11),
    (2, 3, 8, 49),
    (5, 4, 2, 1),
    (37, 2, 1, 24),
    (2, 2, 40, 8),
    (1, 2, 64, 72),
    (2, 1, 5, 1000),
    (2, 1, 1, 12_000),
    (1, 2, 10, 1024),
    (1, 1, 3, 20_000),
    (1, 1, 700, 104),
    (1, 1, 5000, 7),
    (1, 1, 12_000, 1),
    (2, 1, 2, 40_001),
    (1, 2, 2, 32_768),
]  # fmt: skip


def _sizes(*shapes: tuple[int, int, int, int]) -> list[Size]:
    return [Size(batch * groups, channels * n, hidden=n, batch=batch) for batch, groups, channels, n in shapes]


_PARAMETERS = ("weight", "bias")
# Enough rows for small blocks, and rows of 1,520 and 2,112 vectors, some of them in shared memory. Without sums for the
# parameters the backward has more shared memory for vectors.
_LONG, _LONGER = (Size(16, 2 * vectors, hidden=vectors, batch=16) for vectors in (760, 1056))
_FEW = _sizes((3, 2, 4, 16), (2, 3, 8, 49), (1, 1, 3, 20_000))
KERNEL_CASES = [
    *kernel_cases("group_norm", *_sizes(*_SHAPES[:2]), quick=True),
    *kernel_cases("group_norm", *_sizes(*_SHAPES[2:])),
    *kernel_cases("group_norm", _LONG, _LONGER, in_vectors=True),
    *kernel_cases("group_norm", _LONG, in_vectors=True, frozen=_PARAMETERS),
    *kernel_cases("group_norm", *_FEW, other_dtype=("weight",)),
    *kernel_cases("group_norm", *_FEW, other_dtype=("bias",)),
    *kernel_cases("group_norm", *_FEW, options={"weight": None}),
    *kernel_cases("group_norm", *_FEW, options={"weight": None, "bias": None}),
]
for _frozen in (("x",), ("weight",), ("x", "bias"), _PARAMETERS):
    KERNEL_CASES += kernel_cases("group_norm", *_FEW, frozen=_frozen)
for _layout in ("offset", "padded", "transposed"):
    KERNEL_CASES += kernel_cases("group_norm", *_sizes((2, 2, 3, 40)), layout=_layout)


EXACT = kernel_cases("group_norm", *_sizes((8, 32, 2, 1024), (64, 8, 16, 49), (4, 32, 2, 10_000)))


def group_norm(draw: Draw) -> Call:
    batch, groups, channels = (draw.rng.choice(sizes) for sizes in ((0, 1, 2, 3, 7), (1, 2, 3, 8), (1, 2, 3, 5, 8)))
    elements = draw.rng.choice([(), (), (1,), (5,), (8,), (0,), (64,), (3, 4), (7, 7), (2, 3, 4)])
    dtype = draw.dtype()
    x = draw.normal(batch, groups * channels, *elements, dtype=dtype)
    weight, bias = (
        draw.maybe(draw.normal(groups * channels, dtype=draw.other_dtype(dtype), mean=1), 8) for _ in range(2)
    )
    eps = draw.rng.choice([1e-6, 0.1])
    return Call("group_norm", {"x": x, "num_groups": groups, "weight": weight, "bias": bias, "eps": eps})


BAD = [
    (
        "group_norm",
        "groups_dtype",
        {"x": (2, 10, 3), "num_groups": torch.half},
        [TypeError, "num_groups", "torch.float16"],
    ),
    ("group_norm", "groups_bool", {"x": (2, 10, 3), "num_groups": True}, [TypeError, "num_groups", "True"]),
    ("group_norm", "no_channels", {"x": (8,), "num_groups": 2}, ["x", "(8)", "(batch, channels"]),
    ("group_norm", "num_groups", {"x": (2, 8, 3), "num_groups": 3}, ["num_groups is 3", "8 channels"]),
    ("group_norm", "no_groups", {"x": (2, 8, 3), "num_groups": 0}, ["num_groups is 0", "8 channels"]),
    ("group_norm", "integers", {"x": normal(2, 8, 3).int(), "num_groups": 2}, ["x", "torch.int32"]),
    ("group_norm", "weight_shape", {"x": (2, 8, 3), "num_groups": 2, "weight": (3,)}, ["weight", "(3)", "(8)"]),
    ("group_norm", "bias_shape", {"x": (2, 8, 3), "num_groups": 2, "bias": (8, 1)}, ["bias", "(8, 1)", "(8)"]),
]
LARGE = {"group_norm": lambda rows, cols: Size(rows, cols, hidden=cols // 2, batch=rows)}
DRAWS = {"group_norm": group_norm}


def _table(rows: int, launch, call, parameters: int) -> int:
    """Returns the bytes of the parameters of the channels of ``rows`` rows."""
    return rows * (launch.cols // (call.get("channel") or launch.cols)) * parameters * 4


def _in_registers(launch, call, backward: bool = False) -> None:
    from plan_model import reduction_bytes, row_registers, rows_per_block

    row_registers(launch, call)
    plan, k = launch.plan, launch.instance[1]
    sums = plan.block * k * 8 if backward and not call["frozen"] else 0
    table = _table(rows_per_block(plan), launch, call, 1 if backward else 2)
    assert plan.cluster == 1 and plan.smem >= reduction_bytes(2) + table + sums


def _in_shared_memory(launch, call, backward: bool = False) -> None:
    """Checks that a row's vectors, except for k of each thread, fit in shared memory behind the sums of the channels.
    In the backward the blocks of a cluster have contiguous shares of the row."""
    from plan_model import ceil_div, check_held, check_rows, reduction_bytes, rows_per_block

    plan, (vec, k) = launch.plan, launch.instance
    check_rows(plan, launch.rows)
    assert k == plan.k and launch.cols % vec == 0 and rows_per_block(plan) == 1 and plan.cluster in (1, 2, 4, 8)
    share = ceil_div(launch.cols // vec, plan.cluster) * vec if backward else launch.cols
    threads, vectors = plan.block if backward else plan.threads_per_row, k + plan.slots
    check_held(threads, vectors, vec, min(share, launch.cols))
    sums = plan.block * vectors * 8 if backward and not call["frozen"] else 0
    before = reduction_bytes(2, plan.cluster) + _table(1, launch, call, 1 if backward else 2) + sums
    assert plan.shared_offset >= before and plan.shared_offset % 16 == 0
    assert plan.smem >= plan.shared_offset + plan.slots * plan.block * (2 if backward else 1) * 16


def _parts(launch, call, backward: bool) -> None:
    """Checks that every element is in one part. In the backward a part has several whole channels, all in registers, or
    lies in one channel.

    A multiprocessor runs three blocks at a time. A part has several batches (the elements in a block's registers) if
    more than eight blocks would follow one another."""
    from plan_model import ceil_div, check_batches

    plan, vec = launch.plan, launch.instance[0]
    channel = call.get("channel") or launch.cols
    at_once, most = 256 * 4 * vec, 1024
    batches = max(1, ceil_div(launch.rows * launch.cols // (call["device"].multiprocessors * 3 * 8), at_once))

    def parts(span: int, most: int, batches: int) -> tuple[int, int]:
        part = max(batches * at_once, ceil_div(ceil_div(span, most), vec) * vec)
        part = ceil_div(ceil_div(span, ceil_div(span, part)), vec) * vec
        return part, ceil_div(span, part)

    span, of_span, several = launch.cols, most, False
    if backward:
        channels, together = launch.cols // channel, at_once // channel
        several = together >= 2
        span = ceil_div(channels, ceil_div(channels, together)) * channel if several else channel
        of_span = 1 if several else max(1, most // channels)
    part, per_span = parts(span, of_span, 1 if several else batches)
    assert plan.grid == launch.rows * ceil_div(launch.cols, span) * per_span
    assert (per_span - 1) * part < span <= per_span * part and span % vec == 0 and part % vec == 0
    check_batches(plan.block, 4, vec, min(part, launch.cols))
    if backward:
        assert channel % vec == 0 and (span == channel or (per_span == 1 and plan.block * 4 * vec >= part))


def _backward_sums(launch, call) -> None:
    from plan_model import reduction_bytes

    _parts(launch, call, backward=True)
    sums = 0 if call["frozen"] else launch.plan.block * 4 * 8
    assert launch.plan.smem >= reduction_bytes(2) + sums


PLAN_MODELS = {
    "GroupNormRegisters": _in_registers,
    "GroupNormHeld": _in_shared_memory,
    "GroupNormMoments": lambda launch, call: _parts(launch, call, backward=False),
    "GroupNormApply": lambda launch, call: _parts(launch, call, backward=False),
    "GroupNormBackwardRegisters": lambda launch, call: _in_registers(launch, call, backward=True),
    "GroupNormBackwardHeld": lambda launch, call: _in_shared_memory(launch, call, backward=True),
    "GroupNormBackwardSums": _backward_sums,
    "GroupNormBackwardApply": lambda launch, call: _parts(launch, call, backward=True),
}
# The second kernel reads the parts again, so the first kernel's loads stay in the caches.
STREAMS = {
    "GroupNormRegisters": {"load", "store"},
    "GroupNormHeld": {"load", "store"},
    "GroupNormMoments": set(),
    "GroupNormApply": {"load", "store"},
    "GroupNormBackwardRegisters": {"load", "store"},
    "GroupNormBackwardHeld": {"load", "store"},
    "GroupNormBackwardSums": set(),
    "GroupNormBackwardApply": {"load", "store"},
}

MODULES = [liger_ext.LigerGroupNorm(24, 3)]
