"""Tests of the error bound that holds on every platform: every result has one, right implementations keep it, and wrong
ones exceed it."""

import pytest
import torch
from cases import normal, random_targets
from test_rule import BF16, WRONG, WRONG_LOSSES, loss_inputs, right_loss, rms_inputs, rms_norm, upcast

from liger_ext import bounds
from liger_ext.testing import OPS, bound, compare, examples, expected, named_outputs

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def share(op, arguments, run=None):
    return max(m.share for m in compare(op, arguments, run=run))


def test_every_result_has_a_bound_and_keeps_it():
    seen = set()
    for op, arguments in examples("cpu", FLOATS):
        for m in compare(op, arguments):
            assert 0 <= m.share <= 1, m
            seen.add((op, m.what))
            # With a single rounding to 16 bits the largest error of many elements is nearly half an ulp.
            stored_before = OPS[op].native and m.what != "out"
            assert m.share > 0.5 or m.dtype.itemsize > 2 or stored_before, m
    stated = {(op, what) for op, results in bounds.ROUNDINGS.items() for what in results}
    assert seen <= stated and {op for op, _ in stated} == OPS.keys()


# The bound cannot detect two kinds of error: in fp32 a unit in the last place, which is within the arithmetic's
# roundings; in bfloat16 a doubled eps, which changes no row by more than a rounding (the statistics of test_rule detect
# it).
ALGORITHMIC = [name for name, change in WRONG.items() if not {"shift", "bits"} & change.keys()]
CASES = [(torch.float32, name) for name in ALGORITHMIC] + [(BF16, name) for name in WRONG if name != "another eps"]


@pytest.mark.parametrize(("dtype", "name"), CASES)
def test_a_wrong_norm_is_outside(dtype, name):
    assert share("rms_norm", rms_inputs(dtype), lambda **kwargs: rms_norm(**kwargs | WRONG[name])) > 1
    assert share("rms_norm", rms_inputs(dtype), rms_norm) <= 1


@pytest.mark.parametrize("run", WRONG_LOSSES.values(), ids=WRONG_LOSSES.keys())
def test_a_wrong_loss_is_outside(run):
    inputs = loss_inputs()
    inputs["target"][-1] = 5
    assert share("cross_entropy", inputs, run) > 1
    assert share("cross_entropy", inputs, right_loss) <= 1


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_wrong_fused_loss_is_outside(dtype):
    inputs = {
        "x": normal(64, 32, dtype=dtype).requires_grad_(),
        "weight": normal(70, 32, dtype=dtype, seed=1, scale=0.4).requires_grad_(),
        "target": random_targets(64, 70),
    }

    def row_forgotten(x, weight, target):
        return right_loss(torch.cat([x[:-1], x[-1:].detach()]) @ weight.T, target)

    assert share("fused_linear_cross_entropy", inputs) <= 1 < share("fused_linear_cross_entropy", inputs, row_forgotten)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "rope", "softmax"])
def test_one_wrong_element_is_outside(name):
    """A relative error of 10^-4 in one fp32 element exceeds the bound."""
    arguments = next(arguments for op, arguments in examples("cpu", (torch.float32,)) if op == name)

    def wrong(**kwargs):
        outputs = named_outputs(OPS[name].baseline(**upcast(kwargs)))
        first = next(iter(outputs))
        largest = outputs[first].detach().abs().argmax()
        factor = torch.ones(outputs[first].numel()).index_fill(0, largest, 1.0001).view_as(outputs[first])
        return outputs | {first: outputs[first] * factor}

    assert share(name, arguments, wrong) > 1


def test_a_bound_is_a_rounding_and_the_arithmetic():
    exact = torch.tensor([1.0, -3.0, 0.0], dtype=torch.float64)
    eps = torch.finfo(torch.float32).eps
    for dtype in (BF16, torch.float32):
        found = bound("rope", "out0", exact, dtype, 4.0)
        expected = bounds.half_ulp(exact, dtype) + 2 * eps / 2 * 4.0
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=2e-38)
    stored = bound("rms_norm", "out", exact, BF16, 1.0, compute=BF16, stored=BF16)
    once = bound("rms_norm", "out", exact, BF16, 1.0, compute=BF16)
    torch.testing.assert_close(stored - once, exact.abs() * 2**-8, rtol=1e-12, atol=0)
    assert (bound("softmax", "out", exact, BF16, 1.0, length=10**6) > bound("softmax", "out", exact, BF16, 1.0)).all()


@pytest.mark.parametrize(("op", "what"), [("softmax", "dy"), ("norm", "out")])
def test_a_result_without_a_bound_is_an_error(op, what):
    with pytest.raises(ValueError, match=f"'{what}' of '{op}'; known: "):
        bound(op, what, torch.zeros(1, dtype=torch.float64), BF16, 1.0)


@pytest.mark.parametrize("op", ["add_rms_norm", "swiglu", "cross_entropy"])
def test_expected_judges_results_of_any_platform(op):
    """`expected` judges results of any platform, such as an emulator, from the inputs and upstream gradients alone."""
    arguments = next(arguments for name, arguments in examples("cpu", (BF16,)) if name == op)
    outputs = named_outputs(OPS[op].run(**arguments), OPS[op].outputs[0])
    grads = {name: normal(*out.shape, dtype=out.dtype, seed=i) for i, (name, out) in enumerate(outputs.items())}
    should = expected(op, arguments, grads, {name: out.dtype for name, out in outputs.items()})
    leaves = {name: v for name, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), list(grads.values()))
    results = outputs | {"d" + name: gradient for name, gradient in zip(leaves, found, strict=True)}
    assert results.keys() == should.keys()
    for name, result in results.items():
        assert 0 < should[name].share(result) <= 1
        wrong = result.detach().clone()
        wrong.view(-1)[-1] += 0.1 + wrong.abs().max()
        assert should[name].share(wrong) > 1
        wrong.view(-1)[-1] = torch.nan
        assert should[name].share(wrong) == float("inf")
