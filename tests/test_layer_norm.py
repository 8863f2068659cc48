"""LayerNorm, against a float64 reference (the accuracy rule of liger_ext/rule.py), and its edge cases."""

import pytest
import torch
from cases import draw_leaf, draw_parameter, hidden_sizes, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import functional as F
from liger_ext.testing import judge


@settings(max_examples=80)
@given(data=st.data())
def test_layer_norm(device, data):
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    mean = data.draw(st.sampled_from([0, 0.5, 3]))
    made = {"x": draw_leaf(data, device, *shape, mean=mean, all_sizes=True)}
    made |= {n: draw_parameter(data, device, shape[-1], mean=i) for i, n in enumerate(("bias", "weight"))}
    judge("layer_norm", made | {"eps": data.draw(st.sampled_from([1e-6, 1e-5, 1e-2]))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(3, 8192), (2, 65_537), (3, 70_001), (1500, 96), (700, 2), (140, 40_960), (150, 65_536)]
)
def test_wide_and_long(device, dtype, shape):
    if device.type == "cpu" and shape[1] > 10_000:  # many rows matter on a GPU only
        shape = (min(shape[0], 33), shape[1])
    parameters = {
        name: normal(shape[-1], dtype=dtype, device=device, seed=i).requires_grad_()
        for i, name in enumerate(("weight", "bias"))
    }
    judge("layer_norm", {"x": normal(*shape, dtype=dtype, device=device, seed=3).requires_grad_(), **parameters})


def test_a_large_mean_does_not_cost_the_variance(device):
    """E[x^2] - E[x]^2 in fp32 would have no correct digit here."""
    x = (normal(4, 512, device=device) + 1e4).requires_grad_()
    judge("layer_norm", {"x": x, "weight": None, "bias": None})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cols", [576, 4096, 32_768, 65_536])
def test_the_first_columns_may_be_far_from_all_others(device, cols, dtype):
    """The kernel subtracts the mean of a 16-bit row's first eight columns before it sums."""
    x = normal(9, cols, dtype=dtype, device=device, scale=0.01)
    for row in range(1, 9):
        x[row, :row] = 100 * (-1) ** row
    judge("layer_norm", {"x": x.requires_grad_(), "weight": None, "bias": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_constant_row_gives_the_bias(device, dtype):
    x, bias = torch.full((3, 64), 7.0, device=device, dtype=dtype), normal(64, dtype=dtype, device=device)
    assert torch.equal(F.layer_norm(x, torch.ones_like(bias), bias), bias.expand(3, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [3, 20])
def test_what_is_not_finite_stays_in_its_row(device, value, column, dtype):
    x, weight, bias = normal(4, 40, device=device), torch.ones(40, device=device), torch.zeros(40, device=device)
    x[2, column] = value
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    mine, theirs = F.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(x, (40,), weight, bias, 1e-6)
    torch.testing.assert_close(mine, theirs, equal_nan=True)
