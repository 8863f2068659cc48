"""Log-probabilities of tokens, and their entropy: values and gradients compared with float64, for every plan of the
fused loss, and called as in training code."""

import itertools

import numpy as np
import pytest
import torch
from cases import normal, random_targets
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_loss_memory import SIZES, memories, overlaid
from torch.utils.flop_counter import FlopCounterMode

from liger_ext import functional as F
from liger_ext.ops._loss_plan import LEVELS, SMALLEST

EVERYTHING = {"entropy": True, "mean_logits": True, "is_top1": True, "log_sum_sq_probs": True}
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-2, 6e-2), torch.float16: (1e-2, 1e-2)}  # values, gradients


def arguments(rows, hidden, vocab, dtype=torch.float32, device="cpu", bias=True, ignored=0.1):
    tensors = {
        "x": normal(rows, hidden, dtype=dtype, device=device, seed=1).requires_grad_(),
        "weight": normal(vocab, hidden, dtype=dtype, device=device, seed=2, scale=2 * hidden**-0.5).requires_grad_(),
        "target": random_targets(rows, vocab, device=device, seed=3, ignored=ignored),
    }
    if bias:
        tensors["bias"] = normal(vocab, dtype=dtype, device=device, seed=4).requires_grad_()
    return tensors


def reference(
    x, weight, target, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100, logits=None
):
    """The five results in float64, from the definition. ``logits`` replaces x @ weight.T where rounded logits
    matter."""
    z = x @ weight.T if logits is None else logits
    z = logit_scale * (z if bias is None else z + bias)
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    z = z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p = torch.log_softmax(z, -1)
    counts = target != ignore_index
    of_target = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    found = of_target, -(log_p.exp() * log_p).sum(-1), z.mean(-1), torch.logsumexp(2 * log_p, -1)
    log_probs, entropy, mean, squares = (torch.where(counts, v, 0.0) for v in found)
    return log_probs, entropy, mean, (z.argmax(-1) == target) & counts, squares


def doubles(tensors):
    return {
        k: v.detach().double().requires_grad_(v.requires_grad) if v.is_floating_point() else v
        for k, v in tensors.items()
    }


def leaves(tensors):
    return [v for v in tensors.values() if v.requires_grad]


