"""Arithmetic models of the kernels in csrc/gpu: which elements each thread processes. ``PLAN_MODELS`` of tests/ops
and ``SHARED`` have the model of each kernel: a function of a launch and of facts about its call, which raises
AssertionError unless threads process every element of every row exactly once. The formulas repeat those of Columns and
RowGroup (gpu/rows.h), WarpShare (gpu/row_stream.h) and the first lines of the kernels."""

from __future__ import annotations

import functools

import numpy as np


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def is_pow2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@functools.lru_cache(4096)
def check_columns(threads: int, k: int, vec: int, begin: int, end: int) -> None:
    """Checks that the Columns(index, threads, begin, end) of all threads cover [begin, begin + threads * k * vec), cut
    off at ``end``."""
    index = np.arange(threads, dtype=np.int64)
    first, step = begin + index * vec, threads * vec
    left = np.where(end <= first, 0, np.minimum(end - first, k * step))
    vector = np.arange(k, dtype=np.int64)[:, None]
    starts = np.sort((first + vector * step)[vector * step < left])
    stop = min(end, begin + k * step)
    assert np.array_equal(starts, np.arange(begin, stop, vec)), (threads, k, vec, begin, end)
    assert (stop - begin) % vec == 0, "a vector extends past the end of its row"


def check_batches(threads: int, k: int, vec: int, cols: int) -> None:
    """Checks the first and the last batch of a row; all batches but the last are full."""
    batch = threads * k * vec
    check_columns(threads, k, vec, 0, min(cols, batch))
    check_columns(threads, k, vec, (cols - 1) // batch * batch, cols)


def check_held(threads: int, k: int, vec: int, cols: int) -> None:
    assert threads * k * vec >= cols, "registers do not hold the row"
    check_columns(threads, k, vec, 0, cols)


@functools.lru_cache(4096)
def check_shares(threads: int, warp: int, k: int, vectors: int) -> None:
    """Checks that the WarpShares of a row's warps cover its vectors, with at most k vectors for each lane."""
    lanes = min(threads, warp)
    warps = threads // lanes
    share = ceil_div(ceil_div(vectors, warps), 8) * 8
    assert min(share, vectors) <= k * lanes, "registers do not hold the row"
    begin = np.minimum(np.arange(warps) * share, vectors)
    end = np.minimum(begin + share, vectors)
    assert begin[0] == 0 and end[-1] == vectors and np.array_equal(begin[1:], end[:-1])


def check_ring(plan, inputs: int, k: int, fixed: int, mbarriers: int) -> None:
    """Checks that the pipeline stages lie after the memory of reductions, with room for `stages` rows and, for bulk
    copies, their mbarriers."""
    assert plan.stages >= 1 and plan.shared_offset >= fixed and plan.shared_offset % 128 == 0
    stage = plan.block * k * 16 * inputs + mbarriers
    assert plan.smem >= plan.shared_offset + plan.stages * stage


def check_teams(plan, rows: int) -> None:
    """Checks that every persistent block or cluster has a row."""
    assert plan.grid % plan.cluster == 0 and plan.grid // plan.cluster <= rows


def rows_per_block(plan) -> int:
    """Returns how many rows a block processes at a time; the blocks of a cluster share one row."""
    if plan.cluster > 1:
        assert plan.threads_per_row == plan.cluster * plan.block
        return 1
    assert plan.block % plan.threads_per_row == 0
    assert plan.threads_per_row % plan.warp == 0 or (is_pow2(plan.threads_per_row) and plan.threads_per_row < plan.warp)
    return plan.block // plan.threads_per_row


def check_rows(plan, rows: int) -> None:
    """Checks that row = team * groups + group covers all rows, and that every team (block or cluster) has a row."""
    assert plan.grid % plan.cluster == 0
    teams, groups = plan.grid // plan.cluster, rows_per_block(plan)
    assert (teams - 1) * groups < rows <= teams * groups


def check_tiles(blocks: int, width: int, cols: int) -> None:
    """Checks that tiles of `width` columns cover the row, and that none is empty."""
    assert (blocks - 1) * width < cols <= blocks * width


def check_ranges(rows: int, parts: int) -> None:
    """Checks that ranges of ceil(rows / parts) rows cover the rows, and that none is empty."""
    each = ceil_div(rows, parts)
    assert (parts - 1) * each < rows <= parts * each


def check_singles(threads: int, vec: int, cols: int) -> None:
    """Checks that each element before the first and after the last whole vector has its own thread, at any address of a
    row."""
    for head in range(min(vec, cols + 1)):
        assert head + (cols - head) % vec <= threads


def row_registers(launch, call) -> None:
    check_rows(launch.plan, launch.rows)
    vec, k = launch.instance
    assert k == launch.plan.k or vec == 1
    check_held(launch.plan.threads_per_row, k, vec, launch.cols)


def row_two_pass(launch, call, k: int = 4) -> None:
    assert launch.plan.grid == launch.rows and is_pow2(launch.plan.block)
    check_batches(launch.plan.block, k, launch.instance[0], launch.cols)


def reduction_bytes(values: int, cluster: int = 1) -> int:
    return 2 * 8 + 2 * values * 32 * cluster * 4


def sum_columns(launch, call) -> None:
    plan, sums = launch.plan, max(1, len(call["record"].parameters)) if call["bias"] else 1
    vec, cols = launch.instance[0], launch.cols // sums
    assert plan.grid % sums == 0 and is_pow2(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    assert launch.cols % sums == 0 and cols % vec == 0
    check_tiles(plan.grid // sums, plan.threads_per_row * vec, cols)
    assert plan.block % plan.warp == 0 and plan.smem >= 4 * vec * plan.block


def row_tiles(launch, k: int) -> None:
    plan, vec = launch.plan, launch.instance[0]
    width = plan.threads_per_row * k * vec
    tiles, lines = ceil_div(launch.cols, width), plan.block // plan.threads_per_row
    assert is_pow2(plan.threads_per_row) and lines * plan.threads_per_row == plan.block
    assert plan.grid % tiles == 0
    assert (plan.grid // tiles - 1) * lines < launch.rows <= plan.grid // tiles * lines
    check_batches(plan.threads_per_row, k, vec, launch.cols)


def stream_copy(launch, call) -> None:
    plan = launch.plan
    assert plan.grid * plan.block * launch.instance[0] >= launch.cols


def dequantize_4bit(launch, call) -> None:
    row_tiles(launch, 4 if launch.plan.vec == 1 else 16 // launch.plan.vec)
    assert launch.plan.smem == 16 * 4  # the codes


def seeded_dropout(launch, call) -> None:
    row_tiles(launch, 2)


# Models of the kernels that several ops use, and of the ops without a record.
SHARED = {"SumColumns": sum_columns, "StreamCopyKernel": stream_copy, "Dequantize4bitKernel": dequantize_4bit}
SHARED |= {"SeededDropoutKernel": seeded_dropout}
