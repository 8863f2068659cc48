"""Every launch of every op is legal on every GPU of the reference profiles, for any shape and any knobs, and covers
every element of every row exactly once. Plans are computed on any machine; plan_model.py models which elements the
kernels process under a plan.

Registers: a block's registers must fit in a multiprocessor's register file. The compiler allocates per thread at most
as many as fit if a block has as many threads as the kernel's launch bound (65,536 / bound on an NVIDIA GPU). So these
tests only check that a block has no more threads than that. Where a CUDA library and cuobjdump are available,
``test_registers_of_the_built_library`` uses the compiler's report instead, and finds kernels that the planner's table
of instances lacks."""

import itertools
import os
import re
import shutil
import subprocess
import sysconfig

import instances
import pytest
from gpu_paths import NORMS
from hypothesis import given, settings
from hypothesis import strategies as st
from op_plans import OPS, plans
from ops import PLAN_MODELS
from plan_model import SHARED, reduction_bytes

from liger_ext import _C, _load
from liger_ext.records import RECORDS

PROFILES = list(_C.profiles())
MODELS = SHARED | PLAN_MODELS
OP_RECORDS = {  # of an op or its backward; the copy has no record
    name: record
    for record in RECORDS.values()
    for name in (record.kernels, f"{record.kernels}_backward")
    if record.kernels == record.name
}
WITH_HEADS = {name for name, record in OP_RECORDS.items() if any(record.llama.heads)}
IN_GROUPS = {"group_norm", "group_norm_backward"}
INSTANCES = instances.table()
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def small_device():
    device = _C.DeviceProfile()  # no GPU: the smallest device that plans must support
    device.warp, device.multiprocessors, device.max_block_threads = 64, 1, 1024
    return device


def without_clusters(*counts):
    """A device with kernels for clusters that holds few clusters, or whose driver did not report how many."""
    device = _C.profile("H200")
    device.resident_clusters = counts
    return device


DEVICES = (*PROFILES, small_device(), without_clusters(0, 0, 0, 0), without_clusters(9, 4, 1, 0))


rows = st.integers(0, 10**6) | st.integers(0, 300) | st.sampled_from([1, 2, 131, 132, 133, 8192, 2**20])
cols = st.integers(1, 262_144) | st.integers(1, 300) | st.sampled_from([2**i for i in range(19)]) | st.sampled_from(
    [127, 1001, 4100, 5120, 11_008, 14_336, 32_000, 50_257, 65_537, 128_256, 151_936, 262_144]
)  # fmt: skip


