"""GroupNorm, against a float64 reference (the accuracy rule of liger_ext/rule.py), and its edge cases."""

import pytest
import torch
from cases import draw_leaf, draw_parameter, host_target, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import LigerGroupNorm, liger_group_norm
from liger_ext import functional as F
from liger_ext.testing import judge


def inputs(
    shape, num_groups, dtype=torch.float32, device="cpu", parameters=("weight", "bias"), parameter_dtype=None, seed=0
):
    x = normal(*shape, dtype=dtype, device=device, seed=seed, mean=2).requires_grad_()
    made = {"x": x, "num_groups": num_groups, "weight": None, "bias": None}
    for i, name in enumerate(parameters):
        of = {"dtype": parameter_dtype or dtype, "device": device, "seed": seed + 5 + i}
        made[name] = normal(shape[1], mean=1 - i, scale=0.5, **of).requires_grad_()
    return made


@settings(max_examples=80)
@given(data=st.data())
def test_group_norm(device, data):
    groups, channels = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    elements = data.draw(
        st.sampled_from([(), (1,), (2,), (3,), (8,), (13,), (64,), (130,), (7, 7), (2, 4, 4), (8, 16)])
    )
    batch, mean = data.draw(st.integers(0, 5)), data.draw(st.sampled_from([0, 0.5, 3]))
    made = {"x": draw_leaf(data, device, batch, groups * channels, *elements, mean=mean), "num_groups": groups}
    made |= {n: draw_parameter(data, device, groups * channels, mean=i) for i, n in enumerate(("bias", "weight"))}
    judge("group_norm", made | {"eps": data.draw(st.sampled_from([1e-6, 1e-5, 1e-2]))})


# Few and many elements per channel; few long groups, many short ones; one group, and as many groups as channels.
SHAPES = [
    ((2, 64, 56, 56), 32),
    ((2, 320, 32, 32), 32),
    ((3, 64, 7, 7), 8),
    ((300, 32), 4),
    ((2, 5000), 1),
    ((700, 24, 3), 24),
    ((2, 6, 33_001), 2),
    ((1, 3, 250_000), 1),
    ((1, 2, 700_000), 2),
    ((2, 40_000, 5), 1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "num_groups"), SHAPES, ids=[f"{'x'.join(map(str, s))} in {g}" for s, g in SHAPES])
def test_many_sizes(device, dtype, shape, num_groups):
    if host_target() and torch.Size(shape).numel() > 200_000:
        pytest.skip("slow on the host target, whose cases are those of kernel_cases.py")
    judge("group_norm", inputs(shape, num_groups, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_any_dtype(device, dtype, parameters):
    judge("group_norm", inputs((3, 8, 20), 2, dtype, device, parameter_dtype=parameters))


@pytest.mark.parametrize("elements", [500, 60_000])
def test_a_large_mean_does_not_cost_the_variance(device, elements):
    """E[x^2] - E[x]^2 in fp32, upstream's formula, would have no correct digit here."""
    made = inputs((2, 4, elements), 2, device=device)
    made["x"] = (made["x"].detach() + 1e4).requires_grad_()
    judge("group_norm", made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("elements", [256, 20_000])
def test_the_first_element_may_be_far_from_all_others(device, elements, dtype):
    """The kernel subtracts a group's first element before it sums."""
    x = normal(4, 2, elements, dtype=dtype, device=device, scale=0.01)
    x[:, 0, 0] = torch.tensor([100.0, -100.0, 1.0, 0.0])
    judge("group_norm", {"x": x.requires_grad_(), "num_groups": 1, "weight": None, "bias": None})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_constant_group_gives_the_bias(device, dtype):
    x, bias = torch.full((3, 6, 16), 7.0, device=device, dtype=dtype), normal(6, dtype=dtype, device=device)
    assert torch.equal(F.group_norm(x, 3, torch.ones_like(bias), bias), bias[:, None].expand(3, 6, 16))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group(device, value):
    x = normal(3, 6, 20, device=device)
    x[1, 2, 7] = value
    mine, theirs = F.group_norm(x, 3), torch.nn.functional.group_norm(x, 3, eps=1e-6)
    torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert mine[1, 2:4].isnan().all() and mine[1, :2].isfinite().all() and mine[0].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 6, 5), (3, 6, 0), (0, 6), (2, 6, 0, 4)])
def test_nothing_to_normalise(device, shape):
    made = inputs(shape, 3, device=device)
    y = F.group_norm(**made)
    assert y.shape == shape
    grads = torch.autograd.grad(y.sum(), [made["x"], made["weight"], made["bias"]])
    assert all(not g.any() for g in grads) and [g.shape for g in grads] == [shape, (6,), (6,)]


def test_channels_last(device):
    """Input and gradient have the strides of images whose channels are innermost."""
    made = inputs((2, 8, 6, 5), 4, device=device)
    x = made["x"].detach().to(memory_format=torch.channels_last).requires_grad_()
    y, expected = F.group_norm(**{**made, "x": x}), F.group_norm(**made)
    assert torch.equal(y, expected) and y.is_contiguous()
    dy = normal(2, 8, 6, 5, device=device).to(memory_format=torch.channels_last)
    ours = torch.autograd.grad(y, [x, made["weight"]], dy)
    theirs = torch.autograd.grad(expected, [made["x"], made["weight"]], dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_gradient_of_another_dtype_is_refused(device):
    x = normal(3, 6, 5, device=device)
    _, mean, rstd = torch.ops.liger_ext.group_norm(x, None, None, 2, 1e-6)
    with pytest.raises(ValueError, match=r"dy has dtype torch\.bfloat16, expected that of x, torch\.float32"):
        torch.ops.liger_ext.group_norm_backward(x.bfloat16(), x, None, mean, rstd, None, 2, True, False, False)
    with pytest.raises(ValueError, match=r"rstd has shape \(2, 2\), expected \(3, 2\)"):
        torch.ops.liger_ext.group_norm_backward(x, x, None, mean, rstd[:2], None, 2, True, False, False)


def test_the_module(device):
    module, x = LigerGroupNorm(6, 3).to(device), normal(2, 6, 5, device=device)
    assert torch.equal(liger_group_norm(x, None, None, 6, 3, 1e-6), F.group_norm(x, 3))
    assert torch.equal(module(x), F.group_norm(x, 3, module.weight, module.bias, 1e-6))
    assert {name: p.shape for name, p in module.named_parameters()} == {"weight": (6,), "bias": (6,)}
    with pytest.raises(ValueError, match="num_groups is 4, expected a divisor of the 6 channels"):
        LigerGroupNorm(6, 4)
    with pytest.raises(ValueError, match=r"weight has shape \(6\)"):
        module(normal(2, 9, 5, device=device))
