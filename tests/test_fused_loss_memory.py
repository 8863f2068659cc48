"""Tests of the fused loss where the memory of dweight also holds other values first: the gradient of all or some logits
(overlaid plans), or a sum of dweight that is converted in place. The results keep liger_ext.rule under all uses of the
autograd graph."""

import functools
import itertools

import pytest
import torch
from cases import RecordCalls, normal
from hypothesis import assume, given
from hypothesis import strategies as st
from test_cross_entropy import draw_weight, loss_options
from test_fused_linear_cross_entropy import head

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops._checks import REDUCTIONS
from liger_ext.ops._loss_arguments import LossArguments
from liger_ext.ops._loss_plan import SMALLEST, Plan
from liger_ext.testing import judge

OVERLAID = int(_C.Gradients.overlaid)
SIZES = [
    (64, 64, 700),
    (130, 64, 1100),
    (150, 60, 513),
    (97, 97, 64),
    (5, 3, 50),
    (300, 128, 4099),
    (120, 128, 4000),
    (500, 64, 2100),
    (480, 32, 1999),
]
plans = pytest.mark.parametrize("share", [1, 0.5, 0], ids=["all", "half", "least"])
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))


def overlaid(size, share, weight=torch.float32, compute=torch.float32):
    """Returns the plan that stores this share of the gradients that do not fit into dweight's memory; None if dweight
    has no room for 64 classes."""
    rows, hidden, vocab = size
    room = _C.overlaid_room(hidden, weight, compute)
    if vocab * room < 64 * rows:
        return None
    inside = _C.overlaid_classes(rows, room, vocab)
    stored = vocab if share == 1 or inside == 0 else inside + int((vocab - inside) * share) // 64 * 64
    return Plan(OVERLAID, rows, stored)


def memories(size, weight=torch.float32, compute=torch.float32):
    """Returns every kind of plan: overlaid ones, and chunks."""
    made = {"all": overlaid(size, 1, weight, compute), "least": overlaid(size, 0, weight, compute)}
    return [*filter(None, made.values()), "fast", SMALLEST]


def fused_loss(inputs, memory="auto", **options):
    return F.fused_linear_cross_entropy(**inputs, memory=memory, **options)


def leaves(inputs):
    return [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]


def calls(run):
    with RecordCalls() as record:
        run()
    return {op._schema.name.removeprefix("liger_ext::"): arguments for op, arguments in record.calls}


# Chunks of the vocabulary ---------------------------------------------------------------------------------------------


