"""Registers the Python side of the ops: fake implementations, autograd, autocast, and errors for unsupported uses.

For an op ``name`` and its ``name_backward``, both implemented in C++, it registers:

* fake implementations: the op's checks (``csrc/checks``), then shapes, dtypes and strides without data, for
  ``torch.compile`` and meta tensors;
* autograd of the forward, as an ``autograd.Function``. The public functions call it directly; the dispatcher calls it
  if the op is called by other code or traced. ``torch.library.register_autograd`` would run two more Python functions
  in each call;
* an error for double backward: without it, autograd would silently treat the first derivative as a constant;
* an error under ``torch.func`` transforms and in forward mode: without it, a jvp would silently be zero;
* an error for arguments without a derivative that require a gradient; the dispatcher would convert an option that is a
  tensor of one element to a number;
* an autocast rule. Row ops fall through and keep the dtypes of their inputs. An op with matmuls passes ``autocast``;
* if the GPU library is not loaded, a CUDA implementation that raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from liger_ext import _C, _load
from liger_ext.ops._checks import check_constants
from liger_ext.ops._compile import register_later, register_with_inductor
from liger_ext.ops._schema import argument_names, result_names, selector, with_names

LIBRARY = torch.library.Library("liger_ext", "IMPL")

_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
AUTOCAST_KEYS = torch._C.DispatchKeySet(_AUTOCAST["cpu"]) | torch._C.DispatchKeySet(_AUTOCAST["cuda"])


def register(
    name: str,
    *,
    fake: Callable,
    fake_backward: Callable | None = None,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    differentiable: int | None = None,
    autocast: Callable | None = None,
) -> Callable:
    """Registers for ``name`` and ``name_backward`` all that the file's docstring lists. Returns a function that calls
    the op with the least overhead.

    The functions below name what they read by their parameters (``_schema.py``). The only one may be ``values``,
    a named tuple of all.

    ``fake``, ``fake_backward``: parameters are arguments of the op, or of the backward op. By default each gradient has
    the shape and dtype of its argument, or is empty if it is not needed.

    ``setup_context(ctx, ...)``: further parameters are arguments and results of the op. ``ctx.outputs_private`` is True
    if the returned function has called the op. Then users do not see the outputs that only the backward needs.

    ``backward(ctx, saved, ...)``: further parameters are upstream gradients, ``"d"`` and the name of a result. Returns
    the gradients by the names of the arguments. It gets the saved tensors as an argument, since they must be unpacked
    before the dispatch below autograd begins: their hooks may run any code, such as the recomputation of
    ``torch.utils.checkpoint``, which records a graph. Without ``backward``, :func:`_derived` builds both.

    ``differentiable``: the number of the first arguments, after which no argument has a derivative. By default it
    follows from the results of the backward op.

    ``autocast(device_type, *args)`` returns the forward's arguments under autocast. The op and the backward op then run
    with autocast off, so that no matmul inside is cast.
    """
    overload = getattr(torch.ops.liger_ext, name).default
    backward_op = getattr(torch.ops.liger_ext, f"{name}_backward").default
    inputs, gradients = argument_names(overload), _gradient_names(overload, backward_op)
    if fake_backward is None:
        bound_backward = _fake_like(gradients, backward_op)
    else:
        bound_backward = with_names(fake_backward, argument_names(backward_op))
    for op, implementation in ((name, with_names(fake, inputs)), (f"{name}_backward", bound_backward)):
        _register_op(op, implementation)
        for device_type, key in _AUTOCAST.items():
            rule = torch.library.fallthrough_kernel
            if autocast is not None:
                rule = _without_autocast(op, key, device_type, autocast if op == name else None)
            LIBRARY.impl(op, rule, key.name)
    torch.library.register_autograd(f"liger_ext::{name}_backward", _refuse_double_backward(name), lib=LIBRARY)
    if differentiable is None:
        differentiable = 1 + max(inputs.index(gradient[1:]) for gradient in gradients)
    if backward is None:
        formula = _derived(overload, backward_op)
    else:
        formula = _bound(overload, setup_context, backward)
    return _register_autograd(overload, *formula, differentiable, casts=autocast is not None)


def _gradient_names(op: torch._ops.OpOverload, backward_op: torch._ops.OpOverload) -> list[str]:
    """Returns the names of the backward op's results: ``"d"`` and the name of an argument."""
    names = result_names(backward_op)
    return names if names != [""] else ["d" + argument_names(op)[0]]


