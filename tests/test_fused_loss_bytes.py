"""Tests of the memory of the fused loss: a call allocates at most the bytes that csrc/trace computes for its plan, and
hardly fewer; it keeps to a number of bytes that is passed as ``memory`` (a budget), apart from the scratch memory of
16-bit matmuls on a CPU; and levels of memory select the documented plans."""

import contextlib
import unittest.mock

import numpy as np
import pytest
import torch
from cases import LOW, laid_out, most_bytes, normal, random_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cross_entropy import loss_options
from test_fused_linear_cross_entropy import head
from test_fused_loss_memory import fused_loss, leaves, overlaid
from torch.utils.flop_counter import flop_registry

from liger_ext import _C
from liger_ext import functional as F
from liger_ext.ops import _fused_loss, _loss_devices, _loss_plan
from liger_ext.ops._fused_linear_op import RESULTS
from liger_ext.ops._loss_arguments import FusedLossCall, Layout
from liger_ext.ops._loss_devices import profile_index
from liger_ext.ops._loss_plan import LEVELS, SMALLEST, choose, front
from liger_ext.ops._schema import argument_names

GPUS = [profile_index(profile) for profile in _C.profiles()]
CPU = _loss_devices.device_index(torch.device("cpu"))
float_dtypes = st.sampled_from([torch.float32, torch.bfloat16])
REDUCTIONS = st.sampled_from(["mean", "none"])
SIZES = {"rows": (400, 1, 200_000), "hidden": (300, 256, 8192), "vocab": (3000, 1, 270_000)}
OPTIONS = {"bias": torch.float16, "ce_weight": torch.float32, "normalizer": torch.float32, "label_smoothing": 0.1}
OPTIONS |= {"lse_square_scale": 1e-4, "return_z_loss": True, "use_token_scaling": True, "logits_dtype": torch.float32}


@st.composite
def any_calls(draw):
    sizes = {n: draw(st.integers(1, few) | st.integers(least, most)) for n, (few, least, most) in SIZES.items()}
    options = {name: value for name, value in OPTIONS.items() if draw(st.booleans())}
    if "use_token_scaling" in options:  # needs logits_dtype None
        options.pop("logits_dtype", None)
    options |= {name: draw(st.booleans()) for name in ("need_dx", "need_dweight")}
    options |= {name: draw(float_dtypes) for name in ("dtype", "weight", "compute_dtype")}
    call = FusedLossCall.uniform(
        **sizes, **options, device=draw(st.sampled_from([*GPUS, CPU])), reduction=draw(REDUCTIONS)
    )
    facts = {"all_rows": (0, 250_000), "copies": (0, 1_000_000), "free": (0, 100 << 20, 4 << 30)}
    return call._replace(overlays=draw(st.booleans()), **{n: draw(st.sampled_from(v)) for n, v in facts.items()})


@contextlib.contextmanager
def recorded_plans():
    """Lists each call of the fused loss with its plan."""
    found = []

    def record(call, memory):
        found.append((call, _loss_plan.plan(call, memory)))
        return found[-1][1]

    with unittest.mock.patch.object(_fused_loss, "plan", record):
        yield found


