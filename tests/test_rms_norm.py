"""RMSNorm and add+RMSNorm: every output and gradient against a float64 reference (the accuracy rule of
liger_ext/rule.py), and edge cases."""

import pytest
import torch
from cases import draw_leaf, draw_parameter, hidden_sizes, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import functional as F
from liger_ext.testing import judge

MODES = st.sampled_from(["llama", "gemma", "none"])


def arguments(data, device, names):
    """Tensors of one shape under ``names`` and a weight, in drawn dtypes and layouts."""
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    made = {name: draw_leaf(data, device, *shape, all_sizes=True) for name in names}
    return made | {
        "weight": draw_parameter(data, device, shape[-1], mean=1),
        "eps": data.draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        "offset": data.draw(st.sampled_from([0.0, 1.0])),
        "casting_mode": data.draw(MODES),
    }


@settings(max_examples=80)
@given(data=st.data())
def test_rms_norm(device, data):
    judge("rms_norm", arguments(data, device, ["x"]))


@settings(max_examples=80)
@given(data=st.data())
def test_add_rms_norm(device, data):
    judge("add_rms_norm", arguments(data, device, ["x", "residual"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(3, 8192), (2, 65536), (2, 65537), (1, 131072), (3, 70001), (1500, 96), (700, 1), (140, 40960), (150, 65536)],
)
def test_wide_and_long(device, dtype, shape):
    if device.type == "cpu" and shape[1] > 10_000:  # many rows matter on a GPU only
        shape = (min(shape[0], 33), shape[1])
    x, weight = (
        normal(*shape, dtype=dtype, device=device),
        normal(shape[-1], dtype=dtype, device=device, seed=1, mean=1),
    )
    judge("rms_norm", {"x": x.requires_grad_(), "weight": weight.requires_grad_()})
    residual = normal(*shape, dtype=dtype, device=device, seed=2).requires_grad_()
    judge("add_rms_norm", {"x": x, "residual": residual, "weight": weight, "casting_mode": "gemma", "offset": 1.0})


def test_a_row_of_zeros_is_zero_and_its_gradient_is_finite(device):
    x = torch.zeros(2, 40, device=device).requires_grad_()
    y = F.rms_norm(x, torch.ones(40, device=device), eps=1e-6)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(dx, torch.full_like(dx, 1e3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(device, value):
    x, weight = normal(4, 40, device=device), torch.ones(40, device=device)
    x[1, 3] = value
    y = F.rms_norm(x, weight)
    expected = torch.nn.functional.rms_norm(x, (40,), weight, 1e-6)
    assert torch.equal(y.isnan(), expected.isnan())
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_large_values_do_not_overflow_in_half_precision(device):
    x = torch.full((2, 64), 6e4, dtype=torch.float16, device=device)
    torch.testing.assert_close(F.rms_norm(x), torch.ones_like(x))


@pytest.mark.parametrize("used", ["y", "sum"])
def test_gradient_of_either_output_alone(device, used):
    x, residual = (normal(3, 5, 40, device=device, seed=i).requires_grad_() for i in range(2))
    weight = normal(40, device=device, seed=2).requires_grad_()
    y, total = F.add_rms_norm(x, residual, weight)
    if used == "sum":
        dx, dresidual, dweight = torch.autograd.grad(
            total, (x, residual, weight), torch.full_like(total, 0.5), allow_unused=True
        )
        assert torch.equal(dx, torch.full_like(dx, 0.5)) and torch.equal(dresidual, dx)
        assert dweight is None or not dweight.any()
        return
    found = torch.autograd.grad(y, (x, residual, weight), torch.ones_like(y))
    expected = torch.autograd.grad(F.rms_norm(x + residual, weight), (x, residual, weight), torch.ones_like(y))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_casting_mode_decides_where_bfloat16_is_rounded(device):
    """llama rounds x * rstd before the multiplication: a weight of 3 then yields bfloat16 numbers times 3, rounded
    again."""
    x = normal(8, 256, dtype=torch.bfloat16, device=device)
    weight = torch.full((256,), 3.0, dtype=torch.bfloat16, device=device)
    n = F.rms_norm(x, None, casting_mode="none")
    assert torch.equal(F.rms_norm(x, weight, casting_mode="llama"), n * weight)
    assert not torch.equal(F.rms_norm(x, weight, casting_mode="gemma"), n * weight)