def _fake_like(gradients: list[str], backward_op: torch._ops.OpOverload) -> Callable:
    names = argument_names(backward_op)

    def fake(args):
        values = dict(zip(names, args, strict=True))
        first, found = values[gradients[0][1:]], []
        for gradient in gradients:
            like = values[gradient[1:]]
            needed = like is not None and values.get(f"need_{gradient}", True)
            found.append((first if like is None else like).new_empty(like.shape if needed else 0))
        return tuple(found) if len(found) > 1 else found[0]

    return fake


def _bound(op: torch._ops.OpOverload, setup_context: Callable, backward: Callable) -> tuple[Callable, Callable]:
    """Binds the functions that an op passes to :func:`register`. Returns setup_context(ctx, args, output) and
    backward(ctx, saved, grads), which returns the gradients of all arguments."""
    inputs, outputs = argument_names(op), result_names(op)
    named_setup = with_names(setup_context, inputs + outputs, 1)
    named_backward = with_names(backward, [f"d{output}" for output in outputs], 2)
    positions = {name: position for position, name in enumerate(inputs)}

    def setup(ctx, args, output):
        named_setup((*args, *output), ctx)

    def run_backward(ctx, saved, grads):
        gradients = [None] * len(inputs)
        for name, gradient in named_backward(grads, ctx, saved).items():
            gradients[positions[name]] = gradient
        return tuple(gradients)

    return setup, run_backward


def _derived(op: torch._ops.OpOverload, backward_op: torch._ops.OpOverload) -> tuple[Callable, Callable]:
    """Derives the autograd formula from the schemas, in the form of :func:`_bound`.

    The backward op takes, in this order: the upstream gradient of the first result; tensors among the op's arguments
    and results; options of the op, or the dtype of a tensor; for each of the first arguments, whether its gradient is
    needed (or no such flags). It returns the gradients of the first arguments, in their order.
    """
    inputs, outputs, names = argument_names(op), result_names(op), argument_names(backward_op)
    one_result = len(outputs) == 1
    outputs = [names[0][1:], *outputs[1:]]
    needs = [name for name in names if name.startswith("need_d")]
    tensors = [a.name for a in backward_op._schema.arguments[1:] if "Tensor" in str(a.type)]
    options = names[1 + len(tensors) : len(names) - len(needs)]
    dtypes = [name.removesuffix("_dtype") for name in options if name.endswith("_dtype")]
    if names != [names[0], *tensors, *options, *needs] or needs != [f"need_d{name}" for name in inputs[: len(needs)]]:
        raise TypeError(f"{backward_op._schema} has another order of arguments; pass backward to register")
    select = selector(inputs + outputs, tensors)
    select_options = selector(inputs, [name.removesuffix("_dtype") for name in options])
    count = len(needs)
    no_gradients = (None,) * len(inputs)
    others = no_gradients[len(_gradient_names(op, backward_op)) :]

    def setup_context(ctx, args, output):
        ctx.set_materialize_grads(False)
        values = (*args, output) if one_result else (*args, *output)
        if not one_result:
            ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*select(values))
        ctx.options = select_options(args)
        if dtypes:
            ctx.options = tuple(v.dtype if isinstance(v, torch.Tensor) else v for v in ctx.options)

    def backward(ctx, saved, grads):
        if grads[0] is None:
            return no_gradients
        needed = ctx.needs_input_grad[:count]
        results = backward_op(grads[0], *saved, *ctx.options, *needed)
        if not all(needed):
            results = [result if need else None for result, need in zip(results, needed, strict=True)]
        return (*results, *others) if count or others != no_gradients[1:] else (results, *others)

    return setup_context, backward