def judge(tensors, dtype, *, use_log_probs=True, use_entropy=True, run=F.linear_log_probs, bounds=None, **options):
    """Compares values and gradients with float64. Upstream gradients have both signs, zeros, and row-dependent
    sizes."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "memory"}
    exact = doubles(tensors)
    expected = reference(**exact, **wide)
    found = run(**tensors, **options, **EVERYTHING)
    values, gradients = bounds or BOUNDS[dtype]
    for name, value, right in zip(found._fields, found, expected, strict=True):
        if name == "is_top1":
            assert values > 1e-5 or torch.equal(value, right)
            continue
        assert value.dtype == torch.float32 and value.shape == right.shape
        scale = 1 + right.abs().max().item() if right.numel() else 1
        torch.testing.assert_close(
            value.double(), right, rtol=0, atol=values * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
    ups = [normal(*found.log_probs.shape, device=found.log_probs.device, seed=seed) for seed in (5, 6)]
    used = [i for i, wanted in enumerate((use_log_probs, use_entropy)) if wanted]
    total, right = (sum((of[i] * ups[i].to(of[i])).sum() for i in used) for of in (found, expected))
    for a, b in zip(
        torch.autograd.grad(total, leaves(tensors)), torch.autograd.grad(right, leaves(exact)), strict=True
    ):
        scale = b.abs().max().item() if b.numel() else 1
        torch.testing.assert_close(a.double(), b, rtol=0, atol=gradients * scale + 1e-6)


@settings(max_examples=40)
@given(data=st.data())
def test_linear_log_probs(device, data):
    rows, hidden = data.draw(st.sampled_from([0, 1, 3, 129, 300])), data.draw(st.sampled_from([1, 8, 33, 64]))
    vocab, dtype = data.draw(st.sampled_from([1, 2, 50, 257, 1100])), data.draw(st.sampled_from([*BOUNDS]))
    tensors = arguments(rows, hidden, vocab, dtype, device, bias=data.draw(st.booleans()))
    temperature = data.draw(st.sampled_from([1.0, 0.6, 1.7, "tokens"]))
    if temperature == "tokens":
        temperature = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(device)
    options = {
        "temperature": temperature,
        "softcap": data.draw(st.sampled_from([None, 3.0, 30.0])),
        "logit_scale": data.draw(st.sampled_from([1.0, 0.25])),
        "memory": data.draw(st.sampled_from([*LEVELS, SMALLEST])),
    }
    use_log_probs, use_entropy = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    judge(tensors, dtype, use_log_probs=use_log_probs, use_entropy=use_entropy, **options)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_plan(device, size, dtype):
    for memory in memories(size, dtype, dtype):
        judge(arguments(*size, dtype, device), dtype, memory=memory, use_entropy=False, temperature=0.8)
        judge(arguments(*size, dtype, device), dtype, memory=memory)


@pytest.mark.parametrize("temperature", [1.0, 0.7, "tokens"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_log_probs_of_rounded_logits(device, dtype, training, temperature):
    """Within 1e-5 of float64, computed from the logits as the matmul has stored them, however large they are."""
    rows, vocab = 64, 5000
    tensors = arguments(rows, 32, vocab, dtype, device, bias=False)
    if temperature == "tokens":
        temperature = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(device)
    plans = ["auto", *(overlaid((rows, 32, vocab), share, dtype, dtype) for share in (0, 1))] if training else ["auto"]
    for scale, memory in itertools.product((0.25, 5, 250), plans):
        # Multiples of 1/4: the sum of products is exact in any order, until it is rounded.
        x, weight = (tensors[name].detach().mul(2).round().mul(0.5) for name in ("x", "weight"))
        logits = (x * scale).double() @ weight.double().T
        logits = logits.to(dtype).double()
        wide = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
        right = reference(None, None, tensors["target"], logits=logits, temperature=wide)
        x = (x * scale).requires_grad_(training)
        found = F.linear_log_probs(
            x, weight.requires_grad_(training), tensors["target"], memory=memory, temperature=temperature, **EVERYTHING
        )
        bound = 1e-5 + 2**-22 * float(logits.abs().max()) / 0.5
        for name, value, of in zip(found._fields, found, right, strict=True):
            shown = lambda m, n=name: f"{n}: {m}"  # noqa: E731
            torch.testing.assert_close(value.double(), of.double(), rtol=0, atol=bound, msg=shown)


@pytest.mark.parametrize("temperature", [0.7, 0.01, 1e-6, 1e-9, "tokens"])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_certain_token(device, dtype, softcap, temperature):
    """However low the temperature is, the largest logit minus itself is zero, and a probability of 1 has no
    gradient."""
    x = torch.tensor([[30.123457], [-31.77], [9.0], [1.1]], device=device).to(dtype).requires_grad_()
    weight = torch.cat([torch.ones(1, 1), torch.full((1100, 1), -1.0)]).to(device, dtype).requires_grad_()
    target = torch.tensor([0, 1, 0, 0], device=device)
    if temperature == "tokens":
        temperature = torch.tensor([0.1, 1e-3, 1e-5, 1e-7], device=device)
    found = F.linear_log_probs(x, weight[:2], target, temperature=temperature, softcap=softcap, entropy=True)
    of_all = F.linear_log_probs(x, weight, target, temperature=temperature, softcap=softcap, entropy=True)
    certain = torch.tensor([True, False, True, True], device=device)  # 1,100 equal logits: none is certain
    off = 0 if dtype == torch.float32 else 2**-22  # GPUs correct the exponentials of 16-bit logits by a factor
    if isinstance(temperature, torch.Tensor) or temperature < 0.1:
        for results in (*found[:2], *(of[certain] for of in of_all[:2])):
            assert (results.abs() <= off).all()
        (found.log_probs.sum() + found.entropy.sum() + of_all.log_probs[certain].sum()).backward()
        factor = 1 / (temperature if isinstance(temperature, float) else temperature.min().item())
        assert x.grad.abs().max() <= 4 * off * factor and weight.grad.abs().max() <= 100 * off * factor
    for log_probs, entropy, *_ in (found, of_all):
        assert (log_probs <= off).all() and (entropy >= -off).all()
        assert log_probs.isfinite().all() and entropy.isfinite().all()


@pytest.mark.parametrize("training", [False, True])
def test_logits_that_are_no_numbers(device, training):
    """-inf masks a class, also the target's; NaN reaches all results of its row, and no other row."""
    vocab = 5000
    x, weight = torch.zeros(5, 8, dtype=torch.bfloat16, device=device), torch.zeros(vocab, 8, dtype=torch.bfloat16)
    bias = normal(vocab, dtype=torch.bfloat16, device=device)
    bias[100:4000] = -torch.inf
    target = torch.tensor([0, 4999, 100, -100, 7], device=device)
    x[4, 0] = torch.nan
    tensors = {"x": x.requires_grad_(training), "weight": weight.to(device), "bias": bias}
    found = F.linear_log_probs(**tensors, target=target, entropy=True, log_sum_sq_probs=True, mean_logits=True)
    right = reference(**doubles({**tensors, "x": x.detach()}), target=target)
    p = torch.softmax(bias.double(), 0)
    entropy = -(p * p.clamp(min=1e-300).log()).sum().expand(5)
    for i, (value, of) in enumerate(zip(found[:2], (right[0], entropy), strict=True)):
        torch.testing.assert_close(value[:3].double(), of[:3], rtol=0, atol=1e-5, msg=lambda m, n=i: f"{n}: {m}")
        assert value[3] == 0 and value[4].isnan()
    torch.testing.assert_close(found.log_sum_sq_probs[:3].double(), (p * p).sum().log().expand(3), rtol=0, atol=1e-5)
    assert (found.mean_logits[:3] == -torch.inf).all()


