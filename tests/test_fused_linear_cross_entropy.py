"""Tests that the fused loss equals cross_entropy(linear(x)) under liger_ext.rule, for every option and every strategy
to compute gradients."""

import functools
import itertools

import pytest
import torch
from cases import LOW, RecordCalls, draw_leaf, normal, random_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cross_entropy import draw_target, draw_weight, loss_options

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops._checks import REDUCTIONS
from liger_ext.ops._loss_arguments import FusedLossCall, LossArguments, without_data
from liger_ext.ops._loss_devices import device_index
from liger_ext.ops._loss_plan import SMALLEST, Plan, plan
from liger_ext.testing import judge

# values of `memory`: one chunk; chunks of 128 rows
ONE_CHUNK, CHUNKS = Plan(int(_C.Gradients.deferred), 1 << 40, 1 << 40), SMALLEST
ROWS = 300  # three chunks: 128, 128, 44
judge_fused = functools.partial(judge, "fused_linear_cross_entropy")


def head(
    rows=ROWS,
    hidden=24,
    vocab=50,
    *,
    dtype=torch.float32,
    weight_dtype=None,
    device="cpu",
    bias=False,
    seed=0,
    ignored=0.2,
):
    weight_dtype = weight_dtype or dtype
    made = {
        "x": normal(rows, hidden, dtype=dtype, device=device, seed=seed).requires_grad_(),
        "weight": normal(vocab, hidden, dtype=weight_dtype, device=device, seed=seed + 1, scale=0.5).requires_grad_(),
        "target": random_targets(rows, vocab, device=device, seed=seed + 2, ignored=ignored),
    }
    if bias:
        made["bias"] = normal(vocab, dtype=weight_dtype, device=device, seed=seed + 3).requires_grad_()
    return made


@settings(max_examples=60)
@given(data=st.data(), options=loss_options)
def test_fused_linear_cross_entropy(device, data, options):
    rows = data.draw(st.sampled_from([0, 1, 2, 3, 40, 129, ROWS]))
    hidden = data.draw(st.sampled_from([1, 2, 8, 33, 64]))
    vocab = data.draw(st.sampled_from([1, 2, 31, 50, 128, 257, 1100]))
    layouts = st.sampled_from(["contiguous", "padded", "transposed"])
    x = draw_leaf(data, device, rows, hidden, layouts=layouts)
    weight = draw_leaf(data, device, vocab, hidden, layouts=layouts, scale=2 * hidden**-0.5)
    inputs = {"x": x, "weight": weight, **draw_target(data, rows, vocab, device)}
    if data.draw(st.booleans()):
        inputs["bias"] = draw_leaf(data, device, vocab, layouts=st.just("contiguous"))
    wide = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    options = {
        **options,
        "ce_weight": draw_weight(data, vocab, device, wide),
        "use_token_scaling": data.draw(st.sampled_from([False, False, True])),
        "memory": data.draw(st.sampled_from([CHUNKS, ONE_CHUNK, "auto"])),
    }
    if options["reduction"] != "none" and data.draw(st.integers(0, 3)) == 0:
        options["normalizer"] = data.draw(st.sampled_from([1.0, 37.0]))
    judge_fused(inputs | options)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_way_to_the_gradients(device, dtype, memory, reduction):
    """Deferred, accumulated and recomputed gradients, with a bias and an upstream gradient other than 1."""
    judge_fused({**head(dtype=dtype, device=device, bias=True), "memory": memory, "reduction": reduction})


def test_the_chunks_of_these_tests_are_several():
    for dtype in LOW:
        call = FusedLossCall.uniform(ROWS, 24, 50, dtype, device_index(torch.device("cpu")))
        assert plan(call, CHUNKS).rows == 128 < ROWS <= plan(call, ONE_CHUNK).rows


