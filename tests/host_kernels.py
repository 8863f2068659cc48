"""Tests of every GPU kernel on the host against float64: forward and backward, three dtypes, odd sizes, long rows.

pytest does not collect this file by itself, because it requires the library of the host target. test_host_target runs
all of it in one process for each target (warps of 32 and of 64, clusters), and shows the number of cases of each
kernel. To run it by hand after ``make host`` has built the library::

    LIGER_EXT_LIB=liger_ext/lib/host LIGER_EXT_HOST_WARP=64 python -m pytest tests/host_kernels.py -k softmax
"""

import functools
import itertools
import os
import re
from collections import Counter, defaultdict

import dropout_mask
import four_bit
import instances
import kernel_cases
import pytest
import test_linear_log_probs as log_probs
import torch
from cases import LOW, ahead_target, laid_out, library_lines, normal, random_targets, slow_if
from kernel_cases import Case
from ops import BY_NAME, EXAMPLES, IDS
from ops.glu import check_h, h_cases

from liger_ext import _C
from liger_ext.ops._loss_plan import SMALLEST, Plan
from liger_ext.records import RECORDS, Size
from liger_ext.testing import judge

torch.set_num_threads(1)  # kernels of the host target run on one thread, and the references are small

dtypes = pytest.mark.parametrize("dtype", LOW, ids=["fp32", "bf16", "fp16"])
kernel_case_counts = Counter()  # {kernel: number of this process's tests that launched it}


def launches():
    """Returns {kernel: number of launches}."""
    lines = (line.split(" ", 1) for line in library_lines("liger_ext_host_kernels"))
    return {name: int(count) for count, name in lines}


def launched_since():
    """Returns [(kernel, bytes of shared memory)] of the launches since the last call of this function."""
    lines = (line.split(" ", 3) for line in library_lines("liger_ext_host_launched"))
    return [(name, int(shared_bytes)) for _, _, shared_bytes, name in lines]


@pytest.fixture(autouse=True)
def count_cases():
    before = launches()
    yield
    kernel_case_counts.update(name for name, count in launches().items() if count > before[name])


ROWS = [
    name
    for name, record in RECORDS.items()
    if record.kernels == name and record.outputs != ("loss",) and not any(record.llama.heads)
]


def judge_case(case):
    judge(case.op, kernel_cases.with_gradients(case, case.inputs()))


def run(op, rows, cols, dtype, *, hidden=0, layout="", other_dtype=(), **options):
    """Judges a call with the inputs of the op's record. ``hidden``: of a fused loss."""
    case = Case(op, Size(rows, cols, hidden=hidden), dtype, options=options, layout=layout, other_dtype=other_dtype)
    judge_case(case)


loss = functools.partial(run, "cross_entropy")
fused_loss = functools.partial(run, "fused_linear_cross_entropy", hidden=8)


@pytest.mark.parametrize("case", [slow_if(not case.quick, case) for case in kernel_cases.cases()], ids=str)
def test_kernel_cases(case):
    judge_case(case)


@dtypes
@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_small(example, dtype):
    judge(example.op, example.arguments("cpu", dtype))


# The number of a row's threads, and of a thread's vectors, is 2^n or 3 * 2^n. One vector more than that reveals a plan
# that covers one vector too few.
@dtypes
@pytest.mark.parametrize(
    "rows, cols",
    [(0, 8), (1, 1), (3, 7), (3, 33), (5, 64), (3, 65), (1, 129), (1, 257), (1, 513), (1, 1025), (9, 1024)],
)
@pytest.mark.parametrize("op", ROWS)
def test_odd_sizes(op, rows, cols, dtype):
    run(op, rows, cols, dtype)


# Row lengths in 16-byte vectors: two to eight vectors per thread in blocks of up to 1,024 threads, and two-pass rows.
@dtypes
@pytest.mark.parametrize(
    "rows, vectors",
    [(9, 17), (3, 65), (2, 129), (3, 257), (1, 513), (1, 1025), (1, 1537), (1, 2049), (1, 4097), (1, 8193)],
)
@pytest.mark.parametrize("op", ROWS)
def test_long_rows(op, rows, vectors, dtype):
    cols = vectors * 16 // dtype.itemsize
    run(op, rows, cols, dtype)
    if RECORDS[op].parameters:  # parameters of another dtype have other kernel instances
        run(op, rows, cols, dtype, other_dtype=RECORDS[op].parameters)


