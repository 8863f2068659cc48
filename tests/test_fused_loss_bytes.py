"""Bytes of the fused loss's memory: what a plan says that it takes, what it takes, and what is too little."""

import sys

import pytest
import torch
from cases import LOW, laid_out, most_bytes, normal, random_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cross_entropy import loss_options
from test_fused_linear_cross_entropy import head
from test_fused_loss_memory import OVERLAID, leaves, loss_of, small  # noqa: F401

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops import _chunks

GPU_MEMORY = _chunks.gpu_memory

calls_of_any_size = st.builds(
    _chunks.Call,
    rows=st.one_of(st.integers(1, 400), st.integers(1, 40_000)),
    hidden=st.integers(1, 5000),
    vocab=st.one_of(st.integers(1, 3000), st.integers(1, 260_000)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    gpu_bytes=st.sampled_from([None, 140 << 30]),
    dx=st.booleans(),
    dweight=st.booleans(),
    dbias=st.booleans(),
    per_row=st.booleans(),
    overlays=st.booleans(),
    sum_dtype=st.sampled_from([None, torch.bfloat16]),
    x_dtype=st.sampled_from([None, torch.float32]),
    weight_dtype=st.sampled_from([None, torch.bfloat16, torch.float32]),
    bias_dtype=st.sampled_from([None, torch.float16]),
    all_rows=st.sampled_from([0, 50_000]),
    copies=st.sampled_from([0, 1_000_000]),
)


@given(call=calls_of_any_size, more=st.lists(st.floats(1, 20), min_size=1, max_size=6))
def test_bytes_are_kept_to(call, more):
    """No plan takes more than it may, and a smaller budget takes no more than a larger one."""
    least = _chunks.least_bytes(call)
    taken = [_chunks.bytes_of(call, _chunks.plan(call, int(least * n))) for n in sorted([1, *more])]
    assert taken == sorted(taken)
    assert all(found <= least * n for found, n in zip(taken, sorted([1, *more]), strict=True))


@given(
    rows=st.sampled_from([1, 1.5, 2, 4, 7.5]), hidden=st.sampled_from([1024, 2048, 4096, 5120]), share=st.floats(0, 1)
)
def test_a_budget_is_used(rows, hidden, share):
    """Between what stores nothing beside dweight and what stores all, all but one vocabulary chunk's bytes is used."""
    call = _chunks.Call(int(rows * hidden), hidden, 128_256, torch.bfloat16, 140 << 30)
    least, most = (
        _chunks.bytes_of(call, _chunks.Plan(OVERLAID, call.rows, stored))
        for stored in (_C.overlaid_classes(*call[:3]), call.vocab - 64)
    )
    budget = int(least + share * (most - least))
    if budget < (smallest := _chunks.least_bytes(call)):  # rows == hidden: dweight has room for all, which takes more
        with pytest.raises(ValueError, match=f"expected at least {smallest}"):
            _chunks.plan(call, budget)
        return
    way = _chunks.plan(call, budget)
    assert _chunks.bytes_of(call, way) >= budget * 0.995 or way.gradients != OVERLAID


def test_fewer_bytes_than_it_can_do_with(device):
    made = head(300, 128, 4099, device=device)
    call = _chunks.Call(300, 128, 4099, torch.float32, 140 << 30)
    least = _chunks.least_bytes(call)
    loss_of(made, least).backward()
    with pytest.raises(
        ValueError, match=rf"memory is {least - 1} bytes, expected at least {least}, or 'min', for 300 rows"
    ):
        loss_of(made, least - 1)


@st.composite
def calls_that_count(draw):
    """Arguments in every dtype and layout, large enough for what is forgotten to be seen."""
    hidden = draw(st.sampled_from([17, 33, 64, 65, 128]))
    rows = max(1, int(hidden * draw(st.sampled_from([0.1, 0.5, 1, 2, 3, 5, 8, 12, 20]))) + draw(st.integers(-1, 1)))
    vocab = min(draw(st.integers(500, 60_000)), 12_000_000 // rows)
    return {
        "size": (rows, hidden, vocab),
        "dtypes": draw(st.lists(st.sampled_from(LOW), min_size=3, max_size=3)),
        "layout": draw(st.sampled_from(["contiguous", "contiguous", "x", "weight", "bias", "3d"])),
        "autocast": draw(st.sampled_from([False, False, False, True])),
        "needs": draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
        "bias": draw(st.booleans()),
        "same": draw(st.booleans()),
        "sum": draw(st.sampled_from([None, "compute"])),
        "ignored": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "counted": draw(st.booleans()),
        "options": draw(loss_options),
    }


@settings(max_examples=60)
@given(drawn=calls_that_count(), memory=st.one_of(st.sampled_from(_chunks.LEVELS), st.floats(1, 4)))
def test_the_memory_that_is_taken(device, drawn, memory):
    """What a forward and its backward ask for: at most what was given, or what the level is said to take."""
    dtypes = drawn["dtypes"][:1] * 3 if drawn["same"] else drawn["dtypes"]
    rows, hidden, vocab = drawn["size"]
    columns = {"x": "columns", "weight": "transposed"}
    made = {}
    for name, shape, dtype, need in zip(
        ("x", "weight", "bias"), ((rows, hidden), (vocab, hidden), (vocab,)), dtypes, drawn["needs"], strict=True
    ):
        if name == "bias" and not drawn["bias"]:
            continue
        t = normal(*shape, dtype=dtype, device=device, scale=0.3)
        if name == drawn["layout"]:
            t = laid_out(t, columns.get(name, "columns"))
        elif name == "x" and drawn["layout"] == "3d":
            t = torch.stack([t, t], 1)[:, :1]
        made[name] = t.requires_grad_(need)
    target = random_targets(rows, vocab, device=device, ignored=drawn["ignored"])
    made["target"] = target[:, None] if made["x"].dim() == 3 else target
    options = dict(drawn["options"])
    if drawn["counted"]:
        options["rows"] = F.count_rows(target)
    compute = torch.bfloat16 if drawn["autocast"] else torch.promote_types(dtypes[0], dtypes[1])
    options["accum_dtype"] = compute if drawn["sum"] else None

    found = []
    module = sys.modules[F.fused_linear_cross_entropy.__module__]

    def found_plan(call, memory):
        found.append((call, memory))
        return _chunks.plan(call, memory)

    def run():
        with torch.autocast(device.type, torch.bfloat16, enabled=drawn["autocast"]):
            loss = loss_of(made, memory, **options)
        value = loss if isinstance(loss, torch.Tensor) else loss.loss
        if value.requires_grad:
            return loss, torch.autograd.grad(value.sum(), leaves(made))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "plan", found_plan)
        patch.setattr(module, "gpu_memory", GPU_MEMORY)
        if not isinstance(memory, str):
            share, memory = memory, "fast"
            run()
            memory = int(_chunks.least_bytes(found[-1][0]) * share)
        taken = most_bytes(device, run)
    call, memory = found[-1]
    assert taken <= _chunks.bytes_of(call, _chunks.plan(call, memory))
    assert isinstance(memory, str) or taken <= memory


@pytest.mark.parametrize("dynamic", [False, True])
def test_bytes_in_a_graph(device, dynamic):
    """Kept to, or an error, for any number of rows that the graph may serve."""
    torch._dynamo.reset()
    made = head(512, 64, 20_001, device=device)
    others = {"x": made["x"][:300], "weight": made["weight"], "target": made["target"][:300]}
    run = torch.compile(loss_of, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(ValueError, match=r"memory is 1000 bytes, expected at least \d+ in a graph") as said:
        run(made, 1000)
    least = int(str(said.value).split("at least ")[1].split(" ")[0])
    for inputs in (made, others):
        gradients = torch.autograd.grad(run(inputs, least), leaves(made))  # compiles
        del gradients
        taken = most_bytes(device, lambda inputs=inputs: torch.autograd.grad(run(inputs, least), leaves(made)))
        assert taken <= least