@pytest.mark.parametrize(
    "needs",
    list(itertools.product([False, True], repeat=3)),
    ids=lambda n: "".join("xwb"[i] for i in range(3) if n[i]) or "none",
)
@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_inputs(device, needs, memory, reduction):
    """With frozen inputs the other gradients stay the same, and the op allocates no gradients for the frozen ones."""
    full = head(device=device, bias=True)
    names = ("x", "weight", "bias")
    inputs = {
        **full,
        **{name: full[name].detach().requires_grad_(need) for name, need in zip(names, needs, strict=True)},
    }
    judge_fused({**inputs, "memory": memory, "reduction": reduction})

    flat = {name: inputs[name].detach() for name in (*names, "target")}
    needed = {f"need_{name}": need for name, need in zip(("dx", "dweight", "dbias"), needs, strict=True)}
    of = LossArguments(**flat, reduction=REDUCTIONS[reduction], **needed)
    way = plan(FusedLossCall(without_data(of._asdict()), device_index(device)), memory)
    of = of._replace(gradients=way.gradients, chunk_rows=way.rows, chunk_classes=way.classes)
    saved, dx, dweight, dbias = torch.ops.liger_ext.fused_linear_cross_entropy(*of)[-4:]
    made = {"x": dx, "weight": dweight, "bias": dbias}
    for name, need in zip(names, needs, strict=True):
        assert need or made[name].numel() == 0
    if not any(needs):
        assert saved.numel() == 0


def test_no_grad_makes_nothing(device):
    inputs = head(device=device)
    with torch.no_grad():
        loss = F.fused_linear_cross_entropy(**inputs)
    assert not loss.requires_grad and loss.grad_fn is None
    torch.testing.assert_close(loss, F.fused_linear_cross_entropy(**inputs).detach())


def test_a_gradient_that_the_flags_left_out_is_an_error(device):
    made = head(rows=4, device=device)
    of = LossArguments(
        made["x"], made["weight"], made["target"], gradients=int(_C.Gradients.accumulated), chunk_rows=4,
        chunk_classes=50, need_dx=True, reduction=REDUCTIONS["mean"],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="need_dweight"):
        torch.ops.liger_ext.fused_linear_cross_entropy(*of)


