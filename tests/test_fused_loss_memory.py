"""Levels of the fused loss's memory: the gradient of all logits overlaid with that of the weight, and sums that become
it where they are. The results are under the one rule, whatever else happens to the graph."""

import functools
import itertools
import sys

import pytest
import torch
from cases import RecordCalls, normal
from hypothesis import assume, given
from hypothesis import strategies as st
from test_cross_entropy import draw_weight, loss_options
from test_fused_linear_cross_entropy import head

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops import _chunks
from liger_ext.ops._chunks import SMALLEST
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
levels = pytest.mark.parametrize("memory", ["auto", "low", "min"])
sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small gradients are overlaid, too; on a CPU as on a GPU."""
    monkeypatch.setattr(_chunks, "WORTH_OVERLAYING", 0)
    monkeypatch.setattr(sys.modules[F.fused_linear_cross_entropy.__module__], "gpu_memory", lambda device: 140 << 30)
    _chunks._planned.cache_clear()
    yield
    _chunks._planned.cache_clear()


def loss_of(inputs, memory="auto", **options):
    return F.fused_linear_cross_entropy(**inputs, memory=memory, **options)


def overlays(size, memory):
    """Whether the gradient of logits is laid over that of the weight, whose memory holds those of 64 classes; or None,
    where "low" may do with all at once."""
    rows, hidden, vocab = size
    least, most = {"auto": (hidden, 2.5), "low": (hidden, 8), "min": (1, 16)}[memory]
    if memory == "low" and (vocab < 1000 or rows < hidden):
        return None
    return least <= rows <= most * hidden and vocab * hidden >= 64 * rows


def leaves(inputs):
    return [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]


def calls(run):
    with RecordCalls() as record:
        run()
    return {op._schema.name.removeprefix("liger_ext::"): arguments for op, arguments in record.calls}


def ways(run):
    """The `gradients` of the forwards."""
    names = [a.name for a in torch.ops.liger_ext.fused_linear_cross_entropy.default._schema.arguments]
    return [a[names.index("gradients")] for op, a in calls(run).items() if op == "fused_linear_cross_entropy"]


# Chunks of the vocabulary ---------------------------------------------------------------------------------------------


@given(hidden=st.integers(1, 5000), more=st.floats(0.01, 20), vocab=st.integers(64, 300_000), share=st.floats(0, 1))
def test_what_a_chunk_makes_lies_where_others_were(hidden, more, vocab, share):
    """A history of dweight's memory: each class's gradient is there when its matmul reads it, and each class's dweight
    is written once, where nothing waits."""
    rows = max(1, int(hidden * more))
    assume(vocab * hidden >= 64 * rows)
    inside = _C.overlaid_classes(rows, hidden, vocab)
    stored = vocab if share == 1 else min(inside + int((vocab - inside) * share) // 64 * 64, vocab)
    sizes = rows, hidden, vocab, stored
    chunks = _C.overlaid_chunks(*sizes)
    classes = sorted((p.first, p.first + p.classes) for p in chunks)
    assert classes[0][0] == 0 and classes[-1][1] == vocab
    assert all(a[1] == b[0] for a, b in itertools.pairwise(classes))
    room = {"dweight": vocab * hidden, "rest": _C.overlaid_rest(*sizes), "spare": _C.overlaid_spare(*sizes)}
    waiting = [p for p in chunks if not p.again]
    assert sum(p.classes for p in waiting) == stored and chunks[: len(waiting)] == waiting
    aside = None
    for nth, p in enumerate(chunks):
        end = p.offset + rows * _C.padded_vocab(p.classes)
        assert p.offset % 64 == 0 and p.first % 64 == 0 and end <= room[p.place]
        made = p.first * hidden, (p.first + p.classes) * hidden
        if nth == 0 and p.place == "dweight" and not p.again:
            aside = made
            assert made[1] - made[0] <= room["spare"]
            continue
        # Neither its own gradient nor one that still waits lies where its dweight is written.
        there = [p] if p.again else [q for q in waiting if chunks.index(q) >= nth]
        for q in there:
            if q.place == "dweight":
                assert q.offset >= made[1] or q.offset + rows * _C.padded_vocab(q.classes) <= made[0]
        if p.again and p.place == "dweight":
            assert p.offset >= made[1]  # and not where dweight is done
    assert aside is None or aside[1] - aside[0] <= max(vocab * 23 // 200, 64) * hidden


def test_chunks_of_a_llama():
    """8,192 tokens: a fourteenth of dweight is set aside, and there are four matmuls of each kind."""
    chunks = _C.overlaid_chunks(8192, 4096, 128_256, 128_256)
    assert [p.classes for p in chunks] == [9472, 18_944, 35_712, 64_128]
    least = _C.overlaid_chunks(8192, 4096, 128_256, 64_128)
    assert [p.classes for p in least if not p.again] == [4160, 8320, 16_640, 33_280, 1728]


# Results --------------------------------------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@levels
def test_overlaid_gradients(device, size, dtype, reduction, memory):
    made = head(*size, dtype=dtype, device=device, bias=True)
    overlaid = ways(functools.partial(loss_of, made, memory, reduction=reduction)) == [OVERLAID]
    assert overlays(size, memory) in (None, overlaid)
    judge("fused_linear_cross_entropy", {**made, "reduction": reduction, "memory": memory})


@pytest.mark.parametrize("size", [(300, 128, 4099), (512, 256, 4096)], ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("memory", ["fast", "auto", SMALLEST])
def test_a_bias_is_added_before_logits_are_rounded(device, size, dtype, memory):
    """Products near 512 and a bias of -512: a product that is rounded by itself is off by as much as a logit."""
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
        "memory": data.draw(st.sampled_from(["auto", "low", "min"])),
        "ce_weight": draw_weight(data, vocab, device, torch.float32),
        "use_token_scaling": data.draw(st.booleans()),
    }
    judge("fused_linear_cross_entropy", made | options)


@sizes
@levels
@pytest.mark.parametrize("needs", [("weight",), ("weight", "bias"), ("x", "weight"), ("x",), ("bias",)])
def test_frozen_inputs(device, size, needs, memory):
    made = head(*size, device=device, bias=True)
    for name, t in made.items():
        if name != "target":
            t.requires_grad_(name in needs)
    overlaid = ways(functools.partial(loss_of, made, memory)) == [OVERLAID]
    assert ("weight" in needs and overlays(size, memory)) in (None, overlaid)
    judge("fused_linear_cross_entropy", {**made, "memory": memory})


@sizes
@pytest.mark.parametrize("memory", ["auto", "low", "min", SMALLEST])
@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "bf16 x", "bf16 weight"])
def test_the_same_bits_again(device, size, memory, dtypes):
    """From run to run, with saved tensors that are kept, behind hooks, and where the op itself is called."""
    x, w = (torch.bfloat16 if dtypes in ("bf16", f"bf16 {name}") else torch.float32 for name in ("x", "weight"))
    made = head(*size, dtype=x, weight_dtype=w, device=device, bias=True)
    gradients = functools.partial(torch.autograd.grad, inputs=leaves(made))

    def same(found):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    expected = gradients(loss_of(made, memory))
    same(gradients(loss_of(made, memory)))
    loss = loss_of(made, memory)
    same(gradients(loss, retain_graph=True))
    same(gradients(loss, retain_graph=True))
    same(gradients(loss))
    with torch.autograd.graph.save_on_cpu():
        same(gradients(loss_of(made, memory)))
    op, arguments = torch.ops.liger_ext.fused_linear_cross_entropy, calls(lambda: loss_of(made, memory))
    output = op(*arguments["fused_linear_cross_entropy"])
    before = [t.clone() for t in output]
    same(gradients(output[0]))
    bits = [t.detach().reshape(-1).view(torch.uint8) for t in (*output, *before)]  # some are never written
    assert all(torch.equal(a, b) for a, b in zip(bits[: len(output)], bits[len(output) :], strict=True))


@pytest.mark.parametrize("memory", ["auto", "low", "min", SMALLEST])
def test_a_gradient_has_memory_of_its_own(device, memory):
    """What waits in its memory leaves nothing behind: neither a rest, nor a reference."""
    made = head(300, 128, 4098, dtype=torch.bfloat16, device=device)
    ran = calls(loss_of(made, memory).backward)
    assert "fused_linear_cross_entropy_backward_" in ran and "fused_linear_cross_entropy_backward" not in ran
    gradient = made["weight"].grad
    assert gradient.untyped_storage().nbytes() == made["weight"].nbytes and gradient.is_contiguous()
    first = gradient.clone()
    loss_of(made, memory).backward()
    torch.testing.assert_close(gradient, 2 * first)


def test_many_rows_of_sums_are_narrowed(device):
    """More than are made at a time, of a vocabulary that halves, and of one that does not."""
    for vocab in (1024, 1025):
        judge(
            "fused_linear_cross_entropy",
            {**head(300, 16, vocab, dtype=torch.bfloat16, device=device), "memory": SMALLEST},
        )


@pytest.mark.parametrize("memory", ["fast", "auto", "low", "min", 1 << 30, SMALLEST])
def test_a_checkpoint_around_it(device, memory):
    made = head(150, 64, 700, device=device)
    expected = torch.autograd.grad(loss_of(made, memory), leaves(made))
    for use_reentrant in (False, True):
        loss = torch.utils.checkpoint.checkpoint(
            lambda x: loss_of({**made, "x": x}, memory), made["x"], use_reentrant=use_reentrant
        )
        loss.backward()
        for leaf, gradient in zip(leaves(made), expected, strict=True):
            assert torch.equal(leaf.grad, gradient)
            leaf.grad = None


@pytest.mark.parametrize("memory", ["fast", "auto", "low", "min", SMALLEST])
def test_many_gradients_at_once(device, memory):
    """torch.autograd.grad(is_grads_batched=True) runs the backward under vmap, which writes nothing in place."""
    made = head(300, 128, 515, device=device)
    loss = loss_of(made, memory)
    (found,) = torch.autograd.grad(loss, made["weight"], torch.tensor([1.0, 3.0], device=device), is_grads_batched=True)
    (expected,) = torch.autograd.grad(loss_of(made, memory), made["weight"])
    torch.testing.assert_close(found, torch.stack([expected, 3 * expected]))


def test_a_narrower_compute_dtype_than_float64(device):
    """Of the op itself: sums in float32 would not fill the memory of a gradient in float64."""
    if device.type == "cuda":
        pytest.skip("float64 works on the CPU only")
    x, weight = torch.randn(4, 3).double(), torch.randn(5, 3).double()
    options = -100, 0, 0.0, 0.0, None, False, False, False, False, None, torch.float32
    for gradients, need in ((0, False), (1, True), (2, True)):
        with pytest.raises(ValueError, match=r"compute_dtype is .*float32, expected float64"):
            torch.ops.liger_ext.fused_linear_cross_entropy(
                x, weight, torch.arange(4), None, None, None, *options, gradients, 8, 8, need, need, False
            )


def test_unknown_levels(device):
    for memory in ("fastest", 0, -1, True, None, 2.5, 1e300):
        with pytest.raises(
            ValueError, match=r"memory is .*, expected 'fast', 'auto', 'low', 'min' or a number of bytes"
        ):
            loss_of(head(4, device=device), memory)


def test_what_cannot_be_overlaid(device):
    """A frozen weight, a weight of another dtype, no rows, too few classes stored: each is said."""
    op = torch.ops.liger_ext.fused_linear_cross_entropy

    def call(rows, hidden, dtype=torch.float32, need_dweight=True, stored=150):
        x, weight = normal(rows, hidden, device=device), normal(150, hidden, device=device, dtype=dtype)
        target = torch.zeros(rows, dtype=torch.long, device=device)
        options = -100, 1, 0.0, 0.0, None, False, False, False, False, None, None
        return op(
            x, weight, target, None, None, None, *options, OVERLAID, max(rows, 1), stored, True, need_dweight, False
        )

    call(8, 8)
    call(7, 8)
    call(9, 8, stored=128)
    few = [(9, 8, torch.float32, True, stored) for stored in (64, 127, 129)]
    for bad in ((0, 8), (8, 8, torch.bfloat16), (8, 8, torch.float32, False), (19, 8, torch.float32, True, 64), *few):
        with pytest.raises(ValueError, match=r"gradients is 4 \(overlaid\)"):
            call(*bad)
