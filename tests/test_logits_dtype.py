"""Log-probabilities with logits in float32 and matmuls of 16-bit operands: values and gradients compared with float64
over exact products, for every plan, and the memory that the plans take."""

import functools
import itertools
import unittest.mock

import pytest
import torch
from cases import host_target, most_bytes, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_loss_bytes import CPU, GPUS, recorded_plans
from test_fused_loss_memory import SIZES, overlaid
from test_linear_log_probs import BOUNDS, EVERYTHING, arguments, doubles, judge, leaves, reference

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops import _fused_linear_op, _loss_devices, _loss_plan
from liger_ext.ops._loss_arguments import FusedLossCall, LossArguments
from liger_ext.ops._loss_plan import LEVELS, SMALLEST, Plan

DEFERRED, RECOMPUTED, OVERLAID = map(int, (_C.Gradients.deferred, _C.Gradients.recomputed, _C.Gradients.overlaid))
LOW = [torch.bfloat16, torch.float16]
VALUES = 1e-5  # error of float32 sums, relative to 1 + the largest value
dtypes = pytest.mark.parametrize("dtype", LOW, ids=str)
run = functools.partial(F.linear_log_probs, logits_dtype=torch.float32)


def plans(rows, vocab, hidden=None):
    """Every method to compute the gradients, with all rows at once and with some, and with chunks of classes. With
    `hidden`, also plans that store only some classes in the memory of a 16-bit weight's gradient."""
    some = max(1, -(-rows // 3))
    stored = [Plan(way, chunk, vocab) for way in (DEFERRED, OVERLAID) for chunk in (rows, some)]
    if hidden is not None and (least := overlaid((rows, hidden, vocab), 0, torch.bfloat16, torch.bfloat16)):
        stored += [least, least._replace(rows=some)]
    return [*stored, Plan(RECOMPUTED, some, vocab), Plan(RECOMPUTED, some, 64), SMALLEST]


def large(rows, hidden, vocab, dtype, device):
    """Arguments whose logits have size 20, where neighbours in bfloat16 are 1/8 apart."""
    tensors = arguments(rows, hidden, vocab, dtype, device)
    with torch.no_grad():
        tensors["weight"].mul_(10)
    return tensors


@settings(max_examples=40)
@given(data=st.data())
def test_values_and_gradients(device, data):
    rows, hidden = data.draw(st.sampled_from([0, 1, 3, 129, 300])), data.draw(st.sampled_from([1, 8, 33, 64]))
    vocab, dtype = data.draw(st.sampled_from([1, 2, 50, 257, 1100])), data.draw(st.sampled_from(LOW))
    tensors = arguments(rows, hidden, vocab, dtype, device, bias=data.draw(st.booleans()))
    temperature = data.draw(st.sampled_from([1.0, 0.6, 1.7, "tokens"]))
    if temperature == "tokens":
        temperature = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(device)
    for name in data.draw(st.sampled_from([(), ("x",), ("weight",), ("bias",), ("weight", "bias")])):
        if name in tensors:
            tensors[name].requires_grad_(False)
    options = {
        "temperature": temperature,
        "softcap": data.draw(st.sampled_from([None, 3.0, 30.0])),
        "logit_scale": data.draw(st.sampled_from([1.0, 0.25])),
        "memory": data.draw(st.sampled_from([*LEVELS, *plans(max(rows, 1), vocab, hidden)])),
    }
    use_log_probs, use_entropy = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    bounds = VALUES, BOUNDS[dtype][1]
    judge(tensors, dtype, use_log_probs=use_log_probs, use_entropy=use_entropy, run=run, bounds=bounds, **options)


@dtypes
def test_without_gradients(device, dtype):
    tensors = {name: t.detach() for name, t in large(300, 64, 1100, dtype, device).items()}
    right = reference(**doubles(tensors))
    for memory in (*LEVELS, SMALLEST, Plan(0, 100, 1100)):
        for value, expected in zip(run(**tensors, **EVERYTHING, memory=memory), right, strict=True):
            bound = VALUES * (1 + float(right[0].abs().max()))
            torch.testing.assert_close(value.double(), expected.double(), rtol=0, atol=bound)


@dtypes
@pytest.mark.parametrize("size", [(300, 64, 1100), (150, 60, 513)], ids=str)
def test_logits_of_16_bits_are_far_worse(device, dtype, size):
    """Compared with float32 logits, logits of 16 bits with values near 20 have at least 50 times the error in the
    log-probabilities and, in bf16, at least 3 times the error in the gradients."""
    tensors = large(*size, dtype, device)
    exact = doubles(tensors)
    right = reference(**exact)[0]
    up = normal(size[0], device=device, seed=5)
    expected = torch.autograd.grad(right, leaves(exact), up.double())
    for memory in plans(size[0], size[2], size[1]):
        errors = []
        for logits_dtype in (None, dtype, torch.float32):
            plan = memory if logits_dtype == torch.float32 else "auto"
            found = F.linear_log_probs(**tensors, memory=plan, logits_dtype=logits_dtype)
            gradients = torch.autograd.grad(found, leaves(tensors), up)
            apart = [(a.double() - b).norm() / b.norm() for a, b in zip(gradients, expected, strict=True)]
            errors.append([(found.double() - right).abs().max(), *apart])
        assert errors[0] == errors[1]
        assert errors[0][0] > 50 * errors[2][0]
        assert dtype != torch.bfloat16 or all(a > 3 * b for a, b in zip(errors[0][1:], errors[2][1:], strict=True))


@dtypes
@pytest.mark.parametrize("chunk", [64, 20])
def test_the_gradient_that_is_saved(device, dtype, chunk):
    """The gradient of float32 logits, rounded once: half a unit in the last place, plus the error of float32."""
    tensors = {name: t.detach() for name, t in large(64, 32, 300, dtype, device).items() if name != "bias"}
    of = LossArguments(
        **tensors,
        logits_dtype=torch.float32,
        gradients=DEFERRED,
        chunk_rows=chunk,
        chunk_classes=300,
        need_dweight=True,
    )
    saved = torch.ops.liger_ext.fused_linear_cross_entropy(*of)[-4]
    assert saved.dtype == dtype and saved.shape == (64, 320) and not saved[:, 300:].any()
    logits = doubles(tensors)["x"] @ doubles(tensors)["weight"].T
    right = torch.softmax(logits, 1)
    counts = tensors["target"] >= 0
    right[counts, tensors["target"][counts]] -= 1
    right = right * counts[:, None] * (64 if dtype == torch.float16 else 1)
    half = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(saved[:, :300].double(), right, rtol=1.01 * half + 1e-4, atol=1e-4 * half)


@dtypes
def test_a_bias_of_another_dtype_is_not_rounded(device, dtype):
    tensors = arguments(40, 16, 90, dtype, device)
    tensors["bias"] = (normal(90, device=device, seed=4) * 10).requires_grad_()
    judge(tensors, dtype, run=run, bounds=(VALUES, BOUNDS[dtype][1]))


def test_under_autocast(device):
    """Products of operands in bfloat16; the reference uses the rounded operands."""
    tensors = arguments(256, 64, 700, device=device)
    for memory in (*plans(256, 700), "auto"):
        with torch.autocast(device.type, torch.bfloat16):
            found = run(**tensors, **EVERYTHING, memory=memory)
        exact = doubles(tensors | {name: tensors[name].detach().bfloat16() for name in ("x", "weight")})
        expected = reference(**exact)
        for value, right in zip(found, expected, strict=True):
            right = right.double().detach()
            bound = VALUES * (1 + right.abs().max().item())
            torch.testing.assert_close(value.double(), right, rtol=0, atol=bound)
        gradients = torch.autograd.grad(found.log_probs.sum() + found.entropy.sum(), leaves(tensors))
        exact = doubles(tensors)
        total = sum(t.sum() for t in reference(**exact)[:2])
        for a, b in zip(gradients, torch.autograd.grad(total, leaves(exact)), strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=0, atol=0.05 * b.abs().max().item())


@pytest.mark.parametrize("memory", [*plans(120, 300, 16), "auto"], ids=str)
def test_again_in_a_checkpoint_and_in_other_chunks(device, memory):
    """A second backward, a recomputed forward, and an explicit row count: equal up to the effect of other chunk
    sizes."""
    tensors = arguments(120, 16, 300, torch.bfloat16, device)

    def step(**tensors):
        found = run(**tensors, entropy=True, memory=memory)
        return found.log_probs.sum() + found.entropy.square().sum()

    total = step(**tensors)
    first = torch.autograd.grad(total, leaves(tensors), retain_graph=True)
    again = torch.utils.checkpoint.checkpoint(step, **tensors, use_reentrant=False)
    rows = {"rows": F.count_rows(tensors["target"])}
    for other in (total, again, step(**tensors, **rows)):
        for a, b in zip(first, torch.autograd.grad(other, leaves(tensors)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(a.abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(run(**tensors), run(**tensors, memory=SMALLEST), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_graph(device, dynamic):
    def step(x, weight, target, bias):
        found = run(x, weight, target, bias, temperature=0.7, **EVERYTHING)
        return found.log_probs.sum() - found.entropy.mean(), found.log_probs

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (40, 56):
        tensors = arguments(rows, 16, 90, torch.bfloat16, device)
        expected, found = (f(**tensors) for f in (step, compiled))
        torch.testing.assert_close(found, expected)
        for a, b in zip(*(torch.autograd.grad(of[0], leaves(tensors)) for of in (found, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.parametrize("memory", [*plans(40, 300), "no gradients"], ids=str)
def test_opcheck(device, memory):
    tensors = arguments(40, 16, 300, torch.bfloat16, device)
    plan = memory if isinstance(memory, Plan) else Plan(RECOMPUTED, 128, 64)
    if memory == "no gradients":
        tensors, plan = {name: t.detach() for name, t in tensors.items()}, Plan(0, 13, 300)
    of = LossArguments(
        **tensors, logits_dtype=torch.float32, return_entropy=True, gradients=plan.gradients, chunk_rows=plan.rows,
        chunk_classes=plan.classes, **dict.fromkeys(("need_dx", "need_dweight", "need_dbias"), plan.gradients > 0),
    )  # fmt: skip
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if plan.gradients != OVERLAID:  # an overlaid plan leaves parts of its outputs unwritten
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.liger_ext.fused_linear_cross_entropy, tuple(of), test_utils=checks)


def test_it_changes_nothing_for_wider_operands(device):
    tensors = arguments(60, 16, 90, device=device)
    expected = F.linear_log_probs(**tensors)
    for logits_dtype in (None, torch.float32):
        assert torch.equal(F.linear_log_probs(**tensors, logits_dtype=logits_dtype), expected)
    if device.type == "cpu" and not host_target():
        tensors = doubles(tensors)
        assert torch.equal(*(F.linear_log_probs(**tensors, logits_dtype=d) for d in (None, torch.float64)))


@pytest.mark.parametrize(
    ("dtype", "logits_dtype", "error", "message"),
    [
        (torch.bfloat16, torch.float16, ValueError, "logits_dtype is torch.float16, expected torch.float32 or the dty"),
        (torch.bfloat16, torch.int32, ValueError, r"logits_dtype is torch.int32, expected float32"),
        (torch.float16, torch.float64, ValueError, r"logits_dtype is torch.float64, expected "),
        (torch.float32, torch.bfloat16, ValueError, r"logits_dtype is torch.bfloat16, expected torch.float32"),
        (torch.float64, torch.float32, ValueError, r"logits_dtype is torch.float32, expected torch.float64"),
        (torch.bfloat16, "float32", TypeError, r"logits_dtype is 'float32', expected a torch.dtype or None"),
        (torch.bfloat16, True, TypeError, r"logits_dtype is True"),
    ],
)
def test_other_dtypes(dtype, logits_dtype, error, message):
    tensors = arguments(8, 4, 9, dtype)
    with pytest.raises(error, match=f"linear_(log_probs|cross_entropy): {message}"):
        F.linear_log_probs(**tensors, logits_dtype=logits_dtype)


# Memory ---------------------------------------------------------------------------------------------------------------


def plan_and_bytes(device, step, memory):
    """The call, the plan that was used, and the most bytes that it allocated."""
    with recorded_plans() as found:
        taken = most_bytes(device, lambda: step(memory))
    return *found[-1], taken


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, False), (False,) * 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_memory_that_is_taken(device, needs, autocast):
    """The memory equals that of the plan's trace, and a number of bytes is not exceeded."""
    rows, vocab = 500, 3001
    tensors = arguments(rows, 64, vocab, torch.float32 if autocast else torch.bfloat16, device)
    for name, need in zip(("x", "weight", "bias"), needs, strict=True):
        tensors[name].requires_grad_(need)
    up = torch.ones(rows, device=device)

    def step(memory):
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            found = run(**tensors, memory=memory, entropy=autocast)
        log_probs = found[0] if autocast else found
        return found, torch.autograd.grad(log_probs, leaves(tensors), up) if any(needs) else None

    call, _, _ = plan_and_bytes(device, step, "fast")
    least = _loss_plan.front(call)[0].bytes
    beside = 24 * rows * 4 + (1 << 18) + _loss_plan._PER_ROW * rows
    for memory in (*LEVELS, *plans(rows, vocab, None if autocast else 64), least, 2 * least):
        call, plan, taken = plan_and_bytes(device, step, memory)
        traced = _loss_plan.costs(call, [plan])[0].bytes
        assert call.wide_logits
        matmuls, _ = _C.loss_trace(call.arguments, plan, *_loss_plan.device(call))
        # On a CPU, torch may copy the 16-bit operands of a matmul.
        copies = max(2 * (k + 64) * (m + n + 128) for m, n, k, *_ in matmuls) + (1 << 18)
        copies = 0 if device.type == "cuda" else copies
        assert traced - copies - beside - call.copies <= taken <= traced
        assert isinstance(memory, (str, Plan)) or taken <= memory


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_a_late_gradient_of_the_entropy_keeps_to_the_forwards_chunks(device, logits_dtype, frozen):
    """A backward that recomputes logits does so for at most as many rows and classes at a time as the forward."""
    tensors = arguments(300, 64, 3001, torch.bfloat16, device, bias=False)
    tensors["weight"].requires_grad_(not frozen)
    for memory in (SMALLEST, Plan(int(_C.Gradients.recomputed), 40, 3001)):
        found = F.linear_log_probs(**tensors, entropy=True, memory=memory, logits_dtype=logits_dtype)
        with unittest.mock.patch.object(_fused_linear_op, "_backward_op", wraps=_fused_linear_op._backward_op) as op:
            torch.autograd.grad(found.entropy.sum(), leaves(tensors))
        (called,) = op.call_args.args
        plan = _loss_plan.Plan(0, 128, 1024) if memory == SMALLEST else memory
        assert called["chunk_rows"] <= plan.rows and called["chunk_classes"] <= plan.classes


def test_the_levels_of_models():
    """On an H100 only a chunk of rows exists in float32 at a time."""
    bf16 = torch.bfloat16
    h100 = _loss_devices.profile_index(_C.profile("H100"))
    for rows, hidden, vocab in ((8192, 2304, 256_000), (8192, 1024, 151_936), (32_768, 2048, 128_256)):
        call = FusedLossCall.uniform(rows, hidden, vocab, bf16, h100, "none", logits_dtype=torch.float32)
        for level in LEVELS:
            chosen = _loss_plan.choose(call, level)
            assert chosen.plan.rows < rows
            assert level == "min" or chosen.plan.gradients in (DEFERRED, OVERLAID, RECOMPUTED)


@pytest.mark.parametrize("at", [CPU, *GPUS], ids=lambda at: f"device {at}")
def test_what_frozen_weights_and_no_gradients_take(at):
    """A chunk's logits in float32, and, with gradients, the chunk's gradients in 16 bits."""
    rows, hidden, vocab, chunk = 1024, 64, 12_800, 128
    bf16 = torch.bfloat16
    call = FusedLossCall.uniform(rows, hidden, vocab, bf16, at, "none", need_dweight=False)
    for dx, bytes_each in ((False, 4), (True, 6)):
        of = call.replaced(need_dx=dx)
        taken = [
            _loss_plan.costs(of.replaced(logits_dtype=dtype), [_loss_plan.in_chunks(of, chunk, vocab)])[0].bytes
            for dtype in (None, torch.float32)
        ]
        assert taken[1] - taken[0] == chunk * vocab * (bytes_each - 2)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("share", [1, 0.5, 0])
def test_every_size_that_is_overlaid(device, size, share):
    """Overlaid plans that store all classes, and some: the backward recomputes the logits of the others."""
    plan = overlaid(size, share, torch.bfloat16, torch.bfloat16)
    if plan is None:
        return
    for rows, use_entropy in itertools.product((size[0], max(1, size[0] // 3)), (True, False)):
        tensors = arguments(*size, torch.bfloat16, device)
        bounds, memory = (VALUES, 6e-2), plan._replace(rows=rows)
        judge(tensors, torch.bfloat16, use_entropy=use_entropy, run=run, bounds=bounds, memory=memory, temperature=0.8)
