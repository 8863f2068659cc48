"""Tensors that span more than 2^31 elements, so that their offsets need 64 bits. On a CPU, three rows lie far apart,
and the memory between them is never touched; on a GPU, most tensors have all these elements."""

import itertools

import pytest
import torch
from cases import normal, random_targets
from op_plans import plans
from ops import LARGE, OPS

from liger_ext import _devices
from liger_ext import functional as F
from liger_ext.records import RECORDS, InputFactory, Size

FAR = 2**30 + 8  # distance of two rows: the third row starts past 2^31 elements


def far_apart(*, seed, cols=64, dtype=torch.bfloat16):
    """Three rows in 4.3 GB of address space; only the pages of the rows are touched."""
    rows = torch.empty(2 * FAR + cols, dtype=dtype).as_strided((3, cols), (FAR, 1))
    return rows.copy_(normal(3, cols, dtype=dtype, seed=seed))


def call(op, a, b, weight=None):
    """Calls an op with the inputs of its record, where a replaces the first matrix, and b the others. Vectors other
    than ``weight`` have ones. A target is a function of its row of a. Returns the first result."""
    inputs = RECORDS[op].inputs(InputFactory(a.dtype, "meta"), LARGE.get(op, Size)(*a.shape))
    matrices = itertools.chain([a], itertools.repeat(b.to(a.dtype)))
    for name, t in inputs.items():
        if not isinstance(t, torch.Tensor):
            continue
        if t.dtype == torch.int64:
            inputs[name] = a.detach()[:, :3].argmin(-1)
        elif t.dim() == 1:
            is_weight = name == "weight" and weight is not None and weight.shape == t.shape
            inputs[name] = weight if is_weight else a.new_ones(t.shape)
        elif t.numel() == a.numel():
            inputs[name] = next(matrices).view(t.shape)
        else:
            inputs[name] = next(matrices)[: len(t)].contiguous()
    result = RECORDS[op].run(**inputs, **({"reduction": "none"} if op == "cross_entropy" else {}))
    return result[0] if isinstance(result, tuple) else result


def is_row_op(op):
    """Returns whether each row of the op's result depends only on the same row of its inputs."""
    x = normal(5, 64)
    return call(op, x, x).shape[:1] == x.shape[:1]


ROW_OPS = [op for op in OPS if is_row_op(op)]


@pytest.mark.parametrize("op", OPS)
def test_rows_far_apart(op):
    a, b = far_apart(seed=0).requires_grad_(), far_apart(seed=1)
    near = a.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    y, expected = call(op, a, b), call(op, near, b.contiguous())
    assert torch.equal(y, expected)
    dy = normal(*y.shape, dtype=y.dtype, seed=2)
    assert torch.equal(torch.autograd.grad(y, a, dy)[0], torch.autograd.grad(expected, near, dy)[0])


@pytest.mark.parametrize("op", ROW_OPS)
def test_outputs_that_the_system_maps_afresh(op):
    """Outputs of more than 32 MiB, whose pages are requested before the kernel: all is written, as in small outputs."""
    rows, cols = 1301, 8210  # 41 MiB; neither a multiple of the page size nor of the vector width
    a, b = normal(rows, cols, dtype=torch.float32, seed=0).requires_grad_(), normal(rows, cols, seed=1).float()
    y = call(op, a, b)
    dy = normal(*y.shape, dtype=y.dtype, seed=2)
    (dx,) = torch.autograd.grad(y, a, dy)
    for part in (slice(0, 3), slice(650, 653), slice(rows - 3, rows)):
        x = a[part].detach().requires_grad_()
        small = call(op, x, b[part])
        assert torch.equal(y[part], small)
        assert torch.equal(dx[part], torch.autograd.grad(small, x, dy[part])[0])


ROWS, COLS = 2**19 + 64, 4096  # 2^31 elements and a little more
LAST = 80


@pytest.fixture
def free_memory():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def large(rows=ROWS, cols=COLS):
    """Random bfloat16 values; the last rows differ from each other."""
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
    return x.normal_(generator=torch.Generator("cuda").manual_seed(0))


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("op", ROW_OPS)
def test_row_ops(op, free_memory):
    """The last rows equal the op's result for these rows alone; dweight includes every row."""
    x = large().requires_grad_()
    weight = torch.ones(COLS, device="cuda").requires_grad_()

    def result(t):
        return call(op, t, t.detach(), weight)

    y = result(x)
    dy = torch.ones_like(y)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy, allow_unused=True)
    tail = x.detach()[-LAST:].clone().requires_grad_()
    expected = result(tail)
    # Few rows have another plan: the results may differ by one rounding.
    torch.testing.assert_close(y[-LAST:], expected)
    torch.testing.assert_close(dx[-LAST:], torch.autograd.grad(expected, tail, dy[-LAST:])[0])
    if dweight is not None:
        total = sum(result(part).double().sum(0) for part in x.detach().split(2**16))
        assert ((dweight.double() - total).abs() / ROWS**0.5).max() < 0.02


