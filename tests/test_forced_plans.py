"""Tests that results keep liger_ext.rule under other launch plans: every op with a record, forward and backward, with
forced plans.

They run on a GPU and on the host target (test_host_target); the CPU kernels have no plans. On the host target they also
check that a call launches what the trace of its ops lists (``_C.plans``), for built-in and for tuned plans.
"""

from dataclasses import replace

import instances
import pytest
import torch
from cases import differentiable_outputs, laid_out, library_lines, tensor_leaves
from gpu_paths import arguments, call_size

from liger_ext import _C, _devices, _tuned
from liger_ext._op_calls import OpCalls
from liger_ext.records import RECORDS, InputFactory
from liger_ext.testing import OPS, forced_plans, judge
from liger_ext.tune import Case

KNOBS = [
    {},
    {"threads": 32, "block": 64},
    {"threads": 128, "block": 256, "stages": 1},
    {"threads": 1024, "block": 1024, "resident": 4},
    {"block": 128, "resident": 2},
    {"block": 512},
    {"cluster": 2, "stages": 3},
    {"cluster": 8, "resident": 3, "stages": 8},
]
knob_sets = pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: " ".join(f"{k}={v}" for k, v in knobs.items()))
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def sizes(op, device):
    """Returns sizes with several rows per block, one row per block, and single elements; on a GPU also clusters and
    full grids."""
    record = RECORDS[op]
    if any(record.llama.heads):
        return [(9, 64), (3, 40), (5, 6)] + ([(600, 128)] if device.type == "cuda" else [])
    if device.type == "cuda":
        long = 40_000 if record.llama.hidden else 65_536
        return [(1000, 576), (2000, 4096), (300, 16_384), (140, long), (37, 1001)]
    return [(21, 64), (40, 256), (6, 1024), (2, 5000), (5, 97)]


@knob_sets
@dtypes
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param(torch.device("cpu"), marks=pytest.mark.host),
        pytest.param(torch.device("cuda"), marks=pytest.mark.cuda),
    ],
)
def test_results_with_other_plans(op, device, dtype, knobs):
    for rows, cols in sizes(op, device):
        with forced_plans(**knobs):
            judge(op, arguments(op, rows, cols, dtype, device))


# Launches, as the host target records them ----------------------------------------------------------------------------

OTHER = {"threads": 64, "block": 256}
CASES = {
    op: Case(op, call_size(op, 9, 64 if any(record.llama.heads) else 512))
    for op, record in RECORDS.items()
    if record.kernels == op
}


def launched():
    """Returns (kernel instance, blocks, threads, shared memory) of each launch since the last call."""
    lines = [line.split(" ", 3) for line in library_lines("liger_ext_host_launched")]
    return [(instances.instance_key(name), *map(int, numbers)) for *numbers, name in lines]


def run(op, arguments):
    """Returns what a call launched, and the calls of ops that it made."""
    launched()
    with OpCalls() as calls:
        outputs = differentiable_outputs(OPS[op].run(**arguments))
        if leaves := tensor_leaves(arguments):
            torch.autograd.grad([t.float().sum() for t in outputs], leaves)
    return launched(), calls


def fields(launches):
    return [
        ((launch.kernel, tuple(launch.instance)), launch.plan.grid, launch.plan.block, launch.plan.smem)
        for launch in launches
    ]


def planned(calls, knobs):
    return fields(calls.launches(_devices.running_profile(0), _C.Knobs(**knobs)))


def inputs(op, size=None):
    return RECORDS[op].inputs(InputFactory(torch.bfloat16), size or CASES[op].size)


@pytest.mark.host
@pytest.mark.parametrize("op", CASES)
def test_what_is_planned_is_launched(op):
    found, calls = run(op, inputs(op))
    assert found == planned(calls, {}) != planned(calls, OTHER)
    with forced_plans(**OTHER):
        assert run(op, inputs(op))[0] == planned(calls, OTHER)
    if not RECORDS[op].llama.hidden:  # a loss on the CPU has another plan
        assert found == fields(RECORDS[op].plans(_devices.running_profile(0), CASES[op].size, torch.bfloat16))


def changed(arguments, change):
    """Returns the arguments with other dtypes, layouts or gradients."""
    made = dict(arguments)
    for name, t in arguments.items():
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            continue
        t = t.detach()
        if change == "other parameters" and name in ("weight", "bias"):
            t = t.float()
        if change in ("offset", "padded", "columns") and t.dim() == 2 and name != "weight":
            t = laid_out(t, change)
        made[name] = t.requires_grad_(arguments[name].requires_grad and change not in (f"no d{name}", "no gradient"))
    return made


CHANGES = ["other parameters", "offset", "padded", "columns", "empty", "no gradient", "no dx", "no dweight", "no dbias"]
OPTIONS = [
    ("layer_norm", {"bias": None}),
    ("layer_norm", {"weight": None, "bias": None}),
    ("group_norm", {"bias": None}),
    ("swiglu", {"down_multiplier": 2.0}),
    ("rope", {"layout": "interleaved"}),
    ("cross_entropy", {"softcap": 10.0}),
    ("cross_entropy", {"reduction": "none"}),
    ("fused_linear_cross_entropy", {"softcap": 10.0}),
    ("fused_linear_cross_entropy", {"use_token_scaling": True}),
    ("fused_linear_cross_entropy", {"reduction": "none"}),
]


@pytest.mark.host
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("op", CASES)
def test_what_is_planned_for_other_tensors_is_launched(op, change):
    """Other dtypes of parameters, layouts and gradients."""
    size = CASES[op].size
    arguments = changed(inputs(op, replace(size, rows=0) if change == "empty" else size), change)
    found, calls = run(op, arguments)
    assert found == planned(calls, {})


@pytest.mark.host
@pytest.mark.parametrize(("op", "options"), OPTIONS, ids=str)
def test_what_is_planned_with_options_is_launched(op, options):
    found, calls = run(op, inputs(op) | options)
    assert found == planned(calls, {})


@pytest.mark.host
@pytest.mark.parametrize("op", CASES)
def test_an_entry_is_found_by_its_calls_alone(op):
    """A tuned entry applies to the calls of its key, and to no others."""
    device = _devices.running_profile(0)
    names = [name for name in (op, f"{op}_backward") if CASES[op].tunable(name, device, torch.bfloat16)]
    keys = {CASES[op].tunable(name, device, torch.bfloat16)[0] for name in names}

    def table(**changed):
        name = changed.pop("device", device.name)
        return _tuned.pack([_tuned.Entry(name, "", replace(key, **changed), OTHER, 0, 0) for key in keys])

    def launched_with(installed):
        _tuned.install(installed)
        return run(op, inputs(op))[0]

    _, calls = run(op, inputs(op))
    try:
        assert launched_with(table()) == planned(calls, OTHER)
        assert launched_with(table(rows=16)) == planned(calls, OTHER)  # 9 rows round up to 16
        for other in ({"rows": 17}, {"cols": 520}, {"vec": 4}, {"heads": (1, 1, 1)}, {"device": "another GPU"}):
            assert launched_with(table(**other)) == planned(calls, {}), other
    finally:
        _tuned.install(b"")
