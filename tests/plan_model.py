"""What the kernels in csrc/gpu make of a launch, as arithmetic: which elements each thread takes. ``check_coverage``
raises AssertionError unless every element of every row is taken exactly once. The formulas are those of Columns and
RowGroup (gpu/rows.h), WarpShare (gpu/row_stream.h), RowWalk (gpu/cross_entropy_rows.h), Piece (gpu/elementwise.cu) and
of the kernels' own first lines."""

from __future__ import annotations

import functools

import numpy as np
import ops


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
    share = ceil_div(vectors, warps)
    assert share <= k * lanes, "registers do not hold the row"
    begin = np.minimum(np.arange(warps) * share, vectors)
    end = np.minimum(begin + share, vectors)
    assert begin[0] == 0 and end[-1] == vectors and np.array_equal(begin[1:], end[:-1])


def check_ring(plan, inputs: int, k: int, fixed: int, inboxes: int) -> None:
    """The ring lies behind what reductions take, and holds `stages` rows and, of bulk copies, their inboxes."""
    assert plan.stages >= 1 and plan.ring_offset >= fixed and plan.ring_offset % 128 == 0
    stage = plan.block * k * 16 * inputs + inboxes
    assert plan.smem >= plan.ring_offset + plan.stages * stage


def check_teams(plan, rows: int) -> None:
    """Persistent blocks or clusters: none without a row."""
    assert plan.grid % plan.cluster == 0 and plan.grid // plan.cluster <= rows