@pytest.mark.cuda
@pytest.mark.large
def test_rope(free_memory):
    q = large(2**20 + 128, 2048).view(1, -1, 32, 64).transpose(1, 2).requires_grad_()
    k = normal(1, 1, q.shape[2], 64, dtype=torch.bfloat16, device="cuda")
    angle = torch.rand(1, q.shape[2], 64, device="cuda")
    out, _ = F.rope(q, k, angle.cos(), angle.sin())
    tail = slice(-LAST, None)
    expected, _ = F.rope(q[:, :, tail], k[:, :, tail], angle[:, tail].cos(), angle[:, tail].sin())
    assert torch.equal(out[:, :, tail], expected)
    dout = out.detach()
    (dq,) = torch.autograd.grad(out, q, dout)
    assert torch.equal(dq[:, :, tail], torch.autograd.grad(expected, q, dout[:, :, tail])[0][:, :, tail])


@pytest.mark.cuda
@pytest.mark.large
def test_rope_in_two_launches(free_memory):
    """A launch has fewer than 2^31 threads; here a position takes two threads, and there are more than 2^30
    positions."""
    batch, seq = 2**15 + 1, 2**15
    launches = plans("rope", _devices.running_profile(0), batch * seq, 2, q_heads=1, k_heads=1)
    assert [launch.rows for launch in launches] == [2**30 - 64, batch * seq - 2**30 + 64]
    one = [normal(1, 1, seq, 2, dtype=torch.bfloat16, device="cuda", seed=s) for s in (0, 1)]
    angle = torch.rand(1, seq, 2, device="cuda")
    tables = angle.cos(), angle.sin()
    for op in (torch.ops.liger_ext.rope, torch.ops.liger_ext.rope_backward):
        expected = op(*one, *tables, 0, False)
        found = op(*(t.expand(batch, -1, -1, -1) for t in one), *tables, 0, False)
        for all_of_them, first in zip(found, expected, strict=True):
            assert all(torch.equal(part, first.expand_as(part)) for part in all_of_them.split(2**12))


@pytest.mark.cuda
@pytest.mark.large
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_matrices_with_64_bit_strides(reduction, free_memory):
    """Rows more than 2^31 elements apart, which the 32-bit interface of cuBLAS does not take: x in the products that
    compute the logits and dweight, the head's weight in those that compute the logits and dx."""
    rows = vocab = 3
    far = 2**31 + 64

    def apart(seed):
        t = torch.empty(2 * far + 64, dtype=torch.bfloat16, device="cuda").as_strided((3, 64), (far, 1))
        return t.copy_(normal(3, 64, dtype=torch.bfloat16, seed=seed)).requires_grad_()

    x, weight, target = apart(0), apart(1), torch.arange(rows, device="cuda") % vocab
    results = []
    for inputs in (
        (x, weight),
        [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in (x, weight)],
    ):
        loss = F.fused_linear_cross_entropy(*inputs, target, reduction=reduction)
        results.append((loss, *torch.autograd.grad(loss.sum(), inputs)))
    for strided, contiguous in zip(*results, strict=True):  # cuBLAS may choose another algorithm
        torch.testing.assert_close(strided, contiguous, rtol=0.02, atol=1e-3)


@pytest.mark.cuda
@pytest.mark.large
def test_cross_entropy(free_memory):
    rows, vocab = 16_800, 128_256
    logits, target = large(rows, vocab).requires_grad_(), random_targets(rows, vocab, device="cuda")
    loss = F.cross_entropy(logits, target, reduction="none")
    (dlogits,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    tail = logits.detach()[-LAST:].clone().requires_grad_()
    expected = F.cross_entropy(tail, target[-LAST:], reduction="none")
    torch.testing.assert_close(loss[-LAST:], expected)
    torch.testing.assert_close(dlogits[-LAST:], torch.autograd.grad(expected, tail, torch.ones_like(expected))[0])


@pytest.mark.cuda
@pytest.mark.large
def test_fused_linear_cross_entropy(free_memory):
    """One chunk whose logits have more than 2^31 elements equals many chunks."""
    rows, vocab, hidden = 16_800, 128_256, 64
    x, weight = large(rows, hidden).requires_grad_(), (large(vocab, hidden) * 0.1).requires_grad_()
    target = random_targets(rows, vocab, device="cuda")
    results = []
    for memory in (1 << 40, 256 << 20):
        loss = F.fused_linear_cross_entropy(x, weight, target, reduction="sum", memory=memory)
        results.append((loss, *torch.autograd.grad(loss, (x, weight))))
    for one, many in zip(*results, strict=True):
        assert (one.double() - many.double()).norm() <= 0.01 * many.double().norm()
