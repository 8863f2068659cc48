"""The rule of liger_ext/rule.py: it accepts right implementations, and rejects each of a list of wrong ones. A test
that cannot fail is a defect."""

import math

import pytest
import torch
from cases import LOW, normal, random_targets, scaled_rows

from liger_ext.ops._checks import accumulator
from liger_ext.records import RECORDS
from liger_ext.records import cross_entropy as losses
from liger_ext.testing import OPS, check, compare, half_ulp, named_outputs

BF16 = torch.bfloat16


def upcast(arguments):
    return {
        k: v.to(accumulator(v.dtype)) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in arguments.items()
    }


def worst(op, arguments, run, **kwargs):
    return max(m.ratio for m in compare(op, arguments, run=run, **kwargs))


def rms_inputs(dtype=BF16, rows=64, cols=200):
    x = scaled_rows(normal(rows, cols, dtype=dtype), 0)
    return {
        "x": x.requires_grad_(),
        "weight": normal(cols, dtype=dtype, seed=1, mean=1, scale=0.2).requires_grad_(),
        "casting_mode": "gemma",
    }


def rms_norm(x, weight, eps=1e-6, casting_mode="gemma", shift=0, rows=None, count=0, bits=None):
    """A correct RMSNorm in plain PyTorch; each further argument introduces an error."""
    x_wide, weight = upcast({"x": x, "w": weight}).values()
    if rows is not None:
        weight = torch.cat([weight.expand(rows, -1), weight.detach().expand(len(x) - rows, -1)])
    y = x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) / (x.shape[-1] + count) + eps) * weight
    rounded = y.to(x.dtype)
    if shift:  # the next representable number, away from zero
        step = 2 * half_ulp(y.detach().double(), x.dtype).to(y.dtype) * y.detach().sign()
        rounded = (rounded.to(y.dtype) + shift * step).to(x.dtype)
    if bits:  # rounding towards zero
        rounded = y + (((y.detach().float().view(torch.int32) >> bits) << bits).view(torch.float32) - y).detach()
        rounded = rounded.to(x.dtype)
    return rounded


@pytest.mark.parametrize("dtype", [*LOW, torch.float64])
def test_one_rounding_passes(dtype):
    assert worst("rms_norm", rms_inputs(dtype), rms_norm) <= 0.75


