"""Bad input: an error of the right type that names the op, the argument and the value; the same words under fake
tensors."""

import re

import pytest
import torch
from cases import normal
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_ext import functional as F


def x(*shape, dtype=torch.float32):
    return normal(*shape, dtype=dtype)


T, INT, COMPLEX = torch.tensor([1, 2, 3]), torch.int32, torch.complex64
TABLE = {"cos": x(1, 5, 8), "sin": x(1, 5, 8)}
Q, K = x(2, 3, 5, 8), x(2, 1, 5, 8)
FLCE = "fused_linear_cross_entropy"
LOSS = {"logits": x(3, 8), "target": T}
FUSED = {"x": x(3, 8), "weight": x(9, 8), "target": T}

# (name, op, arguments, parts that the text must have)
CASES = [
    ("weight_shape", "rms_norm", {"x": x(3, 8), "weight": x(7)}, ["weight", "(7)", "(8)"]),
    ("weight_dim", "rms_norm", {"x": x(3, 8), "weight": x(1, 8)}, ["weight", "(1, 8)", "(8)"]),
    ("integer_x", "rms_norm", {"x": x(3, 8).to(INT), "weight": x(8)}, ["x", "torch.int32", "float32"]),
    ("integer_weight", "rms_norm", {"x": x(3, 8), "weight": x(8).to(INT)}, ["weight", "torch.int32"]),
    ("scalar_x", "rms_norm", {"x": x()}, ["x", "dimensions"]),
    ("mode", "rms_norm", {"x": x(3, 8), "casting_mode": "lama"}, ["casting_mode", "lama", "llama"]),
    ("residual_shape", "add_rms_norm", {"x": x(3, 8), "residual": x(3, 7), "weight": x(8)}, ["residual", "(3, 7)"]),
    ("no_broadcast", "add_rms_norm", {"x": x(3, 8), "residual": x(1, 8), "weight": x(8)}, ["residual", "(1, 8)"]),
    ("weight_shape", "layer_norm", {"x": x(3, 8), "weight": x(7), "bias": None}, ["weight", "(7)", "(8)"]),
    ("bias_shape", "layer_norm", {"x": x(3, 8), "weight": x(8), "bias": x(9)}, ["bias", "(9)", "(8)"]),
    ("bias_dtype", "layer_norm", {"x": x(3, 8), "weight": x(8), "bias": x(8).to(COMPLEX)}, ["bias", "torch.complex64"]),
    ("shapes", "swiglu", {"gate": x(3, 8), "up": x(3, 7)}, ["up", "(3, 7)", "(3, 8)"]),
    ("dtypes", "swiglu", {"gate": x(3, 8), "up": x(3, 8, dtype=torch.bfloat16)}, ["up", "torch.bfloat16"]),
    ("integers", "geglu", {"gate": x(3, 8).to(INT), "up": x(3, 8).to(INT)}, ["gate", "torch.int32"]),
    ("approximate", "geglu", {"gate": x(3, 8), "up": x(3, 8), "approximate": "erf"}, ["approximate", "erf", "tanh"]),
    ("odd", "swiglu_packed", {"gate_up": x(3, 7)}, ["gate_up", "7", "even"]),
    ("q_dim", "rope", {"q": x(3, 5, 8), "k": K, **TABLE}, ["q", "(3, 5, 8)"]),
    ("k_seq", "rope", {"q": Q, "k": x(2, 1, 4, 8), **TABLE}, ["k", "(2, 1, 4, 8)"]),
    ("k_dtype", "rope", {"q": Q, "k": K.bfloat16(), **TABLE}, ["k", "torch.bfloat16"]),
    ("table_seq", "rope", {"q": Q, "k": K, "cos": x(1, 6, 8), "sin": x(1, 6, 8)}, ["cos", "(1, 6, 8)"]),
    ("table_batch", "rope", {"q": Q, "k": K, "cos": x(3, 5, 8), "sin": x(3, 5, 8)}, ["cos", "(3, 5, 8)"]),
    ("rotary_odd", "rope", {"q": Q, "k": K, "cos": x(1, 5, 7), "sin": x(1, 5, 7)}, ["cos", "7", "even"]),
    ("rotary_wide", "rope", {"q": Q, "k": K, "cos": x(1, 5, 10), "sin": x(1, 5, 10)}, ["cos", "10", "8"]),
    ("cos_sin", "rope", {"q": Q, "k": K, "cos": x(1, 5, 8), "sin": x(1, 5, 6)}, ["cos", "sin"]),
    ("table_dtype", "rope", {"q": Q, "k": K, "cos": Q[:1, 0].int(), "sin": Q[:1, 0].int()}, ["cos", "torch.int32"]),
    ("no_heads", "rope", {"q": Q[:, :0], "k": K[:, :0], "cos": Q[:1, 0].int(), "sin": Q[:1, 0].int()}, ["cos"]),
    ("unsqueeze", "rope", {"q": Q, "k": K, **TABLE, "unsqueeze_dim": 3}, ["unsqueeze_dim", "3"]),
    ("integers", "softmax", {"x": x(3, 8).to(INT)}, ["x", "torch.int32"]),
    ("scalar", "softmax", {"x": x()}, ["x", "dimensions"]),
    ("target_rows", "cross_entropy", {"logits": x(4, 8), "target": T}, ["target", "(3", "(4"]),
    ("target_dtype", "cross_entropy", {**LOSS, "target": T.to(INT)}, ["target", "torch.int32", "torch.int64"]),
    ("probabilities", "cross_entropy", {"logits": x(3, 8), "target": x(3, 8)}, ["target", "(3, 8)"]),
    ("no_classes", "cross_entropy", {"logits": x(3, 0), "target": T}, ["logits", "(3, 0)"]),
    ("class_weight", "cross_entropy", {**LOSS, "weight": x(7)}, ["weight", "(7)", "(8)"]),
    ("reduction", "cross_entropy", {**LOSS, "reduction": "avg"}, ["reduction", "avg", "mean"]),
    ("smoothing", "cross_entropy", {**LOSS, "label_smoothing": 1.5}, ["label_smoothing", "1.5"]),
    ("smoothing_negative", "cross_entropy", {**LOSS, "label_smoothing": -0.5}, ["label_smoothing", "-0.5"]),
    ("softcap", "cross_entropy", {**LOSS, "softcap": 0.0}, ["softcap", "0"]),
    ("logits_dtype", "cross_entropy", {"logits": x(3, 8).to(INT), "target": T}, ["logits", "torch.int32"]),
    ("hidden", FLCE, {"x": x(3, 8), "weight": x(9, 7), "target": T}, ["weight", "(9, 7)", "8"]),
    ("weight_dim", FLCE, {"x": x(3, 8), "weight": x(8), "target": T}, ["weight", "(8)"]),
    ("bias", FLCE, {**FUSED, "bias": x(8)}, ["bias", "(8)", "(9)"]),
    ("ce_weight", FLCE, {**FUSED, "ce_weight": x(8)}, ["ce_weight", "(8)", "(9)"]),
    ("target_rows", FLCE, {"x": x(4, 8), "weight": x(9, 8), "target": T}, ["target", "(3", "(4"]),
    ("target_dtype", FLCE, {**FUSED, "target": T.to(INT)}, ["target", "torch.int32"]),
    ("memory", FLCE, {**FUSED, "memory": "tiny"}, ["memory", "tiny", "auto"]),
    ("memory_zero", FLCE, {**FUSED, "memory": 0}, ["memory", "0"]),
    ("accum", FLCE, {**FUSED, "accum_dtype": torch.float16}, ["accum_dtype", "torch.float16"]),
    ("softcap", FLCE, {**FUSED, "softcap": -1.0}, ["softcap", "-1"]),
    ("infinite_softcap", FLCE, {**FUSED, "softcap": float("inf")}, ["softcap", "inf"]),
    ("tiny_softcap", "cross_entropy", {**LOSS, "softcap": 1e-300}, ["softcap", "1e-300"]),
    ("normalizer_of_none", FLCE, {**FUSED, "normalizer": 3, "reduction": "none"}, ["normalizer", "3", "none"]),
    ("normalizer_learned", FLCE, {**FUSED, "normalizer": x(1).requires_grad_()}, ["normalizer", "gradient", "detach"]),
    ("reduction", FLCE, {**FUSED, "reduction": "max"}, ["reduction", "max"]),
]  # fmt: skip
each_case = pytest.mark.parametrize(
    "op, arguments, parts", [c[1:] for c in CASES], ids=[f"{c[1]}-{c[0]}" for c in CASES]
)


