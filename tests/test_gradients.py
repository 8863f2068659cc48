"""Autograd promises, the same for every op: gradcheck in float64, a second backward, refused second derivatives,
untouched inputs."""

import copy

import pytest
import torch
from cases import gradients, leaves_of, losses_of, normal
from ops import EXAMPLES, IDS, ONE_OF_EACH

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
each_op = pytest.mark.parametrize("example", ONE_OF_EACH, ids=[e.op for e in ONE_OF_EACH])


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@each_example
def test_gradcheck(example, one_thread):
    arguments = example.arguments("cpu", torch.float64)
    names = [k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad]

    def function(*leaves):
        return tuple(losses_of(example({**arguments, **dict(zip(names, leaves, strict=True))})))

    assert torch.autograd.gradcheck(function, leaves_of(arguments))


@each_example
def test_a_second_backward_gives_the_same_gradients(device, example):
    arguments = example.arguments(device, torch.float32)
    outputs = losses_of(example(arguments))
    grads = [normal(*t.shape, dtype=t.dtype, device=device, seed=i) for i, t in enumerate(outputs)]
    first = torch.autograd.grad(outputs, leaves_of(arguments), grads, retain_graph=True)
    first = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves_of(arguments), grads)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_example
def test_saved_tensors_may_be_offloaded(device, example):
    """Hooks that keep saved tensors elsewhere give back copies: equal values, strides of their own."""
    arguments = example.arguments(device, torch.float32)
    expected = gradients(example, arguments)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t
    ):
        found = gradients(example, arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@each_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_never_written(device, example, dtype):
    arguments = example.arguments(device, dtype)
    before = {k: v.detach().clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    outputs = losses_of(example(arguments))
    grads = [normal(*t.shape, dtype=t.dtype, device=device, seed=i) for i, t in enumerate(outputs)]
    given = copy.deepcopy(grads)
    found = torch.autograd.grad(outputs, leaves_of(arguments), grads)
    assert all(torch.equal(arguments[k], v) for k, v in before.items())
    assert all(torch.equal(a, b) for a, b in zip(given, grads, strict=True))
    inputs = [v for v in arguments.values() if isinstance(v, torch.Tensor)]
    fresh = [*outputs, *found]
    assert not {t.untyped_storage().data_ptr() for t in fresh if t.numel()} & {
        t.untyped_storage().data_ptr() for t in [*inputs, *grads]
    }


@each_op
def test_a_double_backward_is_refused(device, example):
    """Silently wrong without the refusal: gradients of gradients, with respect to the inputs and to what came in."""
    arguments = example.arguments(device, torch.float32)
    outputs = losses_of(example(arguments))
    grads = [normal(*t.shape, device=device, seed=i).requires_grad_() for i, t in enumerate(outputs)]
    first = torch.autograd.grad(outputs, leaves_of(arguments), grads, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative"):
        torch.autograd.grad(sum(g.square().sum() for g in first), [*leaves_of(arguments), *grads], allow_unused=True)


@each_op
def test_torch_func_is_refused(device, example):
    arguments = example.arguments(device, torch.float32)
    name = next(k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad)
    constants = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}

    def function(leaf):
        return sum(t.sum() for t in losses_of(example({**constants, name: leaf})))

    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.grad(function)(constants[name])
    with pytest.raises(
        RuntimeError, match=r"a loop, or, where the op takes any shape \(\.\.\., n\) and treats each row alone"
    ):
        torch.func.vmap(function)(constants[name][None])


@each_op
def test_no_graph_without_grad(device, example):
    with torch.no_grad():
        assert not losses_of(example(example.arguments(device, torch.float32)))
    with torch.inference_mode():
        example(example.arguments(device, torch.float32))


@each_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_input_gives_the_same_bits(device, example, dtype):
    arguments = example.arguments(device, dtype)
    first = gradients(example, arguments)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(example, arguments), strict=True))


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "layer_norm"])
def test_norms_do_not_depend_on_the_number_of_threads(op):
    """Their sums over rows are split by the shape alone."""
    from liger_ext import functional

    tensors = {"x": (1003, 130), "residual": (1003, 130), "weight": (130,), "bias": (130,)}
    wanted = {
        "rms_norm": ("x", "weight"),
        "add_rms_norm": ("x", "residual", "weight"),
        "layer_norm": ("x", "weight", "bias"),
    }[op]
    made = {k: normal(*tensors[k], seed=i).requires_grad_() for i, k in enumerate(wanted)}
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            out = getattr(functional, op)(**made)
            y = out[0] if isinstance(out, tuple) else out
            results.append((y, *torch.autograd.grad(y, list(made.values()), normal(1003, 130, seed=8))))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