@given(
    hidden=st.integers(1, 5000),
    wide=st.booleans(),
    more=st.floats(0.01, 20) | st.sampled_from([0.97, 0.99, 1, 1.01, 1.9, 1.97, 2]),
    vocab=st.integers(64, 300_000),
    share=st.floats(0, 1),
)
def test_what_a_chunk_makes_lies_where_others_were(hidden, wide, more, vocab, share):
    """Simulates dweight's memory: the gradient of each class exists until its matmul reads it, and dweight of each
    class is written once, to memory without unread gradients. wide: dweight's elements have twice the size."""
    rows, room = max(1, int(hidden * more)), hidden * (1 + wide)
    assume(vocab * room >= 64 * rows)
    inside = _C.overlaid_classes(rows, room, vocab)
    stored = vocab if share == 1 else min(inside + int((vocab - inside) * share) // 64 * 64, vocab)
    chunks, spare = _C.overlaid_layout(rows, room, hidden, vocab, stored)
    classes = sorted((p.first, p.first + p.classes) for p in chunks)
    assert classes[0][0] == 0 and classes[-1][1] == vocab
    assert all(a[1] == b[0] for a, b in itertools.pairwise(classes))
    size = {"dweight": vocab * room, "rest": _C.overlaid_rest(rows, room, vocab, stored), "spare": spare}
    waiting = [p for p in chunks if not p.again]
    assert sum(p.classes for p in waiting) == stored and chunks[: len(waiting)] == waiting
    assert inside == vocab or rows >= room or (rows * _C.padded_vocab(vocab) > vocab * room and inside == 0)

    def ends(p):
        return p.offset + rows * _C.padded_vocab(p.classes)

    for place in size:  # unread gradients do not overlap
        there = sorted((p.offset, ends(p)) for p in waiting if p.place == place)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(there))
    aside = None
    for nth, p in enumerate(chunks):
        assert p.offset % 64 == 0 and p.first % 64 == 0 and ends(p) <= size[p.place]
        made = p.first * room, (p.first + p.classes) * room
        if nth == 0 and p.place == "dweight" and not p.again:
            aside = made
            assert made[1] - made[0] <= spare
            continue
        # Neither the chunk's own gradient nor another unread one lies where the chunk's dweight is written.
        there = [p] if p.again else [q for q in waiting if chunks.index(q) >= nth]
        for q in there:
            if q.place == "dweight":
                assert q.offset >= made[1] or ends(q) <= made[0]
        if p.again and p.place == "dweight":
            assert p.offset >= made[1]  # not in finished parts of dweight
    assert aside is None or aside[1] - aside[0] <= max(vocab * 23 // 200 + 64, 192) * room


def test_chunks_of_a_llama():
    """With 8,192 tokens the additional buffer is at most 0.116 of dweight, and there are few matmuls of each kind."""
    chunks, spare = _C.overlaid_layout(8192, 4096, 4096, 128_256, 128_256)
    assert len(chunks) <= 6 and spare <= 128_256 * 4096 * 0.116
    least, _ = _C.overlaid_layout(8192, 4096, 4096, 128_256, 64_128)
    assert sum(p.classes for p in least if not p.again) == 64_128


# Results --------------------------------------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@plans
def test_overlaid_gradients(device, size, dtype, reduction, share):
    if plan := overlaid(size, share):
        made = head(*size, dtype=dtype, device=device, bias=True)
        judge("fused_linear_cross_entropy", {**made, "reduction": reduction, "memory": plan})


@pytest.mark.parametrize(
    "size", [*SIZES, (256, 128, 4099), (250, 128, 1003)], ids=lambda size: "x".join(map(str, size))
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@plans
def test_overlaid_gradients_under_autocast(device, size, reduction, share):
    """dweight in float32 has room for bfloat16 gradients of twice as many classes."""
    plan = overlaid(size, share, compute=torch.bfloat16)
    made = head(*size, device=device, bias=True)

    def run(**arguments):
        with torch.autocast(device.type, torch.bfloat16):
            return F.fused_linear_cross_entropy(**arguments)

    if plan:
        inputs = {**made, "reduction": reduction, "memory": plan}
        judge("fused_linear_cross_entropy", inputs, run=run, compute_dtype=torch.bfloat16, base_autocast=True)


@pytest.mark.parametrize("size", [(300, 128, 4099), (512, 256, 4096)], ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("memory", ["fast", "auto", SMALLEST])
def test_a_bias_is_added_before_logits_are_rounded(device, size, dtype, memory):
    """With products near 512 and a bias of -512, rounding the product before the addition would be an error of the size
    of a logit."""
    made = head(*size, dtype=dtype, device=device, bias=True)
    with torch.no_grad():
        made["x"][:, 0] = 1
        made["x"][:, 1:] *= 0.1
        made["weight"][:, 0] = 512
        made["bias"].fill_(-512)
    judge("fused_linear_cross_entropy", {**made, "memory": memory})


@given(data=st.data(), options=loss_options)
def test_options_of_overlaid_gradients(device, data, options):
    rows, hidden, vocab = data.draw(st.sampled_from(SIZES))
    made = head(rows, hidden, vocab, device=device, bias=data.draw(st.booleans()))
    options |= {
        "memory": overlaid((rows, hidden, vocab), data.draw(st.sampled_from([1, 0.5, 0]))) or "auto",
        "ce_weight": draw_weight(data, vocab, device, torch.float32),
        "use_token_scaling": data.draw(st.booleans()),
    }
    judge("fused_linear_cross_entropy", made | options)


@sizes
@plans
@pytest.mark.parametrize("needs", [("weight",), ("weight", "bias"), ("x", "weight"), ("x",), ("bias",)])
def test_frozen_inputs(device, size, needs, share):
    made = head(*size, device=device, bias=True)
    for name, t in made.items():
        if name != "target":
            t.requires_grad_(name in needs)
    memory = overlaid(size, share) if "weight" in needs else None
    judge("fused_linear_cross_entropy", {**made, "memory": memory or ("auto" if share else "min")})


@sizes
@pytest.mark.parametrize("kind", ["all", "least", "fast", SMALLEST])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "bf16 x", "bf16 weight"])
def test_the_same_bits_again(device, size, kind, dtypes):
    """Gradients have the same bits in every run, with retain_graph, with hooks on saved tensors, and for a call of the
    op itself."""
    x, w = (torch.bfloat16 if dtypes in ("bf16", f"bf16 {name}") else torch.float32 for name in ("x", "weight"))
    memory = {"all": overlaid(size, 1), "least": overlaid(size, 0)}.get(kind, kind)
    if memory is None or (dtypes == "bf16 weight" and isinstance(memory, Plan)):  # that plan does not apply
        memory = "auto"
    made = head(*size, dtype=x, weight_dtype=w, device=device, bias=True)
    gradients = functools.partial(torch.autograd.grad, inputs=leaves(made))

    def same(found):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    expected = gradients(fused_loss(made, memory))
    same(gradients(fused_loss(made, memory)))
    loss = fused_loss(made, memory)
    same(gradients(loss, retain_graph=True))
    same(gradients(loss, retain_graph=True))
    same(gradients(loss))
    with torch.autograd.graph.save_on_cpu():
        same(gradients(fused_loss(made, memory)))
    op, arguments = torch.ops.liger_ext.fused_linear_cross_entropy, calls(lambda: fused_loss(made, memory))
    output = op(*arguments["fused_linear_cross_entropy"])
    before = [t.clone() for t in output]
    same(gradients(output[0]))
    bits = [t.detach().reshape(-1).view(torch.uint8) for t in (*output, *before)]  # some outputs are uninitialised
    assert all(torch.equal(a, b) for a, b in zip(bits[: len(output)], bits[len(output) :], strict=True))


@pytest.mark.parametrize("memory", [*(overlaid((300, 128, 4098), share) for share in (1, 0.5, 0)), SMALLEST])
def test_a_gradient_has_memory_of_its_own(device, memory):
    """A gradient whose memory held gradients of logits owns exactly its own bytes, and no other tensor refers to
    them."""
    made = head(300, 128, 4098, dtype=torch.bfloat16, device=device)
    ran = calls(fused_loss(made, memory).backward)
    assert "fused_linear_cross_entropy_backward_" in ran and "fused_linear_cross_entropy_backward" not in ran
    gradient = made["weight"].grad
    assert gradient.untyped_storage().nbytes() == made["weight"].nbytes and gradient.is_contiguous()
    first = gradient.clone()
    fused_loss(made, memory).backward()
    torch.testing.assert_close(gradient, 2 * first)


def test_many_rows_of_sums_are_narrowed(device):
    """The conversion of sums runs in several parts, for an even and an odd vocabulary."""
    for vocab in (1024, 1025):
        judge(
            "fused_linear_cross_entropy",
            {**head(300, 16, vocab, dtype=torch.bfloat16, device=device), "memory": SMALLEST},
        )


@pytest.mark.parametrize("memory", [*memories((150, 64, 700)), "auto", 1 << 30])
def test_a_checkpoint_around_it(device, memory):
    made = head(150, 64, 700, device=device)
    expected = torch.autograd.grad(fused_loss(made, memory), leaves(made))
    for use_reentrant in (False, True):
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: fused_loss({**made, "x": x}, memory), made["x"], use_reentrant=use_reentrant
        )
        loss.backward()
        for leaf, gradient in zip(leaves(made), expected, strict=True):
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None


