"""Promises about autograd that hold for every op: gradcheck in float64, a second backward, refused second derivatives,
unchanged inputs."""

import copy
import itertools

import pytest
import torch
from cases import differentiable_outputs, gradients, grads_for, recorded, tensor_leaves, threads
from gpu_paths import arguments as arguments_of
from ops import BY_NAME, DEFAULT_EXAMPLES, EXAMPLES, IDS

from liger_ext.records import RECORDS

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
each_op = pytest.mark.parametrize("example", DEFAULT_EXAMPLES, ids=[e.op for e in DEFAULT_EXAMPLES])


@each_example
def test_gradcheck(example):
    arguments = example.arguments("cpu", torch.float64)
    names = [k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad]

    def function(*leaves):
        return tuple(differentiable_outputs(example({**arguments, **dict(zip(names, leaves, strict=True))})))

    with threads(1):
        assert torch.autograd.gradcheck(function, tensor_leaves(arguments))


@each_example
def test_a_second_backward_gives_the_same_gradients(device, example):
    arguments = example.arguments(device, torch.float32)
    outputs = differentiable_outputs(example(arguments))
    grads = grads_for(outputs)
    first = torch.autograd.grad(outputs, tensor_leaves(arguments), grads, retain_graph=True)
    first = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, tensor_leaves(arguments), grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_example
def test_saved_tensors_may_be_offloaded(device, example):
    """Hooks that offload saved tensors return copies: equal values, but new strides."""
    arguments = example.arguments(device, torch.float32)
    expected = gradients(example, arguments)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    ):
        found = gradients(example, arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each_example
def test_tensors_made_under_inference_mode(device, example):
    """Autograd does not save inference tensors, but a frozen argument may be one."""
    arguments = example.arguments(device, torch.float32)
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        frozen = arguments | {name: value.detach()}
        if not tensor_leaves(frozen):
            continue
        with torch.inference_mode():
            inference = value.detach().clone()
        assert inference.is_inference()
        found, expected = gradients(example, arguments | {name: inference}), gradients(example, frozen)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name


@each_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_written(device, example, dtype):
    arguments = example.arguments(device, dtype)
    before = {k: v.detach().clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    outputs = differentiable_outputs(example(arguments))
    grads = grads_for(outputs)
    given = copy.deepcopy(grads)
    found = torch.autograd.grad(outputs, tensor_leaves(arguments), grads)
    assert all(torch.equal(arguments[k], v) for k, v in before.items())
    assert all(torch.equal(a, b) for a, b in zip(given, grads, strict=True))
    inputs = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    fresh = [*outputs, *found]
    assert not {t.untyped_storage().data_ptr() for t in fresh if t.numel()} & {
        t.untyped_storage().data_ptr() for t in [*inputs, *grads]
    }


@each_op
def test_a_double_backward_is_refused(device, example):
    """Without the refusal, second derivatives with respect to the inputs and to the upstream gradient would be silently
    wrong."""
    arguments = example.arguments(device, torch.float32)
    outputs = differentiable_outputs(example(arguments))
    grads = [g.requires_grad_() for g in grads_for(outputs)]
    first = torch.autograd.grad(outputs, tensor_leaves(arguments), grads, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative"):
        torch.autograd.grad(
            sum(g.square().sum() for g in first), [*tensor_leaves(arguments), *grads], allow_unused=True
        )


@each_op
def test_torch_func_is_refused(device, example):
    arguments = example.arguments(device, torch.float32)
    name = next(k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad)
    constants = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}

    def function(leaf):
        return sum(t.sum() for t in differentiable_outputs(example({**constants, name: leaf})))

    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(function)(constants[name])
    with pytest.raises(
        RuntimeError, match=r"a loop, or, if the op takes any shape \(\.\.\., n\) and processes each row separately"
    ):
        torch.func.vmap(function)(constants[name][None])


@each_op
def test_no_graph_without_grad(device, example):
    with torch.no_grad():
        assert not differentiable_outputs(example(example.arguments(device, torch.float32)))
    with torch.inference_mode():
        example(example.arguments(device, torch.float32))


@each_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_input_gives_the_same_bits(device, example, dtype):
    arguments = example.arguments(device, dtype)
    first = gradients(example, arguments)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(example, arguments), strict=True))


@pytest.mark.parametrize("op", [op for op, record in RECORDS.items() if not record.llama.hidden])
def test_results_do_not_depend_on_the_number_of_threads(op):
    """Sums over rows are split by the shape alone. The fused loss is left out: its matmuls are a library's."""
    made, results = arguments_of(op, 1003, 130, torch.float32, "cpu"), []
    for number in (1, 2, 3):
        with threads(number):
            outputs = differentiable_outputs(RECORDS[op].run(**made))
            results.append([*outputs, *torch.autograd.grad(outputs, tensor_leaves(made), grads_for(outputs))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm", "group_norm"])
def test_what_is_not_wanted_is_not_computed(device, op):
    """Calls a backward op with every combination of its `need_...` flags."""
    backward, given = recorded(BY_NAME[op], device)[-1]
    named = dict(zip((argument.name for argument in backward._schema.arguments), given, strict=True))
    flags, all_of_them = [name for name in named if name.startswith("need_")], backward(*given)
    assert len(flags) == len(all_of_them) and all(named[flag] for flag in flags)
    for wanted in itertools.product([False, True], repeat=len(flags)):
        found = backward(*(named | dict(zip(flags, wanted, strict=True))).values())
        for gradient, full, want in zip(found, all_of_them, wanted, strict=True):
            assert want or gradient.numel() == 0
            torch.testing.assert_close(gradient, full if want else torch.empty_like(gradient))
