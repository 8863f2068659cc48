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

LIBRARY = torch.library.Library("liger_ext", "IMPL")

_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
AUTOCAST_KEYS = torch._C.DispatchKeySet(_AUTOCAST["cpu"]) | torch._C.DispatchKeySet(_AUTOCAST["cuda"])


def register(
    name: str,
    *,
    fake: Callable,
    fake_backward: Callable,
    setup_context: Callable,
    backward: Callable,
    differentiable: int | None = None,
    autocast: Callable | None = None,
) -> Callable:
    """Registers for ``name`` and ``name_backward`` all that the file's docstring lists. Returns a function that calls
    the op with the least overhead.

    ``setup_context(ctx, inputs, output)``: ``ctx.outputs_private`` is True if the returned function has called the op.
    Then users do not see the outputs that only the backward needs.

    ``backward(ctx, saved, *grads)`` gets the saved tensors as an argument, since they must be unpacked before the
    dispatch below autograd begins: their hooks may run any code, such as the recomputation of
    ``torch.utils.checkpoint``, which records a graph.

    ``differentiable``: the number of the first arguments, after which no argument has a derivative. None: all tensors,
    which come first.

    ``autocast(device_type, *args)`` returns the forward's arguments under autocast. The op and the backward op then run
    with autocast off, so that no matmul inside is cast.
    """
    for op, implementation in ((name, fake), (f"{name}_backward", fake_backward)):
        _register_op(op, implementation)
        for device_type, key in _AUTOCAST.items():
            rule = torch.library.fallthrough_kernel
            if autocast is not None:
                rule = _without_autocast(op, key, device_type, autocast if op == name else None)
            LIBRARY.impl(op, rule, key.name)
    torch.library.register_autograd(f"liger_ext::{name}_backward", _refuse_double_backward(name), lib=LIBRARY)
    return _register_autograd(name, setup_context, backward, differentiable, casts=autocast is not None)


def register_row_op(name: str, *, fake: Callable | None = None, keeps_output: bool = False) -> Callable:
    """Calls :func:`register` for an op with one result, whose arguments are tensors and then options.

    ``fake``: by default the result has the shape and dtype of the first tensor. The backward op takes the upstream
    gradient, the op's tensors (``keeps_output``: its result instead), and the options."""
    backward_op = getattr(torch.ops.liger_ext, f"{name}_backward").default
    types = [str(a.type) for a in getattr(torch.ops.liger_ext, name).default._schema.arguments]
    tensors = types.count("Tensor")
    options = (None,) * (len(types) - tensors)  # their gradients

    def fake_backward(dy, *saved):
        results = tuple(t.new_empty(t.shape) for t in saved[:tensors])
        return results if tensors > 1 else results[0]

    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        if keeps_output:
            ctx.save_for_backward(output)
        else:
            ctx.save_for_backward(*inputs[:tensors])
        if options:
            ctx.options = inputs[tensors:]

    def backward(ctx, saved, dy):
        if dy is None:
            return (None,) * len(types)
        if not options:
            return backward_op(dy, *saved)
        results = backward_op(dy, *saved, *ctx.options)
        return (*results, *options) if tensors > 1 else (results, *options)

    return register(
        name,
        fake=fake or (lambda x, *_: x.new_empty(x.shape)),
        fake_backward=fake_backward,
        setup_context=setup_context,
        backward=backward,
    )


def register_without_derivative(op: str, fake: Callable, recorded: Callable | None = None) -> None:
    """Registers an op without a backward op, such as one that overwrites arguments. If a tensor requires a gradient,
    ``recorded`` computes the op by ops that autograd records; None: such a tensor raises an error. The op increments
    the version of overwritten arguments, so that autograd raises an error if another backward has saved one."""
    _register_op(op, fake)
    overload = getattr(torch.ops.liger_ext, op).default
    names = [argument.name for argument in overload._schema.arguments]
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
    """Registers a fake implementation, which runs the checks of the op's arguments before ``fake``."""
    register_later(getattr(torch.ops.liger_ext, op).default)
    check = getattr(_C.checks, op)

    def checked(*args):
        register_with_inductor()
        check(*args)
        return fake(*args)

    torch.library.register_fake(f"liger_ext::{op}", checked, lib=LIBRARY)


def _register_autograd(
    name: str, setup_context: Callable, backward: Callable, differentiable: int | None, casts: bool
) -> Callable:
    overload = getattr(torch.ops.liger_ext, name).default
    op = overload._op  # the function that the overload calls, without the Python code around it
    below_autograd, any_requires_grad = torch._C._AutoDispatchBelowAutograd, torch._C._any_requires_grad
    check = getattr(_C.checks, name)
    arguments = overload._schema.arguments
    if differentiable is None:
        differentiable = sum("Tensor" in str(argument.type) for argument in arguments)
    constants = [argument.name for argument in arguments[differentiable:]]

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
            return backward(ctx, saved, *grads)
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, (*saved, *grads))
        with below_autograd():
            return backward(ctx, saved, *grads)

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