@dtypes
@pytest.mark.parametrize("op", ROWS)
def test_long_unaligned_rows(op, dtype):
    run(op, 2, 4097, dtype)
    run(op, 9, 40, dtype, layout="padded")
    run(op, 3, 24, dtype, layout="offset")


@dtypes
@pytest.mark.parametrize("cols", [100, 1001, 5001])
def test_softmax_of_a_gradient_at_another_address(cols, dtype):
    """dy and y have different offsets from a multiple of 16 bytes, so the kernel reads single elements at any
    length."""
    y = normal(3, cols, dtype=dtype, scale=3).softmax(-1)
    dy = laid_out(normal(3, cols, dtype=dtype, seed=1), "offset")
    found, same = (torch.ops.liger_ext.softmax_backward(t, y) for t in (dy, dy.clone()))
    torch.testing.assert_close(found, same)


@dtypes
def test_mixed_dtypes(dtype):
    run("add_rms_norm", 3, 40, dtype, other_dtype=("residual",), casting_mode="gemma", offset=1.0)
    run("geglu", 3, 33, dtype, approximate="none")
    # Only a direct call of the op has an upstream gradient of another dtype than the activations.
    x, weight = normal(5, 48, dtype=dtype), normal(48, dtype=dtype, seed=2)
    dy = normal(5, 48, dtype=torch.bfloat16, seed=1)
    rstd = torch.ops.liger_ext.rms_norm(x, weight, 1e-6, 0.0, -1)[1]
    for need_dweight in (True, False):
        found = torch.ops.liger_ext.rms_norm_backward(dy, x, weight, rstd, 0.0, True, need_dweight)
        same = torch.ops.liger_ext.rms_norm_backward(dy.to(dtype), x, weight, rstd, 0.0, True, need_dweight)
        for a, b in zip(found, same, strict=True):
            torch.testing.assert_close(a, b)


@dtypes
def test_h_of_the_glu_backward(dtype):
    for arguments in h_cases(dtype):
        check_h(*arguments)


@dtypes
@pytest.mark.parametrize(
    "rows, vocab", [(0, 8), (3, 1), (3, 33), (40, 64), (1, 1025), (3, 2049), (3, 5003), (2, 40_000)]
)
def test_loss(rows, vocab, dtype):
    loss(rows, vocab, dtype)
    loss(rows, vocab, dtype, label_smoothing=0.1, lse_square_scale=1e-3, return_predicted_tokens=True)
    # Aligned rows that end with an incomplete vector.
    logits = normal(rows, vocab + 16 - vocab % 8, dtype=dtype)[:, :vocab].requires_grad_()
    judge("cross_entropy", {"logits": logits, "target": random_targets(rows, vocab), "reduction": "sum"})