@pytest.mark.parametrize("memory", memories((300, 128, 515)))
def test_many_gradients_at_once(device, memory):
    """torch.autograd.grad(is_grads_batched=True) runs the backward under vmap, where in-place writes are impossible."""
    made = head(300, 128, 515, device=device)
    loss = fused_loss(made, memory)
    (found,) = torch.autograd.grad(loss, made["weight"], torch.tensor([1.0, 3.0], device=device), is_grads_batched=True)
    (expected,) = torch.autograd.grad(fused_loss(made, memory), made["weight"])
    torch.testing.assert_close(found, torch.stack([expected, 3 * expected]))


def test_a_narrower_compute_dtype_than_float64(device):
    """The op rejects compute_dtype=float32 with float64 inputs: sums in float32 would not fill the memory of a float64
    gradient."""
    if device.type == "cuda":
        pytest.skip("float64 works on the CPU only")
    x, weight = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    of = LossArguments(x, weight, torch.arange(4), compute_dtype=torch.float32, chunk_rows=8, chunk_classes=8)
    for gradients, need in ((0, False), (1, True), (2, True)):
        with pytest.raises(ValueError, match=r"compute_dtype is .*float32, expected float64"):
            torch.ops.liger_ext.fused_linear_cross_entropy(
                *of._replace(gradients=gradients, need_dx=need, need_dweight=need)
            )


