"""SwiGLU and GeGLU, of two tensors and packed, under the one rule."""

import inspect

import pytest
import torch
from cases import LOW, draw_leaf, draw_tensor, dtypes_of, hidden_sizes, laid_out, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.glu import ACTIVATIONS, check_h

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


# The backward's h: what the forward returns, for a caller that has not kept it --------------------------------------

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
glu_backward = torch.ops.liger_ext.glu_backward.default


@settings(max_examples=100)
@given(data=st.data())
def test_h_of_the_backward(device, data):
    """Every shape, dtype and layout. dgate and dup keep their bits."""
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    dtype = data.draw(st.sampled_from(dtypes_of(device)))
    tensors = [draw_tensor(data, device, *shape, dtype=dtype, scale=2) for _ in range(3)]
    factors = st.sampled_from([1.0, 0.7, -1.3])
    check_h(*tensors, data.draw(st.sampled_from([*ACTIVATIONS.values()])), data.draw(factors), data.draw(factors))


@each_activation
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("shape", [(9001, 1), (1501, 7), (3, 4095), (2, 70_001)])
def test_h_of_many_elements(device, activation, dtype, shape):
    check_h(*(normal(*shape, dtype=dtype, device=device, seed=i, scale=3) for i in range(3)), activation, 1.7, 0.3)


@each_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_h_of_every_16_bit_gate(device, activation, dtype, layout):
    """In whole vectors and in single elements, which other kernels take."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(8, -1)
    gate = laid_out(gate[gate.isfinite()].view(8, -1), layout)
    up, dh = (normal(*gate.shape, dtype=dtype, seed=seed) for seed in (1, 2))
    check_h(*(t.to(device) for t in (dh, gate, up)), activation, 1.7, 0.3)


@pytest.mark.parametrize("need_h", [False, True])
def test_opcheck_of_the_backward_with_h(device, need_h):
    dh, gate, up = (normal(3, 33, device=device, seed=i) for i in range(3))
    torch.library.opcheck(glu_backward, (dh, gate.t().contiguous().t(), up, 0, 1.0, 1.0, need_h))


def test_compiled_backward_with_h(device):
    def three(dh, gate, up):
        dgate, dup, h = glu_backward(dh, gate, up, 0, 1.0, 1.0, True)
        return dgate * 2, dup * 2, h * 2

    tensors = [normal(3, 33, device=device, seed=i) for i in range(3)]
    found = torch.compile(three, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, three(*tensors), strict=True))


@pytest.mark.parametrize("need_h", [False, True])
@pytest.mark.parametrize("spoil, words", [
    (lambda dh, gate, up: (dh[:, 1:], gate, up, 0), "dh has shape"),
    (lambda dh, gate, up: (dh, gate, up[1:], 0), "up has shape"),
    (lambda dh, gate, up: (dh.bfloat16(), gate, up, 0), "dh"),
    (lambda dh, gate, up: (dh, gate.int(), up.int(), 0), "gate"),
    (lambda dh, gate, up: (dh, gate, up, 3), "activation is 3"),
])  # fmt: skip
def test_bad_arguments_of_the_backward(device, need_h, spoil, words):
    arguments = spoil(*(normal(3, 8, device=device, seed=i) for i in range(3)))
    with pytest.raises(ValueError, match=f"glu_backward: {words}"):
        glu_backward(*arguments, 1.0, 1.0, need_h)
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match=f"glu_backward: {words}"):
        fake = (mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments)
        glu_backward(*fake, 1.0, 1.0, need_h)