WRONG = {
    "one unit off everywhere": {"shift": 1},
    "one unit off towards zero": {"shift": -1},
    "truncated": {"bits": 16},
    "no eps": {"eps": 0.0},
    "another eps": {"eps": 2e-6},
    "the last row left out of dweight": {"rows": 63},
    "divided by n - 1": {"count": -1},
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_norm_fails(change):
    assert worst("rms_norm", rms_inputs(), lambda **kwargs: rms_norm(**kwargs | change)) > 1


@pytest.mark.parametrize("change", [{"eps": 0.0}, {"rows": 63}, {"count": -1}], ids=str)
def test_a_wrong_norm_fails_in_fp32(change):
    assert worst("rms_norm", rms_inputs(torch.float32), lambda **kwargs: rms_norm(**kwargs | change)) > 1


def test_arithmetic_in_16_bits_fails():
    """PyTorch's composition in bfloat16 rounds after every step, which breaks our promise of one rounding."""
    gate, up = (normal(50, 80, dtype=BF16, seed=i).requires_grad_() for i in range(2))
    assert worst("swiglu", {"gate": gate, "up": up}, lambda gate, up: torch.nn.functional.silu(gate) * up) > 1


@pytest.mark.parametrize("name", ["swiglu", "geglu", "layer_norm", "rope", "softmax"])
@pytest.mark.parametrize("column", [0, -1])
def test_one_wrong_element_fails(name, column):
    """One element of one row, wrong by one part in 50."""
    arguments = {
        "swiglu": lambda: {"gate": normal(9, 33, dtype=BF16), "up": normal(9, 33, dtype=BF16, seed=1)},
        "geglu": lambda: {"gate": normal(9, 33, dtype=BF16), "up": normal(9, 33, dtype=BF16, seed=1)},
        "layer_norm": lambda: {"x": normal(9, 33, dtype=BF16), "weight": None},
        "rope": lambda: {
            "q": normal(1, 2, 5, 8, dtype=BF16),
            "k": normal(1, 2, 5, 8, dtype=BF16),
            "cos": normal(1, 5, 8),
            "sin": normal(1, 5, 8),
        },
        "softmax": lambda: {"x": normal(9, 33, dtype=BF16)},
    }[name]()

    def wrong(**kwargs):
        outputs = named_outputs(OPS[name].baseline(**upcast(kwargs)))
        first = next(iter(outputs))
        outputs = {k: v.to(BF16) for k, v in outputs.items()}
        outputs[first][..., -1, column] *= 1.02
        return outputs

    assert worst(name, arguments, wrong) > 1


def loss_inputs(dtype=torch.float32):
    return {"logits": normal(40, 99, dtype=dtype, scale=2).requires_grad_(), "target": random_targets(40, 99)}


def right_loss(logits, target, **options):
    return losses.cross_entropy(logits.to(accumulator(logits.dtype)), target, **options)


WRONG_LOSSES = {
    "divided by all rows": lambda logits, target: (
        right_loss(logits, target)["loss"] * ((target != -100).sum() / len(target))
    ),
    "a mean over n + 1": lambda logits, target: (
        right_loss(logits, target)["loss"] * (n := (target != -100).sum()) / (n + 1)
    ),
    "an ignored row counts": lambda logits, target: right_loss(logits, target.clamp(min=0)),
    "the last column left out": lambda logits, target: right_loss(logits[:, :-1], target.clamp(max=97)),
    "rounded to bfloat16": lambda logits, target: right_loss(logits.bfloat16().float(), target),
    "one row's gradient missing": lambda logits, target: right_loss(
        torch.cat([logits[:-1], logits[-1:].detach()]), target
    ),
}


@pytest.mark.parametrize("run", WRONG_LOSSES.values(), ids=WRONG_LOSSES.keys())
def test_a_wrong_loss_fails(run):
    inputs = loss_inputs()
    inputs["target"][-1] = 5
    assert worst("cross_entropy", inputs, run) > 1
    assert worst("cross_entropy", inputs, right_loss) <= 1


@pytest.mark.parametrize("dtype", LOW)
def test_a_wrong_fused_loss_fails(dtype):
    inputs = {
        "x": normal(64, 32, dtype=dtype).requires_grad_(),
        "weight": normal(70, 32, dtype=dtype, seed=1, scale=0.4).requires_grad_(),
    }
    inputs["target"] = random_targets(64, 70)
    right = RECORDS["fused_linear_cross_entropy"].baseline
    assert worst("fused_linear_cross_entropy", inputs, right) <= 1

    def chunk_forgotten(x, weight, target):  # omits dweight of the last 8 rows
        logits = torch.cat([x[:56] @ weight.T, x[56:] @ weight.detach().T])
        return right_loss(logits, target)

    def row_forgotten(x, weight, target):
        return right(torch.cat([x[:-1], x[-1:].detach()]), weight, target)

    def unscaled(x, weight, target):
        loss = right(x, weight, target)["loss"]
        return loss.detach() + (loss - loss.detach()) * 1.02

    for wrong in (chunk_forgotten, row_forgotten, unscaled):
        assert worst("fused_linear_cross_entropy", inputs, wrong) > 1


def test_what_is_not_finite_must_agree():
    exact = torch.tensor([1.0, math.inf, math.nan, -math.inf], dtype=torch.float64)
    good = exact.float()
    check("op", "out", good, exact, good)
    for i, value in ((0, math.nan), (1, 1e38), (2, 0.0), (3, math.inf)):
        bad = good.clone()
        bad[i] = value
        with pytest.raises(AssertionError, match="op out float32"):
            check("op", "out", bad, exact, good)


def test_a_wrong_shape_is_an_error():
    exact = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(AssertionError, match="shape"):
        check("op", "out", torch.zeros(3, 1), exact, exact)


def test_half_an_ulp():
    for dtype in (*LOW, torch.float64):
        for value in (1.0, 1.5, 3.0, 1000.0, 0.1):
            t = torch.tensor(value, dtype=dtype)
            gap = (torch.nextafter(t, torch.tensor(torch.inf, dtype=dtype)) - t).double()
            assert half_ulp(t.double(), dtype) == gap / 2