def test_they_are_the_fused_losses_none(device):
    tensors = arguments(200, 32, 500, device=device)
    loss = F.fused_linear_cross_entropy(**tensors, reduction="none")
    log_probs = F.linear_log_probs(**tensors)
    assert torch.equal(log_probs, -loss)
    up = normal(200, device=device)
    both = (torch.autograd.grad(of, leaves(tensors), sign * up) for of, sign in ((loss, 1), (log_probs, -1)))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("memory", ["auto", SMALLEST])
def test_frozen_inputs(device, needs, memory):
    tensors = arguments(150, 24, 300, device=device)
    for name, need in zip(("x", "weight", "bias"), needs, strict=True):
        tensors[name] = tensors[name].detach().requires_grad_(need)
    if any(needs):
        judge(tensors, torch.float32, memory=memory)
        judge(tensors, torch.float32, memory=memory, use_entropy=False)
    else:
        assert not F.linear_log_probs(**tensors, memory=memory, entropy=True).entropy.requires_grad


def test_again_and_with_other_shapes(device):
    """A second backward, the gradient of each result alone, an explicit row count, and more dimensions."""
    tensors = arguments(120, 16, 90, device=device)
    found = F.linear_log_probs(**tensors, entropy=True)
    total = found.log_probs.sum() + found.entropy.square().sum()
    first = torch.autograd.grad(total, leaves(tensors), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(total, leaves(tensors), retain_graph=True), strict=True):
        torch.testing.assert_close(a, b)
    found = found[:2]
    alone = [torch.autograd.grad(t.sum(), leaves(tensors), retain_graph=True) for t in found]
    for a, b, c in zip(*alone, torch.autograd.grad(sum(t.sum() for t in found), leaves(tensors)), strict=True):
        torch.testing.assert_close(a + b, c, atol=1e-5, rtol=1e-4)

    temperature = 0.5 + torch.rand(120, generator=torch.Generator().manual_seed(0)).to(device)
    flat = F.linear_log_probs(**tensors, temperature=temperature, **EVERYTHING)
    counted = F.linear_log_probs(**tensors, temperature=temperature, **EVERYTHING, rows=F.count_rows(tensors["target"]))
    shaped = {"x": tensors["x"].view(3, 40, 16), "target": tensors["target"].view(3, 40)}
    cube = F.linear_log_probs(**{**tensors, **shaped}, temperature=temperature.view(3, 40), **EVERYTHING)
    for a, b, c in zip(flat, counted, cube, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c.view(120))


@pytest.mark.parametrize("dynamic", [False, True])
def test_in_a_graph(device, dynamic):
    def step(x, weight, target, temperature):
        found = F.linear_log_probs(x, weight, target, temperature=temperature, softcap=20.0, **EVERYTHING)
        return found.log_probs.sum() - found.entropy.mean(), found.mean_logits

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (40, 56):
        tensors = arguments(rows, 16, 90, device=device, bias=False)
        temperature = 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0)).to(device)
        expected, found = (f(**tensors, temperature=temperature) for f in (step, compiled))
        torch.testing.assert_close(found, expected)
        for a, b in zip(*(torch.autograd.grad(of[0], leaves(tensors)) for of in (found, expected)), strict=True):
            torch.testing.assert_close(a, b)


