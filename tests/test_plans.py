"""Launch plans are legal for any shape, on the reference profiles and on a small device: no launch has more threads
than a block may have. The profiles are consistent, and found by name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import _C
from liger_ext.records import RECORDS


def small_device():
    made = _C.DeviceProfile()
    made.warp, made.multiprocessors, made.max_block_threads = 64, 1, 256
    return made


DEVICES = {device.name: device for device in _C.profiles()} | {"one small multiprocessor": small_device()}
GRID_LIMIT = 2**31 - 1


def profile(name):
    return DEVICES[name]


def is_pow2(n):
    return n > 0 and n & (n - 1) == 0


@st.composite
def tilings(draw):
    max_k = draw(st.sampled_from([1, 2, 4]))
    return {
        "vec": draw(st.sampled_from([1, 2, 4, 8])),
        "max_k": max_k,
        "max_block": draw(st.sampled_from([256, 512, 1024])),
        "min_block": draw(st.sampled_from([64, 128, 256])),
        "k": draw(st.sampled_from([k for k in (1, 2, 4) if k <= max_k])),
        "long_k": draw(st.sampled_from([0, max_k])),
        "long_from": draw(st.sampled_from([32, 64])),
    }


rows_and_cols = {
    "rows": st.integers(0, 2**31 - 1) | st.integers(0, 300),
    "cols": st.integers(1, 2**20) | st.integers(1, 300),
}


def check(plan, device, rows, cols, tiling):
    assert plan.warp == device.warp
    assert 0 < plan.block <= min(tiling["max_block"], device.max_block_threads) and plan.block % plan.warp == 0
    assert is_pow2(plan.threads_per_row) and plan.block % plan.threads_per_row == 0
    assert plan.threads_per_row <= plan.warp or plan.threads_per_row % plan.warp == 0
    assert plan.vec == tiling["vec"] and 1 <= plan.k <= tiling["max_k"] and is_pow2(plan.k)
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
    """The plan must not silently cover only a part of the rows."""
    with pytest.raises(ValueError, match="blocks"):
        _C.plan_row(profile("H200"), 2**40, 4096, _C.RowTiling())


def check_cluster(plan, device, cols):
    """The cluster has a size that the device supports, and all of its threads process one row."""
    assert plan.cluster == 1 or device.resident_clusters[plan.cluster.bit_length() - 1] > 0
    assert plan.grid % plan.cluster == 0
    if plan.cluster > 1:
        assert plan.path == _C.Path.regs and plan.threads_per_row == plan.cluster * plan.block
    if plan.path == _C.Path.regs:
        assert plan.threads_per_row * plan.k * plan.vec >= cols


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=200)
@given(
    vec=st.sampled_from([1, 4, 8]),
    max_k=st.sampled_from([4, 8]),
    long_k=st.sampled_from([0, 5, 6]),
    max_block=st.sampled_from([256, 512, 1024]),
    **rows_and_cols,
)
def test_forward_plans(name, rows, cols, vec, max_k, long_k, max_block):
    device, tiling = profile(name), _C.RowTiling()
    tiling.vec, tiling.max_k, tiling.max_block, tiling.k, tiling.long_k = vec, max_k, max_block, 4, long_k
    plan = _C.plan_row_forward(device, rows // 8, cols, tiling)
    assert 0 < plan.block <= device.max_block_threads and plan.block % plan.warp == 0 and plan.k <= max_k
    assert plan.path == _C.Path.two_pass or plan.threads_per_row * plan.k * vec >= cols
    check_cluster(plan, device, cols)
    assert plan.grid // plan.cluster * max(1, plan.block // plan.threads_per_row) >= rows // 8


@pytest.mark.parametrize("name", DEVICES)
@settings(max_examples=200)
@given(vec=st.sampled_from([1, 4, 8]), centered=st.booleans(), **rows_and_cols)
def test_persistent_plans(name, rows, cols, vec, centered):
    """The backward of the norms: one block or cluster per partial row, all resident at the same time."""
    device = profile(name)
    plan = _C.plan_norm_backward(device, rows // 8, cols, vec, centered)
    assert 0 < plan.block <= 512 and plan.block % plan.warp == 0
    long = not device.bulk_copies and cols > 2 * 512 * vec  # a row that one block holds
    assert plan.k == 4 if vec == 1 or long else plan.k in (2, 3)
    assert plan.path == _C.Path.two_pass or plan.threads_per_row * plan.k * vec >= cols
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


def test_profiles_are_found_by_name():
    names = [device.name for device in _C.profiles()]
    assert len(names) == len(set(names)) == 15
    for name in names:
        for spelling in (name, name.lower(), name.replace(" ", ""), name.replace(" ", "-")):
            assert _C.profile(spelling).name == name


def test_an_unknown_profile_says_which_there_are():
    with pytest.raises(ValueError, match=r"'MI9000'.*V100, T4, .*RX 9070 XT"):
        _C.profile("MI9000")


def test_profiles_are_consistent():
    for device in _C.profiles():
        nvidia = device.vendor == _C.Vendor.nvidia
        assert device.warp == (64 if device.architecture.startswith("gfx9") else 32)
        assert device.max_block_threads == 1024 and device.registers_per_multiprocessor >= 65536
        assert device.shared_per_block <= device.shared_per_block_optin <= device.shared_per_multiprocessor
        assert 2**22 <= device.l2_bytes < device.memory_bytes
        # No bf16 arithmetic before Ampere; clusters and bulk copies from Hopper on.
        assert device.native_bf16 == (device.name not in ("V100", "T4"))
        assert device.bulk_copies == any(device.resident_clusters) == (nvidia and device.arch >= 90)
        assert device.async_copies == (nvidia and 80 <= device.arch < 90)
        assert all(count << i <= device.multiprocessors for i, count in enumerate(device.resident_clusters))
        assert device.architecture in (f"{device.arch // 10}.{device.arch % 10}" if nvidia else f"gfx{device.arch:x}")


def test_clusters_of_the_reference_profiles_are_the_least_there_can_be():
    """A cluster lies in one group of multiprocessors; groups consist of pairs (profiles.cpp)."""

    def least(multiprocessors, groups, largest, cluster):
        fewest = {0: 0}
        for _ in range(groups):
            sums = {}
            for total, count in fewest.items():
                for size in range(0, largest + 1, 2):
                    key = total + size
                    sums[key] = min(sums.get(key, 10**6), count + size // cluster)
            fewest = sums
        return fewest[multiprocessors]

    for name, groups, largest in (("H100", 8, 18), ("B200", 8, 20), ("RTX 5090", 11, 16)):
        device = _C.profile(name)
        assert device.resident_clusters == [least(device.multiprocessors, groups, largest, 1 << i) for i in range(4)]


def test_plans_of_an_unknown_op_or_wrong_arguments():
    arguments = ((1, 8), torch.bfloat16, (8, 1), 0), None, 1e-6, 0.0, 0
    device = _C.profile("T4")
    assert len(_C.plans("rms_norm", device, arguments)) == 1
    with pytest.raises(ValueError, match=r"no op is called 'norm'; known: .*rms_norm, "):
        _C.plans("norm", device, arguments)
    with pytest.raises(ValueError, match="the op has 5 arguments, not 4"):
        _C.plans("rms_norm", device, arguments[:4])
    with pytest.raises(ValueError, match=r"x has dtype torch\.float64, expected float32"):
        _C.plans("rms_norm", device, (((1, 8), torch.float64, (8, 1), 0), *arguments[1:]))
    with pytest.raises(ValueError, match="a tensor has 2 sizes and 1 strides"):
        _C.plans("rms_norm", device, (((1, 8), torch.bfloat16, (8,), 0), *arguments[1:]))
    with pytest.raises(
        ValueError, match=r"argument 0 is \(1, 8\), expected None, .* or \(shape, dtype, strides, offset\)"
    ):
        _C.plans("rms_norm", device, ((1, 8), *arguments[1:]))


def test_plans_of_a_record_refuse_unknown_names():
    record, device = RECORDS["rms_norm"], _C.profile("T4")
    with pytest.raises(ValueError, match="name is 'norm', expected rms_norm, rms_norm_backward or ''"):
        record.plans(device, record.llama, torch.bfloat16, "norm")
    with pytest.raises(ValueError, match="frozen has 'bias', expected names of tensors among x, weight"):
        record.plans(device, record.llama, torch.bfloat16, frozen=("bias",))
