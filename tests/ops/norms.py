"""Calls of the norms for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases
from plan_model import (
    ceil_div,
    check_batches,
    check_held,
    check_ranges,
    check_ring,
    check_rows,
    check_shares,
    reduction_bytes,
    row_registers,
    row_two_pass,
    rows_per_block,
)

import liger_ext

EXAMPLES = [
    example("rms_norm", x=(3, 5, 33), weight=(33,)),
    example("rms_norm", "gemma", x=(4, 40), weight=(40,), offset=1.0, casting_mode="gemma"),
    example("rms_norm", "no_weight", x=(4, 17), weight=None, casting_mode="none"),
    example("add_rms_norm", x=(3, 5, 33), residual=(3, 5, 33), weight=(33,)),
    example("layer_norm", x=(3, 5, 33), weight=(33,), bias=(33,)),
    example("layer_norm", "plain", x=(6, 24), weight=None, bias=None),
]


_LONG = ((2, 70016), (2, 20000))
_MIXED = ((9, 1200), (9, 1600), (2, 2400), (9, 77), (2, 6000), (2, 9000), (9, 9000), (2, 40000), (2, 70016))
_GEMMA = {"offset": 1.0, "casting_mode": "gemma"}
_NORMS = "rms_norm layer_norm"
KERNEL_CASES = [
    *kernel_cases(_NORMS, (37, 512), (3, 33), quick=True),
    *kernel_cases(_NORMS, (5, 64), (7, 4096), (3, 8192), (13, 8192), (3, 16384), (2, 40000), (3, 5001), (70, 8)),
    *kernel_cases(_NORMS, (200, 1), (13, 1003), (13, 301), (21, 1024), (7, 2048), *_LONG),
    *kernel_cases("add_rms_norm", (21, 1024), (3, 1003), quick=True),
    *kernel_cases("add_rms_norm", (3, 8192), (2, 40000), (3, 5001), (3, 9000), *_LONG),
    # Enough rows for persistent blocks: rows in a part of a warp, with three vectors per thread, in 512 and in 1,024
    # threads. For the forward: rows of eight threads with two vectors each, and rows of whole warps.
    *kernel_cases(f"{_NORMS} add_rms_norm", (90, 8), (90, 16), (18, 704), (18, 1024), (18, 2048), in_vectors=True),
    *kernel_cases("rms_norm", (9, 512), (9, 4096), (2, 20000), (5, 77), options=_GEMMA),
    *kernel_cases("rms_norm", *_MIXED, other_dtype=("weight",)),
    *kernel_cases("layer_norm", *_MIXED, other_dtype=("weight", "bias")),
    *kernel_cases("rms_norm", *_MIXED, options={"weight": None}),
    *kernel_cases("layer_norm", *_MIXED, options={"weight": None, "bias": None}),
    *kernel_cases("layer_norm", (9, 1024), options={"bias": None}),
    # The backward computes only dx, or only sums; then no sums at all.
    *kernel_cases(_NORMS, (9, 1024), (9, 9000), (9, 77), frozen=("x",)),
    *kernel_cases(_NORMS, (9, 1024), (9, 9000), (9, 77), frozen=("weight",)),
    *kernel_cases("layer_norm", (9, 1024), (9, 9000), (9, 77), frozen=("bias",)),
    *kernel_cases("layer_norm", (9, 1024), (9, 5000), frozen=("weight", "bias")),
    *kernel_cases("add_rms_norm", (9, 1024), (9, 5000), frozen=("weight",), quick=[(9, 1024)]),
    *kernel_cases("rms_norm", (9, 1024), (9, 5000), frozen=("weight",), options=_GEMMA),
    # A residual stream in fp32.
    *kernel_cases("add_rms_norm", (5, 1024), (5, 20000), (5, 333), other_dtype=("residual",)),
    *kernel_cases("add_rms_norm", (5, 1024), other_dtype=("residual", "weight"), frozen=("weight",)),
]
for _layout in ("offset", "padded", "columns"):
    KERNEL_CASES += kernel_cases(f"{_NORMS} add_rms_norm", (4, 1032), layout=_layout)


EXACT = kernel_cases("rms_norm add_rms_norm layer_norm", (256, 512), (4096, 1024), (8192, 256))


def _options(draw: Draw) -> dict[str, Any]:
    return {"eps": draw.rng.choice([1e-6, 1e-5, 0.1]), "offset": draw.rng.choice([0.0, 1.0])} | {
        "casting_mode": draw.rng.choice(["llama", "gemma", "none"])
    }


def rms_norm(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    weight = draw.normal(n, dtype=draw.other_dtype(dtype), mean=1, scale=0.3)
    x = draw.normal(*lead, n, dtype=dtype)
    return Call("rms_norm", {"x": x, "weight": draw.maybe(weight, 8), **_options(draw)})


def add_rms_norm(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    x, residual = draw.normal(*lead, n, dtype=dtype), draw.normal(*lead, n, dtype=draw.other_dtype(dtype))
    weight = draw.normal(n, dtype=draw.other_dtype(dtype), mean=1, scale=0.3)
    arguments = {"x": x, "residual": residual, "weight": draw.maybe(weight, 8), **_options(draw)}
    return Call("add_rms_norm", arguments)


def layer_norm(draw: Draw) -> Call:
    (lead, n), dtype = draw.rows(), draw.dtype()
    weight, bias = (draw.maybe(draw.normal(n, dtype=draw.other_dtype(dtype), mean=1), 8) for _ in range(2))
    x = draw.normal(*lead, n, dtype=dtype)
    return Call("layer_norm", {"x": x, "weight": weight, "bias": bias, "eps": draw.rng.choice([1e-6, 0.1])})


DRAWS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm}


def _like_both(arguments: dict[str, Any]) -> dict[str, Any]:
    x, residual = arguments["x"], arguments["residual"]
    return dict.fromkeys(("out0", "out1"), (tuple(x.shape), torch.promote_types(x.dtype, residual.dtype)))


PROMISED = {"add_rms_norm": _like_both}


_COMPLEX = normal(8).cfloat()
BAD = [
    ("rms_norm", "weight_shape", {"x": (3, 8), "weight": (7,)}, ["weight", "(7)", "(8)"]),
    ("rms_norm", "weight_dim", {"x": (3, 8), "weight": (1, 8)}, ["weight", "(1, 8)", "(8)"]),
    ("rms_norm", "integer_x", {"x": normal(3, 8).int(), "weight": (8,)}, ["x", "torch.int32", "float32"]),
    ("rms_norm", "integer_weight", {"x": (3, 8), "weight": normal(8).int()}, ["weight", "torch.int32"]),
    ("rms_norm", "scalar_x", {"x": ()}, ["x", "dimensions"]),
    ("rms_norm", "mode", {"x": (3, 8), "casting_mode": "lama"}, ["casting_mode", "lama", "llama"]),
    ("rms_norm", "mode_list", {"x": (3, 8), "casting_mode": [1]}, ["casting_mode", "[1]", "llama"]),
    ("add_rms_norm", "residual_shape", {"x": (3, 8), "residual": (3, 7), "weight": (8,)}, ["residual", "(3, 7)"]),
    ("add_rms_norm", "no_broadcast", {"x": (3, 8), "residual": (1, 8), "weight": (8,)}, ["residual", "(1, 8)"]),
    ("layer_norm", "weight_shape", {"x": (3, 8), "weight": (7,), "bias": None}, ["weight", "(7)", "(8)"]),
    ("layer_norm", "bias_shape", {"x": (3, 8), "weight": (8,), "bias": (9,)}, ["bias", "(9)", "(8)"]),
    ("layer_norm", "bias_dtype", {"x": (3, 8), "weight": (8,), "bias": _COMPLEX}, ["bias", "torch.complex64"]),
]  # fmt: skip

# Which elements a launch processes ----------------------------------------------------------------------------------


WHOLE_WARPS, OVERLAPPED, FORWARD_LANES, ROW_WARPS_BYTES = 1, 2, 8, 512  # csrc/launch/norms.h


def norm_forward_registers(launch, call) -> None:
    plan, (vec, k, threads) = launch.plan, launch.instance
    if threads == FORWARD_LANES:
        assert plan.threads_per_row == FORWARD_LANES and plan.block <= 512
    elif threads == WHOLE_WARPS:  # one row per block; each warp has a slot for its sum
        assert plan.threads_per_row == plan.block and plan.block % plan.warp == 0
        assert 2 * 4 * ceil_div(plan.block // plan.warp, 8) * 8 <= plan.smem <= ROW_WARPS_BYTES
    else:
        assert (threads < 1024) == (plan.cluster > 1)  # clusters have a separate kernel instance
    assert k == plan.k or vec == 1
    check_rows(plan, launch.rows)
    check_held(plan.threads_per_row, k, vec, launch.cols)


def norm_backward_registers(launch, call) -> None:
    plan, (vec, k, threads) = launch.plan, launch.instance
    groups, teams = rows_per_block(plan), plan.grid // plan.cluster
    # The template argument for the threads of a row: 0 (any), whole warps, their number in a block, or overlapped rows.
    assert threads in (0, WHOLE_WARPS, OVERLAPPED, min(plan.threads_per_row, plan.block))
    assert threads != OVERLAPPED or (groups == 1 and plan.block == 512)
    assert threads != WHOLE_WARPS or (plan.cluster == 1 and plan.threads_per_row % plan.warp == 0)
    assert threads != WHOLE_WARPS or groups <= 15 or plan.threads_per_row == plan.warp  # barriers
    reduction = ROW_WARPS_BYTES if threads == WHOLE_WARPS else reduction_bytes(2, plan.cluster)
    if threads == WHOLE_WARPS and (warps := plan.threads_per_row // plan.warp) > 1:
        assert 2 * 4 * groups * ceil_div(warps * len(call["record"].parameters), 8) * 8 <= ROW_WARPS_BYTES
    assert k == plan.k
    check_shares(plan.threads_per_row, plan.warp, k, launch.cols // vec)
    device, sums, inputs = call["device"], len(call["record"].parameters), 1 + len(call["record"].outputs)
    # An instance that fetches rows ahead cannot run without stages, and the others have none.
    assert (plan.stages > 0) == (vec > 1 and (device.bulk_copies or (device.async_copies and (sums == 1 or k == 4))))
    if plan.stages:
        mbarriers = plan.block // plan.warp * 8 if device.bulk_copies else 0
        check_ring(plan, inputs, k, reduction, mbarriers)  # the saved input, and the gradient of each output
        assert plan.stages <= 4 or not device.async_copies
    assert teams == plan.partial_rows and (teams - 1) * groups < launch.rows
    first = np.add.outer(np.arange(teams) * groups, np.arange(groups)).ravel()  # the next row is teams * groups further
    assert np.array_equal(first, np.arange(teams * groups))
    if groups > 1:
        assert plan.smem >= reduction + groups * sums * launch.cols * 4


def norm_backward_few(launch, call) -> None:
    """Checks that the first blocks process tiles of columns of all rows, and the blocks after them rows."""
    plan, (vec, k, vectors) = launch.plan, launch.instance
    tiles, groups, sums = ceil_div(launch.cols, vectors * vec), rows_per_block(plan), len(call["record"].parameters)
    assert vectors in (4, 8) and plan.warp % vectors == 0
    assert plan.partial_rows == 0 and k == plan.k
    assert (plan.grid - tiles - 1) * groups < launch.rows <= (plan.grid - tiles) * groups
    check_held(plan.threads_per_row, k, vec, launch.cols)
    assert plan.smem >= max(reduction_bytes(sums), plan.block // plan.warp * sums * vectors * vec * 4)


def norm_backward_means(launch, call) -> None:
    row_two_pass(launch, call, k=2 if launch.instance[0] == 8 else 4)


def norm_backward_tiles(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    tiles = ceil_div(launch.cols, plan.block * vec)
    assert plan.grid == tiles * plan.partial_rows
    check_ranges(launch.rows, plan.partial_rows)
    check_batches(plan.block, 1, vec, launch.cols)


PLAN_MODELS = {
    "NormForwardRegisters": norm_forward_registers,
    "NormForwardTwoPass": row_two_pass,
    "NormBackwardRegisters": norm_backward_registers,
    "NormBackwardFew": norm_backward_few,
    "NormBackwardRows": row_registers,
    "NormBackwardMeans": norm_backward_means,
    "NormBackwardTiles": norm_backward_tiles,
}

_VARIANTS = "Gemma", "Gemma2", "Gemma3", "Gemma4", "Glm4", "Olmo2", "Qwen3Next"
MODULES = [liger_ext.LigerRMSNorm(24), liger_ext.LigerFusedAddRMSNorm(24), liger_ext.LigerLayerNorm(24)]
MODULES += [getattr(liger_ext, f"LigerRMSNormFor{name}")(24) for name in _VARIANTS]