# Choice of a plan ---------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(call=any_calls(), budgets=st.lists(st.floats(1, 30), min_size=1, max_size=6))
def test_what_levels_and_budgets_choose(call, budgets):
    """No level is both slower and larger than another level or a budget. More memory never takes more time. Budgets are
    kept. Each level selects the plan with the least memory within its share of the least time."""
    found = front(call)
    assert found[0].seconds > 0  # the op does not refuse the call
    least = found[0].bytes
    chosen = [choose(call, int(least * share)) for share in sorted([1, *budgets])]
    assert all(choice.bytes <= least * share for choice, share in zip(chosen, sorted([1, *budgets]), strict=True))
    levels = {level: choose(call, level) for level in LEVELS}
    for one in (*chosen, *levels.values()):
        assert one in found
        assert not any(other.bytes < one.bytes and other.seconds <= one.seconds for other in (*chosen, *found))
    in_order = [levels[level] for level in ("min", "low", "auto", "fast")]
    assert [c.bytes for c in in_order[:3]] == sorted(c.bytes for c in in_order[:3])
    assert levels["min"] == found[0]
    within = found
    if profile := _loss_plan.device(call).profile:
        results = _loss_plan._results(call)
        within = [c for c in found if c.bytes <= results + profile.memory_bytes // 8] or found[:1]
    assert found[0].seconds <= 4 * found[-1].seconds
    fastest = min(choice.seconds for choice in within)
    assert levels["fast"].seconds <= 1.01 * fastest and levels["low"].seconds <= 1.2 * fastest
    once = [choice for choice in within if not choice.recomputes]
    if once:
        assert not levels["auto"].recomputes or levels["auto"].bytes <= _loss_plan._results(call) + call.free
        assert levels["auto"].seconds <= 1.04 * once[-1].seconds
    if not call.free:
        for level, times, among in (("fast", 1.01, within), ("low", 1.2, within), ("auto", 1.04, once or within)):
            smaller = [choice for choice in among if choice.bytes < levels[level].bytes]
            assert all(choice.seconds > times * among[-1].seconds for choice in smaller)


@settings(max_examples=100)
@given(call=any_calls())
def test_the_front_is_that_of_all_candidates(call):
    """The front contains the best of all candidates, and a plan's bytes do not depend on the other candidates."""
    found = front(call)
    assert [c.bytes for c in found] == sorted({c.bytes for c in found})
    assert [c.seconds for c in found] == sorted({c.seconds for c in found}, reverse=True)
    for plan in _loss_plan.candidates(call):
        taken = _loss_plan.costs(call, [plan])[0].bytes
        assert [choice.bytes for choice in found if choice.plan == plan] in ([], [taken])


@settings(max_examples=200)
@given(call=any_calls(), drawn=st.randoms())
def test_flop_formulas_count_the_multiplications_of_the_trace(call, drawn):
    """The formulas of the forward and of the backward count, each, the multiplications of the code that a plan runs."""
    plan = drawn.choice(_loss_plan.candidates(call))
    ((_, _, *traced),) = _C.loss_costs(call.arguments, [plan], True, *_loss_plan.device(call))
    called = call.arguments._replace(gradients=plan.gradients, chunk_rows=plan.rows, chunk_classes=plan.classes)
    values = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Layout) else value
        for name, value in called._asdict().items()
    }
    results = torch.ops.liger_ext.fused_linear_cross_entropy(*values.values())
    values |= dict(zip(RESULTS, results, strict=True))
    for name, multiplications in zip(("", "_backward"), traced, strict=True):
        formula = flop_registry[getattr(torch.ops.liger_ext, f"fused_linear_cross_entropy{name}")]
        names = argument_names(getattr(torch.ops.liger_ext, f"fused_linear_cross_entropy{name}").default)
        runs = not name or called.need_dx or called.need_dweight
        found = formula(*(values.get(argument) for argument in names)) if runs else 0
        assert found == 2 * multiplications, (name, plan)


def test_the_levels_of_models():
    """The plans of the levels on an H100 at the shapes of Gemma 2 2B, GPT-OSS and Qwen 3 0.6B."""
    h100, bf16 = profile_index(_C.profile("H100")), torch.bfloat16
    for rows, hidden, vocab in ((8192, 2304, 256_000), (8192, 2880, 201_088), (8192, 1024, 151_936)):
        for per_row in (False, True):
            call = FusedLossCall.uniform(rows, hidden, vocab, bf16, h100, "none" if per_row else "mean")
            assert choose(call, "auto").plan == overlaid((rows, hidden, vocab), 1)
            assert choose(call, "min").plan == overlaid((rows, hidden, vocab), 0)
    long = FusedLossCall.uniform(32_768, 2048, 128_256, bf16, h100)
    assert choose(long, "auto").plan.gradients == int(_C.Gradients.accumulated)


