"""Launch plans are legal on every device, for every shape: nothing is launched with more threads than a block may
have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import _C

# name: (warp, multiprocessors, largest block, clusters of 1, 2, 4 and 8 blocks at a time)
DEVICES = {
    "V100": (32, 80, 1024),
    "T4": (32, 40, 1024),
    "A100": (32, 108, 1024),
    "RTX 3070": (32, 46, 1024),
    "H200": (32, 132, 1024, [132, 66, 32, 15]),
    "B200": (32, 148, 1024, [148, 74, 36, 17]),
    "MI250X": (64, 110, 1024),
    "MI300X": (64, 304, 1024),
    "RX 7900 XT": (32, 84, 1024),
    "one small multiprocessor": (64, 1, 256),
}
GRID_LIMIT = 2**31 - 1


def profile(name):
    made = _C.DeviceProfile()
    made.warp, made.multiprocessors, made.max_block_threads, *clusters = DEVICES[name]
    if clusters:
        made.resident_clusters = clusters[0]
    return made


def power_of_two(n):
    return n > 0 and n & (n - 1) == 0


@st.composite
def tilings(draw):
    max_k = draw(st.sampled_from([1, 2, 4]))
    return {
        "vec": draw(st.sampled_from([1, 2, 4, 8])),
        "max_k": max_k,
        "max_block": draw(st.sampled_from([256, 512, 1024])),
        "min_block": draw(st.sampled_from([64, 128, 256])),
        "prefer_k": draw(st.sampled_from([k for k in (1, 2, 4) if k <= max_k])),
    }


rows_and_cols = {
    "rows": st.integers(0, 2**31 - 1) | st.integers(0, 300),
    "cols": st.integers(1, 2**20) | st.integers(1, 300),
}


def check(plan, device, rows, cols, tiling):
    assert plan.warp == device.warp
    assert 0 < plan.block <= min(tiling["max_block"], device.max_block_threads) and plan.block % plan.warp == 0
    assert power_of_two(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    assert plan.threads_per_row <= plan.warp or plan.threads_per_row % plan.warp == 0
    assert plan.vec == tiling["vec"] and 1 <= plan.k <= tiling["max_k"] and power_of_two(plan.k)
    assert 0 < plan.grid <= GRID_LIMIT
    if plan.path == _C.Path.regs:
        assert plan.threads_per_row * plan.k * plan.vec >= cols
    else:
        assert plan.threads_per_row == plan.block and plan.k == tiling["max_k"]


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=100)
@given(tiling=tilings(), **rows_and_cols)
def test_row_plans(name, rows, cols, tiling):
    device, made = profile(name), _C.RowTiling()
    for key, value in tiling.items():
        setattr(made, key, value)
    plan = _C.plan_row(device, rows, cols, made)
    check(plan, device, rows, cols, tiling)
    assert plan.grid * (plan.block // plan.threads_per_row) >= rows


def test_more_blocks_than_a_launch_can_have_is_an_error():
    """Not a part of the work."""
    with pytest.raises(ValueError, match="blocks"):
        _C.plan_row(profile("H200"), 2**40, 4096, _C.RowTiling())


def check_cluster(plan, device, cols):
    """Of a size that the device has, with all of its threads on one row."""
    assert plan.cluster == 1 or device.resident_clusters[plan.cluster.bit_length() - 1] > 0
    assert plan.grid % plan.cluster == 0
    if plan.cluster > 1:
        assert plan.path == _C.Path.regs and plan.threads_per_row == plan.cluster * plan.block
    if plan.path == _C.Path.regs:
        assert plan.threads_per_row * plan.k * plan.vec >= cols


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=200)
@given(vec=st.sampled_from([1, 4, 8]), max_k=st.sampled_from([4, 8]), **rows_and_cols)
def test_forward_plans(name, rows, cols, vec, max_k):
    device = profile(name)
    plan = _C.plan_row_forward(device, rows // 8, cols, vec, max_k)
    assert 0 < plan.block <= device.max_block_threads and plan.block % plan.warp == 0 and plan.k <= max_k
    check_cluster(plan, device, cols)
    assert plan.grid // plan.cluster * max(1, plan.block // plan.threads_per_row) >= rows // 8


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=200)
@given(vec=st.sampled_from([1, 4, 8]), max_block=st.sampled_from([512, 1024]), **rows_and_cols)
def test_persistent_plans(name, rows, cols, vec, max_block):
    """The backward of the norms: a block, or cluster, for each partial row, and all of them on the device at once."""
    device = profile(name)
    plan = _C.plan_norm_backward(device, rows // 8, cols, vec, max_block)
    assert 0 < plan.block <= min(max_block, device.max_block_threads) and plan.block % plan.warp == 0
    check_cluster(plan, device, cols)
    assert plan.grid == plan.partial_rows * plan.cluster
    if plan.cluster == 1:
        assert plan.grid <= 2 * device.multiprocessors
    else:
        assert plan.partial_rows <= device.resident_clusters[plan.cluster.bit_length() - 1]


def test_a_longer_row_never_gets_fewer_threads():
    device, tiling = profile("H200"), _C.RowTiling()
    threads = [_C.plan_row(device, 1000, cols, tiling).threads_per_row for cols in range(1, 20_000, 37)]
    assert threads == sorted(threads)
