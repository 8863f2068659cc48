"""Tests of invalid arguments: the error has the right type and names the op, the argument and the value, with the same
text under fake tensors."""

import inspect
import re

import pytest
import torch
from cases import RecordCalls, normal
from ops import BAD, BY_NAME, DEFAULT_EXAMPLES
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_ext import functional as F

each_case = pytest.mark.parametrize(
    "op, arguments, parts", [(op, *case) for op, _, *case in BAD], ids=[f"{op}-{name}" for op, name, *_ in BAD]
)


def moved(arguments, move):
    return {k: move(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def raised_error(op, arguments):
    with pytest.raises((ValueError, TypeError, IndexError)) as error:
        getattr(F, op)(**arguments)
    return error.type, str(error.value)


@each_case
def test_the_error_names_argument_and_value(device, op, arguments, parts):
    kind, text = raised_error(op, moved(arguments, lambda t: t.to(device)))
    wrong_type = parts[0] is TypeError
    assert kind is (TypeError if wrong_type else ValueError)
    for part in (f"{op}:", *parts[wrong_type:]):
        assert re.search(rf"(?<![\w.]){re.escape(part)}", text), f"no {part!r} in: {text}"
    assert "/" not in text and ".cpp" not in text  # no source file and line


@each_case
def test_fake_tensors_say_the_same(device, op, arguments, parts):
    real = moved(arguments, lambda t: t.to(device))
    with FakeTensorMode() as mode:
        fake = moved(real, mode.from_tensor)
        found = raised_error(op, fake)
    assert found == raised_error(op, real)


@pytest.mark.cuda
@pytest.mark.parametrize("example", DEFAULT_EXAMPLES, ids=lambda example: example.op)
def test_tensors_on_two_devices(example):
    """The second tensor is on another device."""
    made = example.arguments("cuda", torch.float32)
    argument = [name for name, value in made.items() if isinstance(value, torch.Tensor)][1:2]
    if not argument:
        pytest.skip("takes one tensor")
    kind, text = raised_error(example.op, made | {name: made[name].cpu() for name in argument})
    assert kind is ValueError and argument[0] in text and "device" in text


@pytest.mark.cuda
def test_float64_on_a_gpu_is_refused():
    with pytest.raises(ValueError, match="float64"):
        F.softmax(torch.zeros(3, dtype=torch.float64, device="cuda"))


def test_wrong_python_types():
    with pytest.raises((TypeError, RuntimeError), match="Tensor"):
        F.softmax("x")
    with pytest.raises((TypeError, RuntimeError), match="Tensor"):
        F.rms_norm([1.0, 2.0])


@pytest.mark.parametrize("example", DEFAULT_EXAMPLES, ids=lambda example: example.op)
def test_none_in_place_of_every_tensor(device, example):
    made = example.arguments(device, torch.float32)
    first = next(name for name, value in made.items() if isinstance(value, torch.Tensor))
    kind, text = raised_error(example.op, {k: None if isinstance(v, torch.Tensor) else v for k, v in made.items()})
    assert kind in (ValueError, TypeError) and text.startswith(f"{example.op}: {first} ") and "None" in text


def test_normalizer_without_a_value(device):
    made = BY_NAME["fused_linear_cross_entropy"].arguments(device, torch.float32)
    with pytest.raises(ValueError, match="normalizer is on meta"):
        F.fused_linear_cross_entropy(**made, normalizer=torch.ones(1, device="meta"))


@pytest.mark.parametrize(
    "name, constant",
    [
        ("rope", "cos"),
        ("rope", "sin"),
        ("jsd", "log_p"),
        ("cross_entropy_options", "weight"),
        ("fused_linear_cross_entropy_options", "ce_weight"),
    ],
)
def test_constants_of_an_op_have_no_gradient(device, name, constant):
    """Also if the dispatcher calls the op. tests/test_learned_arguments.py tests the public functions."""
    example = BY_NAME[name]
    with RecordCalls() as record:
        example(moved(example.arguments(device, torch.float32), torch.Tensor.detach))
    op, args = record.calls[0]
    names = [argument.name for argument in op._schema.arguments]
    args = [t.clone().requires_grad_() if n == constant else t for n, t in zip(names, args, strict=True)]
    with pytest.raises(ValueError, match=f"{example.op}: {constant} requires a gradient"):
        op(*args)


def schema_options(example, arguments):
    """Returns (op, name) of the non-tensor arguments that both the op's schema and the public function have."""
    with RecordCalls() as record:
        example(arguments)
    schema, public = record.calls[0][0]._schema, inspect.signature(getattr(F, example.op)).parameters
    return {(schema.name, a.name) for a in schema.arguments if "Tensor" not in str(a.type) and a.name in public}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("learned", ["option", "all"])
@pytest.mark.parametrize("example", DEFAULT_EXAMPLES, ids=lambda example: example.op)
def test_options_have_no_gradient(device, example, learned, autocast):
    """A tensor that requires a gradient is rejected as an option: the dispatcher would convert it to a number and lose
    the gradient."""
    made = example.arguments(device, torch.float32)
    if learned == "option":
        made = moved(made, torch.Tensor.detach)
    for _, option in schema_options(example, made):
        with (
            torch.autocast(device.type, enabled=autocast),
            pytest.raises((TypeError, ValueError), match=rf"\b{option}\b"),
        ):
            example(made | {option: torch.ones((), device=device, requires_grad=True)})


def test_the_last_test_meets_every_number_of_a_schema():
    met = {
        found
        for example in DEFAULT_EXAMPLES
        for found in schema_options(example, example.arguments("cpu", torch.float32))
    }
    schemas = {getattr(torch.ops.liger_ext, op.removeprefix("liger_ext::")).default._schema for op, _ in met}
    numbers = {(schema.name, a.name) for schema in schemas for a in schema.arguments if "float" in str(a.type)}
    elsewhere = {("liger_ext::fused_linear_cross_entropy", "logit_scale")}  # test_linear_log_probs.py
    assert numbers and numbers <= met | elsewhere


@pytest.mark.parametrize("change", ["rstd rows", "rstd dtype", "dy shape"])
def test_a_backward_op_checks_what_it_is_given(device, change):
    t, weight = normal(3, 8).to(device), torch.ones(8, device=device)
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
