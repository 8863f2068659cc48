"""What kernels in csrc/gpu have in common, as arithmetic: which elements each thread takes. A model of a kernel
(``PLAN_MODELS`` of tests/ops, by the kernel's name) is a function of a launch and of what is known of its call, and
raises AssertionError unless every element of every row is taken exactly once. The formulas are those of Columns and
RowGroup (gpu/rows.h), WarpShare (gpu/row_stream.h) and of the kernels' own first lines."""

from __future__ import annotations

import functools

import numpy as np


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@functools.lru_cache(4096)
def check_columns(threads: int, k: int, vec: int, begin: int, end: int) -> None:
    """Columns(index, threads, begin, end) of all threads: they hold [begin, begin + threads * k * vec) as far as there
    are columns."""
    index = np.arange(threads, dtype=np.int64)
    first, step = begin + index * vec, threads * vec
    left = np.where(end <= first, 0, np.minimum(end - first, k * step))
    vector = np.arange(k, dtype=np.int64)[:, None]
    starts = np.sort((first + vector * step)[vector * step < left])
    stop = min(end, begin + k * step)
    assert np.array_equal(starts, np.arange(begin, stop, vec)), (threads, k, vec, begin, end)
    assert (stop - begin) % vec == 0, "a vector passes the end of its row"


def check_batches(threads: int, k: int, vec: int, cols: int) -> None:
    """A row in batches, all full but the last: the first and the last."""
    batch = threads * k * vec
    check_columns(threads, k, vec, 0, min(cols, batch))
    check_columns(threads, k, vec, (cols - 1) // batch * batch, cols)


def check_held(threads: int, k: int, vec: int, cols: int) -> None:
    assert threads * k * vec >= cols, "registers do not hold the row"
    check_columns(threads, k, vec, 0, cols)


@functools.lru_cache(4096)
def check_shares(threads: int, warp: int, k: int, vectors: int) -> None:
    """WarpShare of all warps of a row of so many vectors: a lane has at most k of them."""
    lanes = min(threads, warp)
    warps = threads // lanes
    share = ceil_div(ceil_div(vectors, warps), 8) * 8
    assert min(share, vectors) <= k * lanes, "registers do not hold the row"
    begin = np.minimum(np.arange(warps) * share, vectors)
    end = np.minimum(begin + share, vectors)
    assert begin[0] == 0 and end[-1] == vectors and np.array_equal(begin[1:], end[:-1])


def check_ring(plan, inputs: int, k: int, fixed: int, mbarriers: int) -> None:
    """The ring lies behind what reductions take, and holds `stages` rows and, of bulk copies, their mbarriers."""
    assert plan.stages >= 1 and plan.shared_offset >= fixed and plan.shared_offset % 128 == 0
    stage = plan.block * k * 16 * inputs + mbarriers
    assert plan.smem >= plan.shared_offset + plan.stages * stage


def check_teams(plan, rows: int) -> None:
    """Persistent blocks or clusters: none without a row."""
    assert plan.grid % plan.cluster == 0 and plan.grid // plan.cluster <= rows


def groups_of(plan) -> int:
    """Rows of a block at a time; a cluster's blocks share one."""
    if plan.cluster > 1:
        assert plan.threads_per_row == plan.cluster * plan.block
        return 1
    assert plan.block % plan.threads_per_row == 0
    assert plan.threads_per_row % plan.warp == 0 or (
        power_of_two(plan.threads_per_row) and plan.threads_per_row < plan.warp
    )
    return plan.block // plan.threads_per_row


def check_rows(plan, rows: int) -> None:
    """Row = team * groups + group: all rows, and no team without any."""
    assert plan.grid % plan.cluster == 0
    teams, groups = plan.grid // plan.cluster, groups_of(plan)
    assert (teams - 1) * groups < rows <= teams * groups


def check_tiles(blocks: int, width: int, cols: int) -> None:
    """Tiles of `width` columns, none of them empty."""
    assert (blocks - 1) * width < cols <= blocks * width


def check_ranges(rows: int, parts: int) -> None:
    """Ranges of ceil(rows / parts) rows, none of them empty."""
    each = ceil_div(rows, parts)
    assert (parts - 1) * each < rows <= parts * each


def check_singles(threads: int, vec: int, cols: int) -> None:
    """The elements before the first and behind the last whole vector of a row, wherever it starts: a thread's each."""
    for head in range(min(vec, cols + 1)):
        assert head + (cols - head) % vec <= threads


def row_registers(launch, call) -> None:
    check_rows(launch.plan, launch.rows)
    vec, k = launch.instance
    assert k == launch.plan.k or vec == 1
    check_held(launch.plan.threads_per_row, k, vec, launch.cols)


def row_reread(launch, call, k: int = 4) -> None:
    assert launch.plan.grid == launch.rows and power_of_two(launch.plan.block)
    check_batches(launch.plan.block, k, launch.instance[0], launch.cols)


def reduction_bytes(values: int, cluster: int = 1) -> int:
    return 2 * 8 + 2 * values * 32 * cluster * 4


def sum_columns(launch, call) -> None:
    plan, sums = launch.plan, max(1, len(call["record"].parameters)) if call["bias"] else 1
    assert plan.grid % sums == 0 and power_of_two(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    assert launch.cols % sums == 0
    check_tiles(plan.grid // sums, plan.threads_per_row, launch.cols // sums)
    assert plan.block % plan.warp == 0 and plan.smem >= 4 * plan.block


def row_tiles(launch, k: int) -> None:
    plan, vec = launch.plan, launch.instance[0]
    width = plan.threads_per_row * k * vec
    tiles, lines = ceil_div(launch.cols, width), plan.block // plan.threads_per_row
    assert power_of_two(plan.threads_per_row) and lines * plan.threads_per_row == plan.block
    assert plan.grid % tiles == 0
    assert (plan.grid // tiles - 1) * lines < launch.rows <= plan.grid // tiles * lines
    check_batches(plan.threads_per_row, k, vec, launch.cols)


def stream_copy(launch, call) -> None:
    plan = launch.plan
    assert plan.grid * plan.block * launch.instance[0] >= launch.cols


SHARED = {"SumColumns": sum_columns, "StreamCopyKernel": stream_copy}  # no op's own