def moved(arguments, move):
    return {k: move(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def error_of(op, arguments):
    with pytest.raises((ValueError, TypeError, IndexError)) as error:
        getattr(F, op)(**arguments)
    return error.type, str(error.value)


@each_case
def test_the_error_names_argument_and_value(device, op, arguments, parts):
    kind, text = error_of(op, moved(arguments, lambda t: t.to(device)))
    assert kind is ValueError
    for part in parts:
        assert re.search(rf"(?<![\w.]){re.escape(part)}", text), f"no {part!r} in: {text}"
    assert "/" not in text and ".cpp" not in text  # no file and line of ours


@each_case
def test_fake_tensors_say_the_same(device, op, arguments, parts):
    real = moved(arguments, lambda t: t.to(device))
    with FakeTensorMode() as mode:
        fake = moved(real, mode.from_tensor)
        found = error_of(op, fake)
    assert found == error_of(op, real)


ON_TWO_DEVICES = [
    ("rms_norm", {"x": x(3, 8), "weight": x(8)}, "weight"),
    ("add_rms_norm", {"x": x(3, 8), "residual": x(3, 8), "weight": None}, "residual"),
    ("layer_norm", {"x": x(3, 8), "weight": x(8), "bias": None}, "weight"),
    ("swiglu", {"gate": x(3, 8), "up": x(3, 8)}, "up"),
    ("rope", {"q": Q, "k": K, **TABLE}, "k"),
    ("cross_entropy", {"logits": x(3, 8), "target": T}, "target"),
    (FLCE, {"x": x(3, 8), "weight": x(9, 8), "target": T}, "weight"),
]


@pytest.mark.cuda
@pytest.mark.parametrize("op, arguments, argument", ON_TWO_DEVICES, ids=[c[0] for c in ON_TWO_DEVICES])
def test_tensors_on_two_devices(op, arguments, argument):
    made = {k: v if k == argument or not isinstance(v, torch.Tensor) else v.cuda() for k, v in arguments.items()}
    kind, text = error_of(op, made)
    assert kind is ValueError and argument in text and "device" in text


@pytest.mark.cuda
def test_float64_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="float64"):
        F.softmax(torch.zeros(3, dtype=torch.float64, device="cuda"))


def test_wrong_python_types():
    with pytest.raises((TypeError, RuntimeError), match="Tensor"):
        F.softmax("x")
    with pytest.raises((TypeError, RuntimeError), match="Tensor"):
        F.rms_norm([1.0, 2.0])


def test_normalizer_without_a_value(device):
    made = {name: t.to(device) for name, t in FUSED.items()}
    with pytest.raises(ValueError, match="normalizer is on meta"):
        F.fused_linear_cross_entropy(**made, normalizer=torch.ones(1, device="meta"))


def test_cos_and_sin_have_no_gradient(device):
    q, k = Q.to(device), K.to(device)
    with pytest.raises(RuntimeError, match="cos and sin"):
        F.rope(q.requires_grad_(), k, TABLE["cos"].to(device).clone().requires_grad_(), TABLE["sin"].to(device))


def test_class_weights_have_no_gradient(device):
    weight = torch.ones(8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="weight"):
        F.cross_entropy(x(3, 8).to(device).requires_grad_(), T.to(device), weight=weight).backward()


@pytest.mark.parametrize("change", ["rstd rows", "rstd dtype", "dy shape"])
def test_a_backward_op_checks_what_it_is_given(device, change):
    t, weight = x(3, 8).to(device), torch.ones(8, device=device)
    rstd = torch.ops.liger_ext.rms_norm(t, weight, 1e-6, 0.0, 0)[1]
    dy = t
    if change == "rstd rows":
        rstd = rstd[:2]
    elif change == "rstd dtype":
        rstd = rstd.half()
    else:
        dy = t[:2]
    with pytest.raises(ValueError, match=r"rstd|dy"):
        torch.ops.liger_ext.rms_norm_backward(dy, t, weight, rstd, 0.0, True, True)