def register_without_derivative(op: str, fake: Callable, recorded: Callable | None = None) -> None:
    """Registers an op without a backward op, such as one that overwrites arguments. The parameters of ``fake`` name the
    arguments that it reads. If a tensor requires a gradient,
    ``recorded`` computes the op by ops that autograd records; None: such a tensor raises an error. The op increments
    the version of overwritten arguments, so that autograd raises an error if another backward has saved one."""
    overload = getattr(torch.ops.liger_ext, op).default
    names = argument_names(overload)
    _register_op(op, with_names(fake, names))
    written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def kernel(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(op, args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if recorded is not None:
                return recorded(*args)
            name = next(n for n, t in zip(names, args, strict=True) if torch._C._any_requires_grad(t))
            raise RuntimeError(f"liger_ext::{op} has no derivative: {name} requires a gradient, expected none")
        with torch._C._AutoDispatchBelowAutograd():
            results = overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        torch.autograd.graph.increment_version([args[i] for i in written])
        return results

    LIBRARY.impl(op, kernel, "Autograd", with_keyset=True)


def _register_op(op: str, fake: Callable) -> None:
    register_fake(op, fake)
    LIBRARY.impl(op, _refuse_transforms(op), "FuncTorchDynamicLayerFrontMode")
    if not _load.gpu_available():
        LIBRARY.impl(op, _gpu_missing, "CUDA")


def register_fake(op: str, fake: Callable) -> None:
    """Registers a fake implementation, which runs the checks of the op's arguments before ``fake``, a function of a
    tuple of the arguments."""
    register_later(getattr(torch.ops.liger_ext, op).default)
    check = getattr(_C.checks, op)

    def checked(*args):
        register_with_inductor()
        check(*args)
        return fake(args)

    torch.library.register_fake(f"liger_ext::{op}", checked, lib=LIBRARY)


def _register_autograd(
    overload: torch._ops.OpOverload, setup_context: Callable, backward: Callable, differentiable: int, casts: bool
) -> Callable:
    name = overload._schema.name.removeprefix("liger_ext::")
    op = overload._op  # the function that the overload calls, without the Python code around it
    below_autograd, any_requires_grad = torch._C._AutoDispatchBelowAutograd, torch._C._any_requires_grad
    check = getattr(_C.checks, name)
    constants = argument_names(overload)[differentiable:]

    def check_learned(args):
        check_constants(name, **dict(zip(constants, args[differentiable:], strict=False)))

    def run_forward(ctx, *args):
        with below_autograd():
            output = op(*args)
        setup_context(ctx, args, output)
        return output

    def run_backward(ctx, *grads):
        saved = ctx.saved_tensors
        # Grad mode is on only with create_graph=True. Autograd must then record the backward op, whose formula raises.
        if torch.is_grad_enabled():
            return backward(ctx, saved, grads)
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, (*saved, *grads))
        with below_autograd():
            return backward(ctx, saved, grads)

    def run_private_forward(ctx, *args):
        ctx.outputs_private = True
        return run_forward(ctx, *args)

    def function(forward):
        # Built by the metaclass, which derives the name of graph nodes from the class's name: LigerRmsNormBackward.
        return type(torch.autograd.Function)(
            "Liger" + "".join(map(str.capitalize, name.split("_"))),
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(run_backward)},
        )

    Function, PrivateFunction = function(run_forward), function(run_private_forward)

    def kernel(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            check_learned(args)
            return applied(Function, *args)
        with below_autograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*args):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return overload(*args)
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, args)
        records = torch.is_grad_enabled() and any_requires_grad(*args)
        if constants and records and any_requires_grad(*args[differentiable:]):
            check_learned(args)
        if casts and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):  # the public function has applied autocast's dtype
                return run(records, args)
        return run(records, args)

    def run(records, args):
        if records:
            return applied(PrivateFunction, *args)
        try:
            with below_autograd():
                return op(*args)
        except NotImplementedError as error:
            failed = error
        check(*args)  # raises an error that names an argument that is None, which the dispatcher's error does not
        raise failed

    return call


def applied(function: type[torch.autograd.Function], *args):
    """Returns ``function.apply(*args)``, without its handling of torch.func transforms, which the caller has excluded.
    Autograd cannot save tensors that were created under inference_mode: copies replace them."""
    if torch.compiler.is_compiling():
        return function.apply(*args)
    apply = super(torch.autograd.Function, function).apply
    try:
        return apply(*args)
    except RuntimeError:
        are_inference = [isinstance(arg, torch.Tensor) and arg.is_inference() for arg in args]
        if torch.is_inference_mode_enabled() or not any(are_inference):
            raise
    return apply(*(arg.clone() if inference else arg for arg, inference in zip(args, are_inference, strict=True)))


def _refuse_double_backward(name: str) -> Callable:
    def backward(ctx, *grads):
        raise RuntimeError(
            f"liger_ext::{name} has no second derivative: double backward (create_graph=True) is not supported"
        )

    return backward


def _refuse_forward_mode(name: str, args: tuple) -> None:
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in args):
        raise RuntimeError(f"liger_ext::{name} has no forward-mode derivative (jvp). Use backward mode: torch.autograd")


def _refuse_transforms(op: str) -> Callable:
    def kernel(*args):
        raise RuntimeError(
            f"liger_ext::{op} does not work under torch.func transforms (grad, vmap, jvp, ...). Use torch.autograd; "
            "replace vmap by a loop, or, if the op takes any shape (..., n) and processes each row separately, by one "
            "call with another leading dimension"
        )

    return kernel


def _gpu_missing(*args):
    raise RuntimeError(f"liger_ext cannot run on a GPU here: {_load.gpu_status()}")


def _without_autocast(op: str, key: torch._C.DispatchKey, device_type: str, prepare: Callable | None) -> Callable:
    overload = getattr(torch.ops.liger_ext, op).default
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args):
        if prepare is not None:
            args = prepare(device_type, *args)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args)

    return kernel