def test_under_autocast(device):
    """Weights in float32, matmuls in bfloat16, results in float32."""
    tensors = arguments(256, 64, 700, device=device, bias=False)
    with torch.autocast(device.type, torch.bfloat16):
        found = F.linear_log_probs(**tensors, entropy=True)
    assert found.log_probs.dtype == found.entropy.dtype == torch.float32
    exact = doubles(tensors)
    expected = reference(**exact)
    for value, right in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), right, rtol=0, atol=0.05)
    totals = found.log_probs.sum() + found.entropy.sum(), expected[0].sum() + expected[1].sum()
    both = torch.autograd.grad(totals[0], leaves(tensors)), torch.autograd.grad(totals[1], leaves(exact))
    for a, b in zip(*both, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=0.05 * b.abs().max().item())


def test_in_a_checkpoint(device):
    tensors = arguments(100, 16, 90, device=device)

    def step(**tensors):
        found = F.linear_log_probs(**tensors, entropy=True)
        return found.log_probs.sum() + found.entropy.sum()

    kept = torch.autograd.grad(step(**tensors), leaves(tensors))
    again = torch.utils.checkpoint.checkpoint(step, **tensors, use_reentrant=False)
    for a, b in zip(kept, torch.autograd.grad(again, leaves(tensors)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature is 0, expected a number from 1e-9 to 1e9"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \(3\), expected a number or that of target, \(8\)"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0, expected a number from 1e-9 to 1e9"),
        ({"logit_scale": float("nan")}, "logit_scale is nan"),
        ({"temperature": 1e-30}, "temperature is 1e-30"),
        ({"temperature": True}, "temperature is True"),
        ({"logit_scale": torch.ones((), requires_grad=True)}, "logit_scale is tensor"),
        ({"softcap": -2.0}, "softcap is -2"),
        ({"memory": "most"}, "memory is 'most'"),
    ],
)
def test_bad_options(device, options, message):
    with pytest.raises(ValueError, match=f"linear_(log_probs|cross_entropy): {message}"):
        F.linear_log_probs(**arguments(8, 4, 9, device=device), **options)


def test_a_flag_that_is_none(device):
    with pytest.raises(TypeError, match="linear_log_probs: entropy is 'no', expected True or False"):
        F.linear_log_probs(**arguments(8, 4, 9, device=device), entropy="no")


def test_a_gradient_of_the_entropy_needs_no_further_matmul(device):
    """Without softcap dweight's memory holds the gradient of all logits, which may be overwritten; with it, one more
    matmul."""
    tensors = arguments(120, 64, 300, device=device, bias=False)
    plan = overlaid((120, 64, 300), 1)
    matmuls = []
    for options in ({}, {"softcap": 10.0}):
        with FlopCounterMode(display=False) as counter:
            found = F.linear_log_probs(**tensors, entropy=True, memory=plan, **options)
            (found.log_probs.sum() + found.entropy.sum()).backward()
        matmuls.append(counter.get_total_flops() / (2 * 120 * 64 * 300))
    assert matmuls == [3, 4]


def test_a_temperature_of_float64():
    """Together with a softcap, the temperature becomes a factor of each row."""
    tensors = doubles(arguments(8, 4, 9))
    found = F.linear_log_probs(**tensors, temperature=0.7, softcap=3.0)
    torch.testing.assert_close(found, reference(**tensors, temperature=0.7, softcap=3.0)[0], rtol=1e-12, atol=1e-12)


def test_numbers_of_numpy(device):
    tensors, half = arguments(8, 4, 9, device=device), np.float64(0.5)
    expected = F.linear_log_probs(**tensors, temperature=0.5, logit_scale=0.5)
    for number in (half, np.float32(half)):
        assert torch.equal(F.linear_log_probs(**tensors, temperature=number, logit_scale=number), expected)
    capped = F.linear_log_probs(**tensors, temperature=half, softcap=half)
    assert torch.equal(capped, F.linear_log_probs(**tensors, temperature=0.5, softcap=0.5))
