"""Squared ReLU, against a float64 reference (the accuracy rule of liger_ext/rule.py)."""

import pytest
import torch
from cases import draw_tensor, hidden_sizes, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st

import liger_ext
from liger_ext import functional as F
from liger_ext.testing import judge


@settings(max_examples=60)
@given(data=st.data())
def test_relu_squared(device, data):
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    x = draw_tensor(data, device, *shape, scale=data.draw(st.sampled_from([1, 30])))
    judge("relu_squared", {"x": x.requires_grad_()})


@pytest.mark.parametrize("shape", [(9001, 1), (2048, 2), (1501, 7), (3, 4095), (5, 4097)])
def test_many_short_rows(device, shape):
    """The kernel treats them as one long row, split into threads and vectors."""
    judge("relu_squared", {"x": normal(*shape, dtype=torch.bfloat16, device=device).requires_grad_()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_special_values_as_in_pytorch(device, dtype):
    """NaN, infinities, squares that overflow or underflow; the gradient at 0 is 0."""
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 6e4, -6e4, 1e-30, 1e-4, 1.0]
    runs = []
    for function in (F.relu_squared, lambda x: torch.nn.functional.relu(x).square()):
        x = torch.tensor([values], dtype=dtype, device=device).requires_grad_()
        y = function(x)
        y.backward(torch.ones_like(y))
        runs.append((y.detach(), x.grad))
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=2e-3, atol=1e-6)


def test_upstream_names():
    x = normal(5, 24)
    for function in (liger_ext.liger_relu_squared, liger_ext.LigerReLUSquared()):
        assert torch.equal(function(x), F.relu_squared(x))