@st.composite
def calls(draw, op):
    call = {"rows": draw(rows), "cols": draw(cols), "dtype": draw(st.sampled_from(sorted(BYTES)))}
    for name in ("aligned", "contiguous", "mixed", "full", "per_row", "bias", "frozen"):
        call[name] = draw(st.booleans())
    if op in WITH_HEADS:
        call["cols"] = 2 * draw(st.integers(1, 256))
        call["rotary_dim"] = draw(st.sampled_from([0, 2 * draw(st.integers(1, call["cols"] // 2))]))
        call["q_heads"], call["k_heads"] = draw(st.integers(1, 200)), draw(st.integers(0, 64))
        call["interleaved"] = draw(st.booleans())
    if op in IN_GROUPS:
        call["groups"] = draw(st.sampled_from([1, 2, 32]))
        call["rows"] = call["rows"] // call["groups"] * call["groups"]
        call["channel"] = draw(st.sampled_from([0, 1, 7, 64, 4096, 16_384]))
        if call["channel"]:
            call["cols"] = -(-call["cols"] // call["channel"]) * call["channel"]
    if op in OP_RECORDS and OP_RECORDS[op].llama.hidden:
        call["hidden"] = draw(st.integers(1, 16_384))
        call["chunk_rows"] = draw(st.sampled_from([0, 128, 1024, 4096]))
        call["chunk_classes"] = draw(st.sampled_from([0, 0, 64, 1024]))
    return call


KNOBS = ("threads", "block", "cluster", "stages", "resident")
some_knobs = st.fixed_dictionaries(
    {},
    optional={
        name: st.sampled_from([1, 2, 4, 8, 32, 128, 256, 512, 1024]) | st.integers(-5, 5000) | st.just(2**31 - 1)
        for name in KNOBS
    },
).map(lambda chosen: _C.Knobs(**chosen))


def check_legal(launch, device, registers=None):
    plan = launch.plan
    assert launch.max_threads == INSTANCES[launch.kernel, tuple(launch.instance)]
    assert plan.warp == device.warp
    assert 0 < plan.block <= min(device.max_block_threads, launch.max_threads) and plan.block % device.warp == 0
    assert 0 < plan.grid <= 2**31 - 1
    if device.vendor == _C.Vendor.amd:
        assert plan.grid * plan.block < 2**32  # HIP counts threads in 32 bits
    assert 0 <= plan.smem <= device.shared_per_block_optin
    assert plan.cluster == 1 or device.resident_clusters[plan.cluster.bit_length() - 1] > 0
    if registers is None:
        # The launch bound keeps a block of max_threads threads within the register file; the granularity is 8.
        registers = device.registers_per_multiprocessor // launch.max_threads // 8 * 8
    assert plan.block * registers <= device.registers_per_multiprocessor


def launches(op, device, call):
    """Returns the launches of a call. None: it needs more blocks, or under HIP more threads, than a launch may have."""
    try:
        return plans(op, device, **call)
    except ValueError as error:
        if "more blocks than one launch" in str(error):
            assert call["rows"] * call["cols"] >= 2**31 * 64
            return None
        assert "more threads than one launch" in str(error) and device.vendor == _C.Vendor.amd
        assert call["rows"] * max(call["cols"], call.get("hidden", 1)) * call.get("q_heads", 1) >= 2**32
        return None


def check_call(op, device, call):
    made = launches(op, device, call) or []
    for launch in made:
        check_legal(launch, device)
        facts = {**call, "record": OP_RECORDS.get(op), "device": device, "element_bytes": BYTES[call["dtype"]]}
        MODELS[launch.kernel](launch, facts)


@pytest.mark.parametrize("op", OPS)
def test_plans_are_legal_and_cover_everything(op):
    @settings(max_examples=300)
    @given(call=calls(op))
    def every_profile(call):
        for device in DEVICES:
            check_call(op, device, call)

    every_profile()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_plans_with_any_knobs_are_legal_and_cover_everything(op):
    @settings(max_examples=300)
    @given(call=calls(op), knobs=some_knobs)
    def every_profile(call, knobs):
        for device in DEVICES:
            check_call(op, device, call | {"knobs": knobs})

    every_profile()


@pytest.mark.parametrize("op", [f"{op}_backward" for op in NORMS])
@settings(max_examples=200)
@given(data=st.data(), knobs=some_knobs)
def test_the_workspace_of_column_sums_is_enough(op, data, knobs):
    call = data.draw(calls(op)) | {"knobs": knobs}
    for device in PROFILES:
        most = _C.norm_partial_rows(device, call["rows"], call["cols"], len(OP_RECORDS[op].parameters) > 1)
        for launch in launches(op, device, call) or []:
            assert launch.plan.partial_rows <= most


def plan_fields(launch):
    fields = ("path", "k", "threads_per_row", "block", "grid", "cluster", "smem", "stages", "partial_rows")
    return launch.kernel, tuple(launch.instance), *(getattr(launch.plan, name) for name in fields)


@pytest.mark.parametrize(
    ("op", "cols", "knobs", "elsewhere"),
    [
        ("rms_norm", 4096, {"threads": 256}, {"stages": 4}),
        ("rms_norm", 4096, {"block": 512}, {"stages": 4}),
        ("layer_norm", 16_384, {"cluster": 2}, {"stages": 4}),
        ("add_rms_norm", 65_536, {"cluster": 8}, {"stages": 4}),
        ("rms_norm", 65_536, {"threads": 1024}, {"stages": 4}),
        ("rms_norm_backward", 4096, {"threads": 512}, {}),
        ("rms_norm_backward", 4096, {"stages": 4}, {}),
        ("layer_norm_backward", 4096, {"resident": 2}, {}),
        ("swiglu", 11_008, {"block": 128}, {"cluster": 4}),
        ("geglu_backward", 11_008, {"block": 256}, {"cluster": 4}),
        ("rope", 128, {"block": 256}, {"cluster": 4}),
        ("rope_backward", 128, {"block": 64}, {"cluster": 4}),
        ("softmax", 32_768, {"threads": 1024}, {"stages": 4}),
        ("softmax_backward", 1024, {"threads": 128}, {"stages": 4}),
        ("cross_entropy", 32_000, {"threads": 512}, {"stages": 4}),
        ("cross_entropy_backward", 32_000, {"block": 128}, {"stages": 4}),
        ("fused_linear_cross_entropy", 32_000, {"threads": 1024}, {"stages": 4}),
        ("fused_linear_cross_entropy", 32_000, {"cluster": 4}, {"stages": 4}),
    ],
)
def test_knobs_change_the_tunable_launch_alone(op, cols, knobs, elsewhere):
    """On an H200. ``elsewhere``, knobs for other kernels, changes nothing; it is empty if the knobs apply to all
    kernels."""
    device, heads = _C.profile("H200"), {"q_heads": 32, "k_heads": 8}
    own = plans(op, device, 8192, cols, **heads)
    tuned = plans(op, device, 8192, cols, **heads, knobs=_C.Knobs(**knobs))
    assert [launch.tunable for launch in own] == [launch.tunable for launch in tuned]
    for a, b in zip(own, tuned, strict=True):
        assert a.kernel == "SumColumns" or (plan_fields(a) != plan_fields(b)) == bool(a.tunable), a.kernel
    for a, b in zip(own, plans(op, device, 8192, cols, **heads, knobs=_C.Knobs(**elsewhere)), strict=True):
        assert plan_fields(a) == plan_fields(b)


def test_every_op_but_the_copy_has_a_launch_with_knobs():
    device = _C.profile("H200")
    without = {"stream_copy", "dequantize_4bit", "seeded_dropout", "fused_linear_cross_entropy_backward"}
    tunable = {op: [launch.tunable for launch in plans(op, device, 8192, 4096)] for op in OPS}
    assert {op for op, found in tunable.items() if not any(found)} == without
    assert {name for found in tunable.values() for name in found if name} <= set(OPS)


def test_no_launch_for_nothing():
    for op in ("rms_norm", "rms_norm_backward", "swiglu", "rope", "softmax", "cross_entropy_backward", "stream_copy"):
        assert plans(op, _C.profile("H200"), 0, 4096) == []


def test_all_profiles_take_llama_sizes():
    """No error, even near HIP's limit: hidden sizes and vocabularies of Llama, a million tokens."""
    for device in PROFILES:
        for op in OPS:
            cols = OP_RECORDS[op].llama.cols if op in OP_RECORDS else 8192
            rows = 2**18 if cols > 2**16 else 2**20  # more rows of logits fit in no GPU
            assert plans(op, device, rows, cols, q_heads=64, k_heads=8, hidden=8192, chunk_rows=4096)


# Wrong plans are found -----------------------------------------------------------------------------------------------


def changed(launch, **fields):
    """A copy of the launch with other values in its plan."""
    plan = {name: getattr(launch.plan, name) for name in dir(launch.plan) if not name.startswith("_")}
    of_launch = {
        name: fields.pop(name, getattr(launch, name)) for name in ("kernel", "instance", "rows", "cols", "max_threads")
    }
    return type("Launch", (), {**of_launch, "plan": type("Plan", (), plan | fields)})


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("rms_norm", {"grid": 999}),
        ("rms_norm", {"grid": 1001}),
        ("rms_norm", {"threads_per_row": 64}),
        ("rms_norm", {"cols": 4097}),
        ("rms_norm_backward", {"partial_rows": 3}),
        ("rms_norm_backward", {"stages": 0}),
        ("swiglu", {"grid": 10}),
        ("softmax", {"instance": [8, 1]}),
        ("cross_entropy_backward", {"grid": 1}),
        ("stream_copy", {"grid": 10}),
    ],
)
def test_the_model_finds_wrong_plans(op, wrong):
    device = _C.profile("H200")
    first = plans(op, device, 1000, 4096)[0]
    facts = {"record": OP_RECORDS.get(op), "device": device, "element_bytes": 2}
    MODELS[first.kernel](changed(first), facts)
    with pytest.raises(AssertionError):
        MODELS[first.kernel](changed(first, **wrong), facts)


@pytest.mark.parametrize(
    ("device", "wrong"),
    [
        ("MI300X", {"block": 2048}),  # 32 warps of 64 lanes: the failure that motivates this project
        ("MI300X", {"block": 96}),
        ("H200", {"grid": 2**31}),
        ("MI250X", {"grid": 2**26}),
        ("T4", {"smem": 65_537}),
        ("A100", {"cluster": 2}),
        ("H200", {"block": 256, "max_threads": 128}),
    ],
)
def test_illegal_plans_are_found(device, wrong):
    device = _C.profile(device)
    first = plans("rms_norm", device, 1000, 4096)[0]
    check_legal(changed(first), device)
    with pytest.raises(AssertionError):
        check_legal(changed(first, **wrong), device)


def test_the_failure_of_upstream():
    """32 warps of 64 lanes are 2,048 threads, but a block may have 1,024: on MI250X and MI300X, in training."""
    for name in ("MI250X", "MI300X", "MI355X"):
        for op in ("rms_norm_backward", "layer_norm_backward", "cross_entropy", "fused_linear_cross_entropy"):
            for size in (4096, 32_768, 65_536, 128_256):
                assert all(launch.plan.block <= 1024 for launch in plans(op, _C.profile(name), 8192, size))


# Against the built library -------------------------------------------------------------------------------------------


def cuda_report():
    """The most registers of any variant of each kernel instance, {(kernel, its integer arguments): registers}."""
    packages = sysconfig.get_path("purelib") + "/nvidia/cu13/bin"  # of nvidia-cuda-cuobjdump
    toolkits = [os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin", os.environ["PATH"], packages]
    tool = shutil.which("cuobjdump", path=os.pathsep.join(toolkits))
    library = _load.library_folder() / "libliger_ext_cuda.so"
    if tool is None or shutil.which("c++filt") is None or not library.exists():
        pytest.skip("needs cuobjdump, c++filt and a GPU library: the launch bounds stand in")
    if "entry" not in (text := subprocess.run([tool, "-res-usage", library], capture_output=True, text=True).stdout):
        pytest.skip("the GPU library has no CUDA machine code")
    text = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    report = {}
    for name, used in re.findall(r"Function void liger::gpu::entry<(.*?)>\(.*?\n.*?REG:(\d+)", text):
        report[instances.instance_key(name)] = max(int(used), report.get(instances.instance_key(name), 0))
    return report


def sweep():
    """Launches on NVIDIA's profiles that together use every kernel."""
    short = [1, 7, 8, 32, 64, 100, 128, 129, 256, 512, 576, 1000, 1024, 2048, 3001, 3072]
    sizes = [*short, 5120, *(2**i for i in range(12, 19)), 75_000, 151_936]
    choices = itertools.product(
        (device for device in PROFILES if device.vendor == _C.Vendor.nvidia),
        OPS,
        (8, 4096),
        sizes,
        ((True, "bfloat16"), (True, "float32"), (False, "bfloat16"), (False, "float32")),
        (
            {},
            {"mixed": True},
            {"full": True, "class_weight": True, "interleaved": True},
            {"per_row": True},
            {"moments": True, "per_row": True},
            {"frozen": True},
            {"chunk_classes": 1024, "full": True},
            {"chunk_classes": 1 << 20, "chunk_rows": 0, "overlaid": True, "hidden": 64},
            *({"knobs": _C.Knobs(threads=n, block=n, cluster=n)} for n in (4, 1024)),
        ),
    )
    for device, op, rows, cols, (aligned, dtype), options in choices:
        cols = max(2, min(cols, 512) // 2 * 2) if op in WITH_HEADS else cols
        options = {"aligned": aligned, "bias": True, "chunk_rows": 1024, **options}
        yield from ((device, launch) for launch in plans(op, device, rows, cols, dtype, **options))


# Sizes of a copy, and column sums of unaligned rows: the fused loss allocates aligned rows of logits.
NOT_PLANNED = {*(("StreamCopyKernel", (k,)) for k in (1, 2, 8)), ("PartialColumns", (1,))}


def test_every_instance_is_planned_and_known_to_the_model():
    planned = {(launch.kernel, tuple(launch.instance)) for _, launch in sweep()}
    assert planned == INSTANCES.keys() - NOT_PLANNED
    assert {kernel for kernel, _ in planned} == MODELS.keys()


def test_registers_of_the_built_library():
    """Every instance of the table is in the library, no other is, and every plan fits the register file."""
    report = cuda_report()
    assert report.keys() - {("Idle", ())} == INSTANCES.keys()  # a kernel that only counts clusters
    for device, launch in sweep():
        check_legal(launch, device, registers=-(-report[launch.kernel, tuple(launch.instance)] // 8) * 8)


def test_shared_memory_of_reductions():
    plan = plans("rms_norm", _C.profile("H200"), 100, 4096)[0].plan
    assert plan.smem == reduction_bytes(1)