@dtypes
@pytest.mark.parametrize("rows, vocab", [(1, 1), (3, 33), (200, 1025), (3, 40_000)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_fused_loss(rows, vocab, reduction, dtype):
    fused_loss(rows, vocab, dtype, reduction=reduction)


@dtypes
def test_fused_loss_in_vocabulary_chunks(dtype):
    """Rows that are one vector longer than a block processes."""
    fused_loss(3, 8200, dtype, bias=normal(8200, dtype=dtype, seed=5))
    fused_loss(3, 1025, dtype, memory=SMALLEST)


def least_overlaid(rows, vocab, hidden):
    """Returns the plan that stores as many classes' gradients as fit into dweight."""
    return Plan(int(_C.Gradients.overlaid), rows, _C.overlaid_classes(rows, hidden, vocab))


@dtypes
def test_fused_loss_of_overlaid_rows(dtype):
    """A part of each row's gradient is stored in several matrices; the other classes are recomputed."""
    fused_loss(16, 12_032, dtype, memory=least_overlaid(16, 12_032, 8))


@dtypes
@pytest.mark.parametrize("rows, vocab", [(3, 33), (3, 1048), (3, 2051), (3, 8200), (16, 12_032)])
def test_log_probs(rows, vocab, dtype):
    """Whole rows, vocabulary chunks, and overlaid gradients; with and without a softcap."""
    plans = ["auto", SMALLEST] + [least_overlaid(rows, vocab, 8)] * (vocab > 10_000)
    for memory, softcap in itertools.product(plans, (None, 3.0)):
        log_probs.judge(log_probs.arguments(rows, 8, vocab, dtype), dtype, memory=memory, softcap=softcap)


@dtypes
def test_fused_loss_unaligned(dtype):
    bias = laid_out(normal(35, dtype=dtype, seed=5), "offset")
    class_weight = laid_out(normal(35, seed=6).abs() + 0.1, "offset")
    fused_loss(9, 35, dtype, hidden=7, bias=bias, ce_weight=class_weight, reduction="none")
    # Saved tensors may come back at another address.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: laid_out(t.detach(), "offset")):
        fused_loss(9, 35, dtype, bias=bias)


@pytest.mark.skipif(os.environ.get("LIGER_EXT_HOST_SHARED") != "160", reason="64 KiB of shared memory are the default")
@dtypes
@pytest.mark.parametrize("vocab", [40_001, 84_001])
def test_logits_in_more_than_64_kib(vocab, dtype):
    """As on MI355X. The kernel reads the part of a longer row that does not fit into shared memory twice."""
    launched_since()
    fused_loss(3, vocab, dtype, softcap=10.0)
    (shared_bytes,) = (smem for name, smem in launched_since() if "::InPlace<" in name)
    assert shared_bytes > 64 << 10


@pytest.mark.skipif(not ahead_target(), reason="no clusters, and no copies that fetch rows ahead")
@dtypes
def test_rows_of_clusters(dtype):
    """Rows that do not fit into the registers of a cluster; for the fused loss also rows that do not fit into its
    shared memory."""
    wide = 16 // dtype.itemsize
    for op in ("rms_norm", "add_rms_norm", "layer_norm"):
        run(op, 2, 33_000 * wide, dtype)
        run(op, 2, 33_000 * wide, dtype, other_dtype=RECORDS[op].parameters)
    run("group_norm", 1, 150_016 * wide, dtype)
    run("softmax", 40, 16 * wide, dtype)
    fused_loss(1, 130_000 * wide, dtype, hidden=2)
    for vectors in (18_000, 22_000):
        fused_loss(2, vectors * wide, dtype, hidden=2)
        for memory in ("auto", least_overlaid(2, vectors * wide, 2)):
            log_probs.judge(log_probs.arguments(2, 2, vectors * wide, dtype), dtype, memory=memory, temperature=0.7)
        fused_loss(9, vectors * wide, dtype, hidden=9, memory=least_overlaid(9, vectors * wide, 9))


@pytest.mark.parametrize("per_thread", [1, 2, 4, 8])
def test_stream_copy(per_thread):
    x = normal(3, 1012)
    assert torch.equal(torch.ops.liger_ext.stream_copy(x, per_thread), x)


def test_dequantize_4bit():
    for name, found, expected in four_bit.cases():
        assert torch.equal(found, expected), name


def test_seeded_dropout():
    for name, found, expected in dropout_mask.cases():
        assert torch.equal(found, expected), name


def test_a_bad_target_is_reported():
    with pytest.raises(IndexError, match=r"target\[2\] is 33, expected a class in \[0, 33\)"):
        BY_NAME["cross_entropy"]({"logits": normal(4, 33), "target": torch.tensor([0, -100, 33, 1])})


def test_every_kernel_has_run():
    """Checks that the tests of this process, of which this is the last, launched every kernel."""
    found = launches()
    idle = [name for name, count in found.items() if count == 0]
    if ahead_target():  # two instances of the norms' backward run only on devices without clusters: with four vectors
        # per thread, and with a residual, whose rows overlap on the others
        idle = [name for name in idle if instances.instance_key(name)[1][1:] != (4, 512)]
        idle = [name for name in idle if not name.endswith("2, 512, false, true>")]
    assert found and not idle, "\n".join(idle)
    assert {instances.instance_key(name) for name in found} == instances.table(ahead=ahead_target()).keys()
    instances_of = defaultdict(list)
    for name in found:
        instances_of[re.sub(r"<.*", "", name.removesuffix("]")).rpartition("::")[2]].append(kernel_case_counts[name])
    print(f"| {'kernel':26}{'instances':>10}{'cases':>8}{'fewest of an instance':>24}")
    for kernel, cases in sorted(instances_of.items()):
        print(f"| {kernel:26}{len(cases):10}{sum(cases):8}{min(cases):24}")