def groups_of(plan) -> int:
    """Rows of a block at a time; a cluster's blocks share one."""
    if plan.cluster > 1:
        assert plan.threads_per_row == plan.cluster * plan.block
        return 1
    assert power_of_two(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    assert plan.threads_per_row <= plan.warp or plan.threads_per_row % plan.warp == 0
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


def row_registers(launch, call) -> None:
    check_rows(launch.plan, launch.rows)
    vec, k, *bound = launch.instance  # the forward of the norms has a kernel of its own for clusters
    assert k == launch.plan.k or vec == 1
    assert not bound or (bound[0] < 1024) == (launch.plan.cluster > 1)
    check_held(launch.plan.threads_per_row, k, vec, launch.cols)


def row_reread(launch, call, k: int = 4) -> None:
    assert launch.plan.grid == launch.rows and power_of_two(launch.plan.block)
    check_batches(launch.plan.block, k, launch.instance[0], launch.cols)


def norm_backward_registers(launch, call) -> None:
    plan, (vec, k, threads) = launch.plan, launch.instance
    groups, teams = groups_of(plan), plan.grid // plan.cluster
    assert threads in (0, min(plan.threads_per_row, plan.block))  # what the kernel knows of its rows' threads
    assert k == plan.k
    check_shares(plan.threads_per_row, plan.warp, k, launch.cols // vec)
    device, centered = call["device"], call["op"].startswith("layer")
    assert (plan.stages > 0) == (vec > 1 and (device.bulk_copies or (device.async_copies and not centered)))
    if plan.stages:
        inboxes = plan.block // plan.warp * 8 if device.bulk_copies else 0
        check_ring(plan, 3 if call["op"].startswith("add") else 2, k, reduction_bytes(2, plan.cluster), inboxes)
        assert plan.stages <= 4 or not device.async_copies
    assert teams == plan.partial_rows and (teams - 1) * groups < launch.rows
    first = np.add.outer(np.arange(teams) * groups, np.arange(groups)).ravel()  # then every teams * groups rows
    assert np.array_equal(first, np.arange(teams * groups))
    if groups > 1:
        sums = 2 if centered else 1
        assert plan.smem >= reduction_bytes(2) + groups * sums * launch.cols * 4


def reduction_bytes(values: int, cluster: int = 1) -> int:
    return 2 * 8 + 2 * values * 32 * cluster * 4


def norm_backward_means(launch, call) -> None:
    row_reread(launch, call, k=2 if launch.instance[0] == 8 else 4)


def norm_backward_tiles(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    tiles = ceil_div(launch.cols, plan.block * vec)
    assert plan.grid == tiles * plan.partial_rows
    check_ranges(launch.rows, plan.partial_rows)
    check_batches(plan.block, 1, vec, launch.cols)


def sum_columns(launch, call) -> None:
    plan, groups = (
        launch.plan,
        2 if call["op"].startswith(("layer", "group")) and call["bias"] else 1,
    )  # dweight and dbias
    assert plan.grid % groups == 0 and power_of_two(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    check_tiles(plan.grid // groups, plan.threads_per_row, launch.cols)
    assert plan.block % plan.warp == 0 and plan.smem >= 4 * plan.block


def row_tiles(launch, k: int) -> None:
    plan, vec = launch.plan, launch.instance[0]
    width = plan.threads_per_row * k * vec
    tiles, lines = ceil_div(launch.cols, width), plan.block // plan.threads_per_row
    assert power_of_two(plan.threads_per_row) and lines * plan.threads_per_row == plan.block
    assert plan.grid % tiles == 0
    assert (plan.grid // tiles - 1) * lines < launch.rows <= plan.grid // tiles * lines
    check_batches(plan.threads_per_row, k, vec, launch.cols)


def glu(launch, call) -> None:
    row_tiles(launch, 2)


def rope(launch, call) -> None:
    vec, rotary = launch.instance[0], call.get("rotary_dim") or launch.cols
    plan = call["rope_plan"](vec)
    assert launch.plan.grid * launch.plan.block <= 2**31 and launch.rows <= call["rows"]
    threads = launch.rows * plan.lanes * (plan.q_slots + plan.k_slots)
    assert (launch.plan.grid - 1) * launch.plan.block < threads <= launch.plan.grid * launch.plan.block
    for heads, slots in ((call["q_heads"], plan.q_slots), (call["k_heads"], plan.k_slots)):
        taken = sorted(h for first in range(slots) for h in (first, first + slots) if h < heads)
        assert taken == list(range(heads))
    half, rotating, passing = rotary // 2, rotary // 2 // vec, (launch.cols - rotary) // vec
    pairs, taken = ceil_div(passing, 2), []
    assert plan.lanes == max(1, rotating + pairs)
    for place in range(rotating + pairs):
        passed = place - rotating
        low = place * vec if place < rotating else 2 * half + passed * vec
        pair = half if place < rotating else pairs * vec if passed + pairs < passing else 0
        taken += [low, low + pair] if pair else [low]
    assert sorted(taken) == list(range(0, launch.cols, vec)), "head"


def check_singles(threads: int, vec: int, cols: int) -> None:
    """The elements before the first and behind the last whole vector of a row, wherever it starts: a thread's each."""
    for head in range(min(vec, cols + 1)):
        assert head + (cols - head) % vec <= threads


def logit_tiles(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    width = plan.threads_per_row * vec * (2 if vec == 1 else 4)
    tiles, lines = ceil_div(launch.cols, width), plan.block // plan.threads_per_row
    assert plan.grid % tiles == 0
    assert (plan.grid // tiles - 1) * lines < launch.rows <= plan.grid // tiles * lines
    check_singles(plan.threads_per_row, vec, launch.cols)


def logit_row_held(launch, call) -> None:
    plan, (vec, k) = launch.plan, launch.instance
    check_rows(plan, launch.rows)
    assert k == plan.k and (k == 8 or plan.cluster > 1) and plan.smem >= reduction_bytes(2, plan.cluster)
    check_held(plan.threads_per_row, k, vec, launch.cols // vec * vec)
    assert launch.cols % vec <= plan.threads_per_row


def logit_row(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    check_rows(plan, launch.rows)
    check_singles(plan.threads_per_row, vec, launch.cols)
    if launch.kernel == "InPlace":
        assert plan.smem >= reduction_bytes(2) + plan.k * plan.block * vec * call["element_bytes"]
        assert 0 <= plan.k <= ceil_div(ceil_div(launch.cols, vec), plan.threads_per_row)
    else:
        threads = launch.instance[1]  # what the kernel knows of its rows' and blocks' threads
        assert threads == 0 or threads == plan.block == plan.threads_per_row == launch.max_threads
        assert plan.k == 0 and plan.smem >= reduction_bytes(2)


def block_sum(launch, call) -> None:
    assert launch.plan.grid == 1 and launch.plan.block // launch.plan.warp <= min(32, launch.plan.warp)
    assert launch.plan.smem >= 3 * 8 * 32


def one_each(launch, call) -> None:
    check_tiles(launch.plan.grid, launch.plan.block, launch.rows)


def pieces(launch, call) -> None:
    plan, vec, in_flight = launch.plan, launch.instance[0], 4
    blocks_per_row, vectors = plan.grid // launch.rows, launch.cols // vec
    assert plan.grid == blocks_per_row * launch.rows
    assert vectors <= blocks_per_row * plan.block * in_flight
    assert launch.cols - vectors * vec <= plan.block


def partial_columns(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    check_ranges(launch.rows, plan.partial_rows)
    assert plan.grid % plan.partial_rows == 0
    vectors = launch.cols // vec
    check_tiles(plan.grid // plan.partial_rows, plan.block, vectors + launch.cols - vectors * vec)


def scalar(launch, call) -> None:
    assert launch.plan.grid == 1 and launch.plan.block // launch.plan.warp <= min(32, launch.plan.warp)


def stream_copy(launch, call) -> None:
    plan = launch.plan
    assert plan.grid * plan.block * launch.instance[0] >= launch.cols


KERNELS = {
    "NormForwardRegisters": row_registers,
    "NormForwardReread": row_reread,
    "NormBackwardRegisters": norm_backward_registers,
    "NormBackwardRows": row_registers,
    "NormBackwardMeans": norm_backward_means,
    "NormBackwardTiles": norm_backward_tiles,
    "SumColumns": sum_columns,
    "SoftmaxRegisters": row_registers,
    "SoftmaxReread": row_reread,
    "SoftmaxBackwardRegisters": row_registers,
    "SoftmaxBackwardReread": row_reread,
    "GluForwardKernel": glu,
    "GluBackwardKernel": glu,
    "RopeKernel": rope,
    "CountTargets": block_sum,
    "Forward": logit_row,
    "Backward": logit_tiles,
    "InPlace": logit_row,
    "InPlaceRegisters": logit_row_held,
    "SumLosses": block_sum,
    "AddLosses": one_each,
    "Fill": pieces,
    "Scale": pieces,
    "PartialColumns": partial_columns,
    "Product": scalar,
    "StreamCopyKernel": stream_copy,
    **ops.PLAN_MODELS,
}


def check_coverage(launch, call: dict) -> None:
    KERNELS[launch.kernel](launch, call)
