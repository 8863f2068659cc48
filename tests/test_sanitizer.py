"""A small selection of tests for compute-sanitizer: the ops' examples, forward and backward, with small shapes; longer
rows; persistent blocks with enough rows to fill their pipeline stages repeatedly, clusters, and kernels that work in
place. No test uses torch.compile.

Run ``compute-sanitizer --tool memcheck python -m pytest -m "sanitizer and cuda"``, then with ``--tool racecheck``.
"""

import itertools

import pytest
import torch
from cases import differentiable_outputs, gradients, normal, random_targets, tensor_leaves
from gpu_paths import HIDDEN, ROW_OPS, WATCHED, arguments, machine_profile, wraps
from op_plans import plans
from ops import EXAMPLES, IDS

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.testing import OPS

pytestmark = pytest.mark.sanitizer


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small(device, example, dtype):
    assert all(g.isfinite().all() for g in gradients(example, example.arguments(device, dtype)))


def assert_finite(op, inputs):
    """Asserts that the gradients of a call are finite."""
    outputs = differentiable_outputs(OPS[op].run(**inputs))
    found = torch.autograd.grad([t.float().sum() for t in outputs], tensor_leaves(inputs))
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("cols", [64, 1000, 5003, 33_000])
def test_rows(device, cols):
    """Paths that small rows do not use: several warps per row, and two-pass rows."""
    options = {"label_smoothing": 0.1, "softcap": 20.0, "lse_square_scale": 1e-3}
    for op in ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "softmax", "cross_entropy"):
        made = arguments(op, 5, cols, torch.bfloat16, device)
        assert_finite(op, made | (options if op == "cross_entropy" else {}))


@pytest.mark.parametrize("memory", [SMALLEST, 1 << 30])
def test_fused_loss(device, memory):
    x, weight = normal(200, 24, device=device).requires_grad_(), normal(1003, 24, device=device).requires_grad_()
    loss = F.fused_linear_cross_entropy(x, weight, random_targets(200, 1003, device=device), memory=memory)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))


@pytest.mark.cuda
@pytest.mark.parametrize("path", WATCHED, ids=str)
def test_rings_clusters_and_writes_in_place(path):
    assert_finite(path.op, path.arguments(path.rows(machine_profile()), "cuda"))


def watched_kernels(profile):
    """{(op, kernel, its integer arguments, whether it has clusters): whether its pipeline stages, if any, are reused}
    for persistent kernels and kernels with clusters."""
    found = {}
    for path in WATCHED:
        rows = path.rows(profile)
        for launch in path.launches(profile, rows):
            if key := watched(path.op, launch):
                found[key] = found.get(key, True) and (not launch.plan.stages or wraps(launch.plan, rows))
    return found


def watched(op, launch):
    plan = launch.plan
    return (op, launch.kernel, tuple(launch.instance), plan.cluster > 1) if plan.stages or plan.cluster > 1 else None


def planned_kernels(profile):
    """The same kernels, planned for calls of all lengths."""
    lengths = [*range(8, 4096, 56), *range(4096, 600_000, 9992), *(2**i for i in range(12, 20))]
    ops = (*ROW_OPS, "fused_linear_cross_entropy")
    for op, rows, cols, dtype in itertools.product(ops, (1, 40, 300, 65_536), lengths, ("bfloat16", "float32")):
        for planned in (op, f"{op}_backward"):
            for launch in plans(planned, profile, rows, cols, dtype, bias=True, hidden=HIDDEN):
                if key := watched(op, launch):
                    yield key


@pytest.mark.parametrize("name", ["H100", "H200", "B200"])
def test_the_selection_has_every_persistent_kernel_and_every_cluster(name):
    """Kernels with pipeline stages have enough rows to fill each stage repeatedly."""
    profile = _C.profile(name)
    found = watched_kernels(profile)
    assert all(found.values()), [key for key, again in found.items() if not again]
    assert set(planned_kernels(profile)) <= found.keys()
    assert {kernel for _, kernel, _, is_cluster in found if is_cluster} >= {
        "NormForwardRegisters",
        "NormBackwardRegisters",
        "SoftmaxRegisters",
        "SoftmaxLong",
        "SoftmaxBackwardRegisters",
        "SoftmaxBackwardLong",
        "InPlaceHeld",
        "GroupNormHeld",
        "GroupNormBackwardHeld",
    }


def test_the_selection_is_compact():
    """Calls have few rows unless pipeline stages or clusters need more."""
    profile = _C.profile("H200")
    assert sum(path.rows(profile) * path.cols for path in WATCHED) < 1.3e9
