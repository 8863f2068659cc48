"""SwiGLU and GeGLU, with gate and up as two tensors or packed in one, against a float64 reference (the accuracy rule of
liger_ext/rule.py)."""

import inspect

import pytest
import torch
from cases import LOW, device_dtypes, draw_leaf, draw_tensor, hidden_sizes, laid_out, leading_shapes, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Guarded, contiguous, draw_layout, same_bits, shares_memory
from ops.glu import ACTIVATIONS, check_h
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

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
    dtype = data.draw(st.sampled_from(device_dtypes(device)))
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
    """Far from zero the activation is 0 or equals the gate; no intermediate may overflow. inf and NaN propagate as in
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


# h in the backward: recomputes the forward's output, for a caller that has not saved it ------------------------------

each_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
glu_backward = torch.ops.liger_ext.glu_backward.default
glu_backward_with_h_ = torch.ops.liger_ext.glu_backward_with_h_.default


@settings(max_examples=100)
@given(data=st.data())
def test_h_of_the_backward(device, data):
    """Every shape, dtype and layout. dgate and dup are bit-identical to those of the backward without h."""
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    dtype = data.draw(st.sampled_from(device_dtypes(device)))
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
    """In whole vectors and in single elements, which use different kernels."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(8, -1)
    gate = laid_out(gate[gate.isfinite()].view(8, -1), layout)
    up, dh = (normal(*gate.shape, dtype=dtype, seed=seed) for seed in (1, 2))
    check_h(*(t.to(device) for t in (dh, gate, up)), activation, 1.7, 0.3)


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_h_is_written_over_dh_alone(device, rng, data):
    """gate and up have any layout; dh is contiguous, at any address."""
    shape = (*data.draw(leading_shapes), data.draw(hidden_sizes))
    dtype = data.draw(st.sampled_from(device_dtypes(device)))
    guard = Guarded()
    dh, gate, up = (normal(*shape, dtype=dtype, device=device, seed=seed) for seed in range(3))
    gate, up = (guard.place("", t, draw_layout(rng, shape)) for t in (gate, up))
    placed = guard.place("dh", dh, contiguous(shape, data.draw(st.sampled_from([0, 0, 1, 3]))))
    gradients = glu_backward_with_h_(placed, gate, up, 0, 1.0, 1.0)
    assert not shares_memory(gradients, (placed, gate, up))
    assert same_bits(placed, torch.ops.liger_ext.glu(gate, up, 0, 1.0, 1.0))
    placed.copy_(dh)
    assert guard.changed() == []


@each_activation
@pytest.mark.parametrize("op", [glu_backward, glu_backward_with_h_])
def test_opcheck_of_the_backward(device, op, activation):
    dh, gate, up = (normal(3, 33, device=device, seed=i) for i in range(3))
    torch.library.opcheck(op, (dh, gate.t().contiguous().t(), up, activation, 1.7, 0.3))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_backward_with_h(device, backend):
    def three(dh, gate, up):
        h = dh * 2
        dgate, dup = glu_backward_with_h_(h, gate, up, 0, 1.0, 1.0)
        again, _ = glu_backward_with_h_(dh, gate, up, 0, 1.0, 1.0)
        return dgate * 2, dup * 2, h * 2, again

    eager, compiled = ([normal(3, 33, device=device, seed=i) for i in range(3)] for _ in range(2))
    expected = three(*eager)
    found = torch.compile(three, fullgraph=True, backend=backend)(*compiled)
    assert all(torch.equal(a, b) for a, b in zip((*found, *compiled), (*expected, *eager), strict=True))


BAD = [
    (lambda dh, gate, up: (dh[:, 1:], gate, up, 0), "dh has shape"),
    (lambda dh, gate, up: (dh, gate, up[1:], 0), "up has shape"),
    (lambda dh, gate, up: (dh.bfloat16(), gate, up, 0), "dh has dtype"),
    (lambda dh, gate, up: (dh.to("meta"), gate, up, 0), "dh is on another device"),
    (lambda dh, gate, up: (None, gate, up, 0), "dh is None"),
    (lambda dh, gate, up: (dh, gate.int(), up.int(), 0), "gate has dtype"),
    (lambda dh, gate, up: (dh, gate, up, 3), "activation is 3"),
]
NOT_CONTIGUOUS = [
    (lambda dh, gate, up: (dh[:1].expand(3, 8), gate, up, 0), "dh is not contiguous"),
    (lambda dh, gate, up: (dh.t().contiguous().t(), gate, up, 0), "dh is not contiguous"),
    (lambda dh, gate, up: (dh[:, :4], gate[:, :4], up[:, :4], 0), "dh is not contiguous"),
]
SHARED = [
    (lambda dh, gate, up: (gate, gate, up, 0), "dh shares memory with gate"),
    (lambda dh, gate, up: (up, gate, up, 0), "dh shares memory with up"),
    (lambda dh, gate, up: (dh[1:], gate[1:], dh[:2], 0), "dh shares memory with up"),
    (lambda dh, gate, up: (dh, dh[2:].expand(3, 8), up, 0), "dh shares memory with gate"),
]


@pytest.mark.parametrize(
    "op, spoil, words",
    [(glu_backward, *bad) for bad in BAD] + [(glu_backward_with_h_, *bad) for bad in BAD + NOT_CONTIGUOUS + SHARED],
)
def test_bad_arguments_of_the_backward(device, op, spoil, words):
    expected = f"{op.__name__.removesuffix('.default')}: {words}"
    tensors = [normal(3, 8, device=device, seed=i) for i in range(3)]
    arguments = spoil(*(copies := [t.clone() for t in tensors]))
    with pytest.raises(ValueError, match=expected):
        op(*arguments, 1.0, 1.0)
    assert all(map(torch.equal, copies, tensors))
    if "shares memory" not in words:  # fake tensors have none
        with FakeTensorMode() as mode, pytest.raises(ValueError, match=expected):
            op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments), 1.0, 1.0)


def test_neighbours_in_memory_are_apart(device):
    expected, (gate, dh, up) = (normal(3, 2, 8, device=device) for _ in range(2))
    glu_backward_with_h_(dh, gate, up, 0, 1.0, 1.0)
    assert torch.equal(dh, torch.ops.liger_ext.glu(expected[0], expected[2], 0, 1.0, 1.0))
    assert torch.equal(gate, expected[0]) and torch.equal(up, expected[2])


@pytest.mark.parametrize("name", ["dh", "gate", "up"])
def test_the_backward_with_h_has_no_derivative(device, name):
    arguments = {n: normal(3, 8, device=device, seed=i) for i, n in enumerate(("dh", "gate", "up"))}
    kept = arguments["dh"].clone()
    leaf = arguments | {name: arguments[name].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match=f"glu_backward_with_h_ has no derivative: {name} requires a gradient"):
        glu_backward_with_h_(*leaf.values(), 0, 1.0, 1.0)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        dual = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        glu_backward_with_h_(*(arguments | {name: dual}).values(), 0, 1.0, 1.0)
    assert torch.equal(arguments["dh"], kept)
    with torch.no_grad():
        glu_backward_with_h_(*leaf.values(), 0, 1.0, 1.0)


def test_who_has_saved_dh_is_told(device):
    x, gate, up = (normal(3, 8, device=device, seed=i) for i in range(3))
    dh = x.requires_grad_() * 1
    y = dh.sin()
    with torch.no_grad():
        glu_backward_with_h_(dh, gate, up, 0, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
