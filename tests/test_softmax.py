"""Softmax over the last dimension, against a float64 reference (the accuracy rule of liger_ext/rule.py)."""

import pytest
import torch
from cases import draw_tensor, hidden_sizes, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import functional as F
from liger_ext.testing import judge


@settings(max_examples=60)
@given(data=st.data())
def test_softmax(device, data):
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    x = draw_tensor(data, device, *shape, scale=data.draw(st.sampled_from([1, 4])))
    judge("softmax", {"x": x.requires_grad_()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 65_537), (1, 262_147), (3, 32_768)])
def test_wide(device, dtype, shape):
    judge("softmax", {"x": normal(*shape, dtype=dtype, device=device, scale=3).requires_grad_()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_special_values_as_in_pytorch(device, dtype):
    nan, inf = float("nan"), float("inf")
    rows = [
        [0.0, 1.0, -inf],
        [-inf, -inf, -inf],
        [inf, 0.0, 1.0],
        [nan, 0.0, 1.0],
        [6e4, 6e4, -6e4],
        [-6e4, -6e4, -6e4],
    ]
    x = torch.tensor(rows, dtype=dtype, device=device)
    torch.testing.assert_close(F.softmax(x), torch.softmax(x, -1), equal_nan=True)


def test_adding_a_constant_changes_nothing(device):
    x = torch.arange(-8.0, 8.0, device=device).repeat(3, 1)
    assert torch.equal(F.softmax(x), F.softmax(x + 1024))
