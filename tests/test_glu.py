"""SwiGLU and GeGLU, of two tensors and packed, under the one rule."""

import inspect

import pytest
import torch
from cases import draw_leaf, draw_tensor, dtypes_of, hidden_sizes, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import functional as F
from liger_ext.testing import judge


def options(data, op):
    if "approximate" in inspect.signature(getattr(F, op)).parameters:
        return {"approximate": data.draw(st.sampled_from(["tanh", "none"]))}
    factors = st.sampled_from([1.0, 0.5, 1.7])
    return {"gate_multiplier": data.draw(factors), "down_multiplier": data.draw(factors)}


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
@settings(max_examples=80)
@given(data=st.data())
def test_two_tensors(device, op, data):
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    dtype = data.draw(st.sampled_from(dtypes_of(device)))
    made = {name: draw_leaf(data, device, *shape, dtype=dtype, scale=2) for name in ("gate", "up")}
    judge(op, made | options(data, op))


@pytest.mark.parametrize("op", ["swiglu_packed", "geglu_packed"])
@settings(max_examples=60)
@given(data=st.data())
def test_packed(device, op, data):
    shape = (*data.draw(leading_shapes), 2 * data.draw(hidden_sizes))
    gate_up = draw_tensor(data, device, *shape, scale=2).requires_grad_()
    judge(op, {"gate_up": gate_up} | options(data, op))


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
def test_packed_equals_two_tensors(device, op):
    """Bit for bit: the same kernel with other strides."""
    gate_up = normal(6, 2 * 77, dtype=torch.bfloat16, device=device).requires_grad_()
    packed = getattr(F, op + "_packed")(gate_up)
    two = getattr(F, op)(*gate_up.chunk(2, -1))
    assert torch.equal(packed, two)
    dh = normal(*two.shape, dtype=two.dtype, device=device, seed=1)
    assert torch.equal(*(torch.autograd.grad(h, gate_up, dh)[0] for h in (packed, two)))


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
@pytest.mark.parametrize("shape", [(9001, 1), (1501, 7), (3, 4095)])
def test_many_short_rows(device, op, shape):
    judge(op, {name: normal(*shape, device=device, seed=i).requires_grad_() for i, name in enumerate(("gate", "up"))})


@pytest.mark.parametrize("op", ["swiglu", "geglu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide(device, op, dtype):
    gate, up = (normal(2, 70_001, dtype=dtype, device=device, seed=i).requires_grad_() for i in range(2))
    judge(op, {"gate": gate, "up": up})


@pytest.mark.parametrize("op, approximate", [("swiglu", None), ("geglu", "tanh"), ("geglu", "none")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturated_and_special_gates(device, op, approximate, dtype):
    """Far from zero the activation is 0 or the gate itself; no intermediate may overflow. inf and NaN pass as in
    PyTorch."""
    extra = {} if approximate is None else {"approximate": approximate}
    values = [0.0, -0.0, 1e-6, -1e-6, 3.0, -3.0, 10.0, -10.0, 50.0, -50.0, 90.0, -90.0, 1e4, -1e4, 6e4, -6e4]
    gate = torch.tensor([values], dtype=dtype, device=device).requires_grad_()
    judge(op, {"gate": gate, "up": torch.full_like(gate, 0.5).requires_grad_(), **extra}, grad=1.0)

    special = torch.tensor([[float("nan"), float("inf"), float("-inf")]], dtype=dtype, device=device)
    one = torch.ones_like(special)
    wide = special.double().cpu()  # torch's own fp32 gelu on a CPU gives NaN for inf
    act = torch.nn.functional.silu(wide) if op == "swiglu" else torch.nn.functional.gelu(wide, approximate=approximate)
    torch.testing.assert_close(getattr(F, op)(special, one, **extra), act.to(special), equal_nan=True)