def test_memory_that_is_free_is_used():
    h100, bf16 = profile_index(_C.profile("H100")), torch.bfloat16
    call = FusedLossCall.uniform(8192, 2304, 256_000, bf16, h100)
    most = choose(call._replace(free=6 << 30), "auto")
    assert most == front(call)[-1] and most.seconds < choose(call, "auto").seconds
    assert choose(call._replace(free=6 << 30), "min") == choose(call, "min")


def test_fewer_bytes_than_it_can_do_with(device):
    made = head(300, 128, 4099, device=device)
    call = FusedLossCall.uniform(300, 128, 4099, torch.float32, _loss_devices.device_index(device))
    least = front(call)[0].bytes
    fused_loss(made, least).backward()
    with pytest.raises(
        ValueError, match=rf"memory is {least - 1} bytes, expected at least {least}, or 'min', for 300 rows"
    ):
        fused_loss(made, least - 1)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *(
            (name, (0.1, 0.2, np.float64(0.3)))
            for name in ("label_smoothing", "lse_square_scale", "softcap", "temperature")
        ),
        ("return_z_loss", (True, np.True_, np.int64(1), torch.tensor(True), torch.tensor(True))),
        ("x", [torch.ones(3, length, 16)[:, -1] for length in (4, 5, 6)]),
    ],
)
def test_calls_that_share_a_plan(option, values):
    """A float option changes a plan only if it is not the default. The type of a flag and a stride change none."""
    call = {"x": torch.ones(3, 16), "weight": torch.ones(len(option) + 50, 16), "target": torch.zeros(3).long()}
    loss = F.linear_log_probs if option == "temperature" else F.fused_linear_cross_entropy
    before = choose.cache_info().misses
    for value in values:
        loss(**{**call, option: value})
    assert choose.cache_info().misses == before + 1
    loss(**call)
    assert choose.cache_info().misses == before + (1 if option == "x" else 2)


def test_a_trace_lists_what_a_plan_does():
    """The trace lists the matmuls of a plan's chunks, of which all but the first accumulate into dweight; equal chunks
    are one entry with a count."""
    bf16 = torch.bfloat16
    h100 = profile_index(_C.profile("H100"))
    call = FusedLossCall.uniform(1000, 64, 5000, bf16, h100)
    plan = _loss_plan.in_chunks(call, 256, 5000)
    matmuls, kernels = _C.loss_trace(call.arguments, plan, *_loss_plan.device(call))
    of_dweight = [m for m in matmuls if m[0] + m[1] != 5256 and m[2] in (256, 232) and m[1] == 64]
    assert [(accumulates, times) for *_, accumulates, times in of_dweight[::2]] == [(False, 1), (True, 2), (True, 1)]
    assert sum(m * n * k * times for m, n, k, _, times in matmuls) == 3 * 1000 * 64 * 5000
    assert kernels[0] == ("CountTargets", 1) and ("InPlaceHeld", 2) in kernels


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("plan", [overlaid((512, 1024, 8192), 1, torch.float32, torch.bfloat16), None])
def test_the_weight_is_cast_once(per_row, plan):
    """Under autocast the matmul of dx reads the cast weight of the matmul of the logits, if the gradient of all logits
    is stored. So dx costs no more than with a weight that needs no cast."""
    fp32, bf16, h100 = torch.float32, torch.bfloat16, profile_index(_C.profile("H100"))
    call = FusedLossCall.uniform(512, 1024, 8192, bf16, h100, "none" if per_row else "mean", compute_dtype=bf16)
    plan = plan or _loss_plan.in_chunks(call, 512, 8192)

    def dx_seconds(weight):
        of = call.replaced(weight=call.arguments.weight._replace(dtype=weight))
        with_dx, without = (_loss_plan.costs(of.replaced(need_dx=dx), [plan])[0].seconds for dx in (True, False))
        return with_dx - without

    cast = call.vocab * call.hidden * (fp32.itemsize + bf16.itemsize) / _loss_plan.device(call).rates.bandwidth
    assert dx_seconds(fp32) < dx_seconds(bf16) + cast / 2