def test_unknown_levels(device):
    for memory in ("fastest", 0, -1, True, None, 2.5, 1e300):
        with pytest.raises(
            ValueError, match=r"memory is .*, expected 'fast', 'auto', 'low', 'min' or a number of bytes"
        ):
            fused_loss(head(4, device=device), memory)


def test_what_cannot_be_overlaid(device):
    """The op rejects an overlaid plan with a frozen weight, a weight of another dtype, no rows, or too few stored
    classes."""
    op = torch.ops.liger_ext.fused_linear_cross_entropy

    def call(rows, hidden, dtype=torch.float32, need_dweight=True, stored=150):
        x, weight = normal(rows, hidden, device=device), normal(150, hidden, device=device, dtype=dtype)
        target = torch.zeros(rows, dtype=torch.long, device=device)
        of = LossArguments(
            x, weight, target, reduction=REDUCTIONS["mean"], gradients=OVERLAID, chunk_rows=max(rows, 1),
            chunk_classes=stored, need_dx=True, need_dweight=need_dweight,
        )  # fmt: skip
        return op(*of)

    call(8, 8)
    call(7, 8)
    call(9, 8, stored=128)
    few = [(9, 8, torch.float32, True, stored) for stored in (64, 127, 129)]
    for bad in ((0, 8), (8, 8, torch.bfloat16), (8, 8, torch.float32, False), (19, 8, torch.float32, True, 64), *few):
        with pytest.raises(ValueError, match=r"gradients is 4 \(overlaid\)"):
            call(*bad)


def test_token_scaling_of_partly_stored_float32_logits(device):
    """The op rejects token scaling with float32 logits of 16-bit operands if only some classes' gradient is stored."""
    x, weight = (normal(rows, 8, device=device, dtype=torch.bfloat16) for rows in (9, 150))
    of = LossArguments(
        x, weight, torch.zeros(9, dtype=torch.long, device=device), reduction=REDUCTIONS["mean"], gradients=OVERLAID,
        logits_dtype=torch.float32, chunk_rows=9, chunk_classes=128, need_dx=True, need_dweight=True,
    )  # fmt: skip
    op = torch.ops.liger_ext.fused_linear_cross_entropy
    op(*of)
    op(*of._replace(use_token_scaling=True, chunk_classes=150))
    with pytest.raises(ValueError, match=r"overlaid.* for 128 of 150 classes, for which use_token_scaling needs"):
        op(*of._replace(use_token_scaling=True))