@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
@pytest.mark.parametrize("normalizer", [250, 1000.0, "tensor", "integer tensor"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_normalizer_replaces_the_count(device, memory, normalizer, reduction):
    """The normalizer (num_items_in_batch) replaces the number of rows, as for one of several accumulated batches."""
    made = head(device=device)
    expected = torch.nn.functional.cross_entropy(made["x"] @ made["weight"].T, made["target"], reduction="sum") / 250
    value = {"tensor": torch.tensor(250.0, device=device), "integer tensor": torch.tensor(250, device=device)}.get(
        normalizer, normalizer
    )
    loss = F.fused_linear_cross_entropy(**made, memory=memory, normalizer=value, reduction=reduction) * (
        4 if normalizer == 1000.0 else 1
    )
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss, (made["x"], made["weight"]))
    for a, b in zip(found, torch.autograd.grad(expected, (made["x"], made["weight"])), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
@pytest.mark.parametrize("largest", [1.9, 1.0, 0.7])
def test_rows_of_their_own_gradient_at_the_end_of_fp16(device, memory, largest):
    """dweight sums x[i] * gradient[i] in fp16; the gradients are scaled to at most 1, so that the products do not
    overflow."""
    made = head(dtype=torch.float16, device=device)
    made["x"].data[:, 0], made["weight"].data[:, 0] = 6e4, 0
    loss = F.fused_linear_cross_entropy(**made, memory=memory, reduction="none")
    logits = made["x"].double() @ made["weight"].double().T
    exact = torch.nn.functional.cross_entropy(logits, made["target"], reduction="none")
    grad = normal(ROWS, device=device, seed=3)
    grad *= largest / 1024 / grad.abs().max()  # so that the sums fit into fp16
    (found,), (wanted,) = (torch.autograd.grad(of, made["weight"], grad.to(of)) for of in (loss, exact))
    torch.testing.assert_close(found.double(), wanted.double(), rtol=5e-3, atol=5e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
def test_dx_is_rounded_once_beside_a_wider_head(device, memory):
    """dx is multiplied by its row's upstream gradient before it is rounded to bf16."""
    made = head(dtype=torch.bfloat16, weight_dtype=torch.float32, device=device, ignored=0)
    grad, error = normal(ROWS, device=device, seed=3), []
    x = made["x"].detach().double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(x @ made["weight"].double().T, made["target"], reduction="none")
    theirs = torch.nn.functional.cross_entropy(made["x"].float() @ made["weight"].T, made["target"], reduction="none")
    ours = F.fused_linear_cross_entropy(**made, memory=memory, reduction="none")
    (right,) = torch.autograd.grad(exact, x, grad.double())
    for loss in (ours, theirs):
        (dx,) = torch.autograd.grad(loss, made["x"], grad)
        error.append((dx.double() - right).square().mean().sqrt())
    assert error[0] <= 1.1 * error[1]


@pytest.mark.parametrize("memory", [ONE_CHUNK, CHUNKS])
def test_fp16_gradients_survive_any_loss_scale(device, memory):
    """Gradients are stored in fp16 without the factors 1/N and loss scale, so they neither underflow in a long batch
    nor overflow under a GradScaler."""
    made = head(dtype=torch.float16, device=device, vocab=1000, hidden=64)
    judge_fused({**made, "memory": memory}, grad=1.0)
    judge_fused({**made, "memory": memory}, grad=1024.0)
    judge_fused({**made, "memory": memory, "normalizer": 2.0**16}, grad=2.0**16)
    loss = F.fused_linear_cross_entropy(**made, memory=memory, normalizer=2.0**16) * 2.0**16
    dx, dweight = torch.autograd.grad(loss, (made["x"], made["weight"]))
    assert dx.any(1)[made["target"] != -100].all() and dweight.any(1).float().mean() > 0.9


def test_dweight_is_summed_in_float32_by_default(device):
    """The sum of dweight over 16 chunks is fp32 by default; a requested bfloat16 sum has visibly more error."""
    made = {**head(rows=2000, dtype=torch.bfloat16, device=device, ignored=0), "memory": CHUNKS}
    exact = torch.nn.functional.cross_entropy(made["x"].double() @ made["weight"].double().T, made["target"])
    (exact,) = torch.autograd.grad(exact, made["weight"])
    error = []
    for accum_dtype in (None, torch.float32, torch.bfloat16):
        (dweight,) = torch.autograd.grad(F.fused_linear_cross_entropy(**made, accum_dtype=accum_dtype), made["weight"])
        error.append((dweight.double() - exact).norm() / exact.norm())
    assert error[0] == error[1] < 0.8 * error[2] < 0.02


@pytest.mark.parametrize("dtype", LOW)
def test_chunking_changes_rounding_only(device, dtype):
    """Chunks change the per-row results only by rounding."""
    made = head(dtype=dtype, device=device)
    options = {"reduction": "none", "return_predicted_tokens": True, "return_token_accuracy": True}
    a, b = (F.fused_linear_cross_entropy(**made, **options, memory=memory) for memory in (ONE_CHUNK, CHUNKS))
    torch.testing.assert_close(
        a.loss, b.loss, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-2 if dtype != torch.float32 else 1e-5
    )
    assert (a.predicted_tokens != b.predicted_tokens).float().mean() < 0.02


def test_the_predicted_token_may_be_any_that_roundings_make_the_largest(device):
    """The judge accepts any predicted token that rounding can make the largest: logits 1 and 1 + 2^-9 are equal in
    bf16, 1 and 1 + 2^-5 are not. Only ignored rows may have -1."""
    x = torch.eye(2, dtype=torch.bfloat16, device=device).repeat(2, 1).requires_grad_()
    weight = torch.tensor([[1, 1], [1, 1], [0.5, 0.5]], dtype=torch.bfloat16, device=device)
    inputs = {"x": x, "weight": weight, "target": torch.tensor([0, 1, 2, -100], device=device)}
    bias = torch.tensor([0, 2**-9, 0], device=device)

    def predicts(classes):
        def run(**arguments):
            output = F.fused_linear_cross_entropy(**arguments)
            return output._replace(predicted_tokens=torch.tensor(classes, device=device))

        return run

    options = {"return_predicted_tokens": True, "reduction": "sum"}
    judge_fused(inputs | options | {"bias": bias})
    for classes in ([0, 1, 1, -1], [1, 1, 0, -1]):
        judge_fused(inputs | options | {"bias": bias}, run=predicts(classes))
    for classes, scale in (
        ([0, 1, 2, -1], 1),
        ([0, 1, -1, -1], 1),
        ([0, 1, 3, -1], 1),
        ([0, 1, 1, 1], 1),
        ([0, 1, 1, -1], 16),
    ):
        with pytest.raises(AssertionError, match="predicted_tokens"):
            judge_fused(inputs | options | {"bias": bias * scale}, run=predicts(classes))


@pytest.mark.parametrize("ignored", ["alternate", "first half", "all but the last", "a few"])
def test_ignored_rows_between_others(device, ignored):
    """Ignored rows between others, which kernels do not prefetch unless there are few of them."""
    rows, vocab = (1200 if device.type == "cuda" else 60), 13_003
    made = head(rows, 8, vocab, dtype=torch.bfloat16, device=device, ignored=0)
    nth = torch.arange(rows, device=device)
    which = {
        "alternate": nth % 2 == 0,
        "first half": nth < rows // 2,
        "all but the last": nth < rows - 1,
        "a few": nth % 40 == 7,
    }[ignored]
    judge_fused({**made, "target": made["target"].masked_fill(which, -100)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1051, 20_011, 70_001, 100_003, 140_007, 200_003])
def test_vocabularies(device, dtype, vocab):
    """Vocabularies whose rows a block or a cluster of blocks holds in registers, with 8, 10 or 16 vectors per
    thread."""
    judge_fused(head(5, 8, vocab, dtype=dtype, device=device, ignored=0))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("memory", [ONE_CHUNK, "min"])
def test_gradients_that_label_smoothing_cancels(device, dtype, softcap, rows, memory):
    """The gradient is nearly p - p and the rounding of a logit changes p; with few rows no other row's error hides a
    mistake."""
    for seed in range(6):
        inputs = head(rows, 8, 300, dtype=dtype, device=device, seed=seed, ignored=0)
        judge_fused(inputs | {"label_smoothing": 0.1, "softcap": softcap, "memory": memory})


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("vocab", [1051, 35_003])
def test_factors_of_either_sign(device, dtype, vocab):
    """Upstream gradients of both signs for each row, with recomputed chunks."""
    made = head(150, 8, vocab, dtype=dtype, device=device)
    judge_fused({**made, "reduction": "none", "memory": CHUNKS, "lse_square_scale": 1e-4})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masked_classes(device, dtype):
    """Classes with a logit of -inf, which are no row's target, have no influence and no gradient."""
    made = head(5, 8, 1051, dtype=dtype, device=device, ignored=0, bias=True)
    masked = torch.arange(1051, device=device) % 3 == 1
    masked[made["target"]] = False
    bias = made["bias"].detach().masked_fill(masked, -torch.inf).requires_grad_()
    loss = F.fused_linear_cross_entropy(**{**made, "bias": bias})
    kept = F.fused_linear_cross_entropy(
        made["x"], made["weight"][~masked], (~masked).cumsum(0)[made["target"]] - 1, bias[~masked]
    )
    torch.testing.assert_close(loss, kept)
    assert torch.equal(torch.autograd.grad(loss, bias)[0] == 0, masked)


def test_all_targets_ignored(device):
    for memory, reduction in itertools.product((ONE_CHUNK, CHUNKS), ("mean", "sum", "none")):
        made = {**head(device=device, bias=True), "target": torch.full((ROWS,), -100, device=device)}
        loss = F.fused_linear_cross_entropy(**made, memory=memory, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), (made["x"], made["weight"], made["bias"]))
        assert not loss.any() and not any(g.any() for g in grads)


def test_leading_dimensions(device):
    made = head(rows=12, device=device)
    flat = F.fused_linear_cross_entropy(**made, reduction="none")
    made["x"], made["target"] = made["x"].view(3, 4, -1), made["target"].view(3, 4)
    assert torch.equal(F.fused_linear_cross_entropy(**made, reduction="none"), flat.view(3, 4))


@pytest.mark.parametrize("name", ["dx", "dweight", "dbias"])
def test_sums_of_another_shape_are_refused(device, name):
    """A sum of another shape would be written past the end of the gradient."""
    x, weight, bias = (normal(*shape, device=device).requires_grad_() for shape in ((300, 33), (7, 33), (7,)))
    with RecordCalls() as record:
        F.fused_linear_cross_entropy(x, weight, random_targets(300, 7, device=device), bias, memory=SMALLEST).backward()
    op, arguments = record.calls[-1]
    names = [argument.name for argument in op._schema.arguments]
    changed = [a.unsqueeze(-1) if n == name else a for n, a in zip(names, arguments, strict=False)]
    with pytest.raises(ValueError, match=f"{name} has shape"), torch.no_grad():
        op(*changed)