# Allocated memory -----------------------------------------------------------------------------------------------------


@st.composite
def calls_that_count(draw):
    """Draws arguments in every dtype and layout, large enough that a missing term of the prediction shows."""
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


def matmul_scratch(dtype, rows, hidden, vocab):
    """Returns the bytes that torch's CPU matmul of 16-bit operands allocates beside its result, for the largest of the
    loss's three products. They depend on the CPU and its number of threads; a plan does not contain them."""
    products = (rows, hidden, vocab), (rows, vocab, hidden), (vocab, rows, hidden)
    operands = [(torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)) for m, k, n in products]
    return max(most_bytes(a.device, lambda: torch.mm(a, b)) - 2 * len(a) * len(b.T) for a, b in operands)  # noqa: B023


@settings(max_examples=60)
@given(drawn=calls_that_count(), memory=st.sampled_from([*LEVELS, SMALLEST, 0, 0.3, 1]) | st.floats(1, 4))
def test_the_memory_that_is_taken(device, drawn, memory):
    """Forward and backward allocate the bytes of the plan's trace, plus a little in Python, and no more than the
    budget. ``memory`` up to 1 is the share of stored gradients among those that dweight does not hold; above 1 it is a
    budget in multiples of the least bytes."""
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

    def run():
        with torch.autocast(device.type, torch.bfloat16, enabled=drawn["autocast"]):
            loss = fused_loss(made, memory, **options)
        value = loss if isinstance(loss, torch.Tensor) else loss.loss
        if value.requires_grad:
            return loss, torch.autograd.grad(value.sum(), leaves(made))

    budget = None
    with recorded_plans() as found:
        if not isinstance(memory, str):
            share, memory = memory, "fast"
            run()
            call = found[-1][0]
            if share > 1:
                memory = budget = int(front(call)[0].bytes * share)
            else:
                dtypes = call.arguments.weight.dtype, call.compute
                memory = overlaid((call.rows, *drawn["size"][1:]), share, *dtypes) or "min"
        taken = most_bytes(device, run)
    call, chosen = found[-1]
    on_16_bit_cpu = device.type == "cpu" and call.compute.itemsize == 2
    scratch = matmul_scratch(call.compute, rows, hidden, vocab) if on_16_bit_cpu else 0
    assert taken <= _loss_plan.costs(call, [chosen])[0].bytes + scratch
    assert budget is None or taken <= budget + scratch
    if not drawn["counted"] and not call.copies and not on_16_bit_cpu:
        assert (
            taken
            >= _loss_plan.costs(call, [chosen])[0].bytes
            - 24 * call.rows * 4
            - (1 << 18)
            - _loss_plan._PER_ROW * call.rows
        )


def wide_log_probs(inputs, memory):
    return F.linear_log_probs(**inputs, memory=memory, logits_dtype=torch.float32).sum()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("step", [fused_loss, wide_log_probs])
def test_bytes_in_a_graph(device, dynamic, step):
    """A budget in a graph holds, or raises an error, for any number of rows that the graph may run with."""
    torch._dynamo.reset()
    dtype = torch.float32 if step == fused_loss else torch.bfloat16
    made = head(512, 64, 20_001, dtype=dtype, device=device)
    others = {"x": made["x"][:300], "weight": made["weight"], "target": made["target"][:300]}
    with pytest.raises(Exception, match=r"memory is 1000 bytes, expected at least \d+ in a graph") as said:
        torch.compile(step, backend="aot_eager", dynamic=False, fullgraph=True)(made, 1000)
    torch._dynamo.reset()
    run = torch.compile(step, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    least = int(str(said.value).split("at least ")[1].split(" ")[0])
    for inputs in (made, others):
        gradients = torch.autograd.grad(run(inputs, least), leaves(made))  # compiles
        del gradients
        taken = most_bytes(device, lambda inputs=inputs: torch.autograd.grad(run(inputs, least), leaves(made)))
        assert taken <= least
