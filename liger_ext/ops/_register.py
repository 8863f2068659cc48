"""What every op gets on the Python side, in one place.

For an op ``name`` and its ``name_backward``, both implemented in C++:

* fake implementations: the op's checks (``csrc/checks``), then shapes, dtypes and strides without data, for
  ``torch.compile`` and meta tensors;
* autograd on the forward, as one ``autograd.Function``: our own functions call it directly, and the dispatcher does
  where the op is called otherwise or traced. ``torch.library.register_autograd`` takes two more trips through Python.
  The backward op carries a formula that refuses, since without one a double backward would silently take the first
  derivative for a constant;
* a refusal under ``torch.func`` transforms and in forward mode, for the same reason: a jvp would silently be zero;
* a refusal of options that require a gradient: the dispatcher would take a tensor of one element for a number;
* an autocast rule. Row ops fall through: they keep the dtypes of their inputs. An op with matmuls passes ``autocast``;
* where the GPU library is missing, a CUDA implementation that says why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from liger_ext import _C, _load
from liger_ext.ops._compile import introduce, make_known

LIBRARY = torch.library.Library("liger_ext", "IMPL")

_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}
_AUTOCAST_KEYS = torch._C.DispatchKeySet(_AUTOCAST["cpu"]) | torch._C.DispatchKeySet(_AUTOCAST["cuda"])


def register(
    name: str,
    *,
    fake: Callable,
    fake_backward: Callable,
    setup_context: Callable,
    backward: Callable,
    autocast: Callable | None = None,
) -> Callable:
    """Registers all of the above for ``name`` and ``name_backward``; returns what calls the op with the least overhead.

    ``setup_context(ctx, inputs, output)`` finds ``ctx.unseen`` set where our own function has called: users get nothing
    of the output that is only there for the backward.

    ``backward(ctx, saved, *grads)`` gets the saved tensors, since they are to be unpacked before autograd is left:
    hooks may run any code then, such as the recomputation of ``torch.utils.checkpoint``, which records a graph.

    ``autocast(device_type, *args)`` returns the arguments that the forward runs with under autocast; the op itself, and
    the backward op, then run with autocast off, so that no matmul inside is cast.
    """
    for op, implementation in ((name, fake), (f"{name}_backward", fake_backward)):
        _register_op(op, implementation)
        for device_type, key in _AUTOCAST.items():
            rule = torch.library.fallthrough_kernel
            if autocast is not None:
                rule = _without_autocast(op, key, device_type, autocast if op == name else None)
            LIBRARY.impl(op, rule, key.name)
    torch.library.register_autograd(f"liger_ext::{name}_backward", _refuse_double_backward(name), lib=LIBRARY)
    return _register_autograd(name, setup_context, backward, casts=autocast is not None)


def register_row_op(name: str, *, fake: Callable | None = None, keeps_output: bool = False) -> Callable:
    """:func:`register` for an op of tensors, then options, with one result, by default of the first one's shape and
    dtype. The backward takes its gradient, the tensors that were given (or the output), and the options."""
    backward_op = getattr(torch.ops.liger_ext, f"{name}_backward").default
    types = [str(a.type) for a in getattr(torch.ops.liger_ext, name).default._schema.arguments]
    tensors = types.count("Tensor")
    options = (None,) * (len(types) - tensors)  # their gradients

    def fake_backward(dy, *kept):
        made = tuple(t.new_empty(t.shape) for t in kept[:tensors])
        return made if tensors > 1 else made[0]

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
        made = backward_op(dy, *saved, *ctx.options)
        return (*made, *options) if tensors > 1 else (made, *options)

    return register(
        name,
        fake=fake or (lambda x, *_: x.new_empty(x.shape)),
        fake_backward=fake_backward,
        setup_context=setup_context,
        backward=backward,
    )


def register_without_derivative(op: str, fake: Callable) -> None:
    """For an op that refuses tensors that require a gradient, such as one that overwrites arguments. Whoever has saved
    such an argument for a backward is told, by its version, that it has changed."""
    _register_op(op, fake)
    overload = getattr(torch.ops.liger_ext, op).default
    names = [argument.name for argument in overload._schema.arguments]
    written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def kernel(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(op, args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
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
    """Shapes, dtypes and strides of results, behind the checks of the op's arguments."""
    introduce(getattr(torch.ops.liger_ext, op).default)
    check = getattr(_C.checks, op)

    def checked(*args):
        make_known()
        check(*args)
        return fake(*args)

    torch.library.register_fake(f"liger_ext::{op}", checked, lib=LIBRARY)


def _register_autograd(name: str, setup_context: Callable, backward: Callable, casts: bool) -> Callable:
    overload = getattr(torch.ops.liger_ext, name).default
    op = overload._op  # what the overload itself calls, without a trip through Python
    below_autograd, any_requires_grad = torch._C._AutoDispatchBelowAutograd, torch._C._any_requires_grad
    check = getattr(_C.checks, name)
    tensors = sum("Tensor" in str(argument.type) for argument in overload._schema.arguments)  # the first ones
    has_options = tensors < len(overload._schema.arguments)

    def run_forward(ctx, *args):
        with below_autograd():
            output = op(*args)
        setup_context(ctx, args, output)
        return output

    def run_backward(ctx, *grads):
        saved = ctx.saved_tensors
        # Grad mode is on only while a double backward is prepared, which autograd has to see to refuse it.
        if torch.is_grad_enabled():
            return backward(ctx, saved, *grads)
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, (*saved, *grads))
        with below_autograd():
            return backward(ctx, saved, *grads)

    def run_forward_unseen(ctx, *args):
        ctx.unseen = True
        return run_forward(ctx, *args)

    def function(forward):
        # Made by its metaclass, which takes the name of graph nodes from the class's: LigerRmsNormBackward.
        return type(torch.autograd.Function)(
            "Liger" + "".join(map(str.capitalize, name.split("_"))),
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(run_backward)},
        )

    Function = function(run_forward)
    # Function.apply prepares for torch.func transforms, which call() has ruled out, and then calls this.
    apply = super(torch.autograd.Function, function(run_forward_unseen)).apply

    def kernel(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, args)
        if torch.is_grad_enabled() and any_requires_grad(*args):
            return applied(Function.apply, *args)
        with below_autograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)

    def call(*args):
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return overload(*args)
        if forward_ad._current_level >= 0:
            _refuse_forward_mode(name, args)
        records = torch.is_grad_enabled() and any_requires_grad(*args)
        if has_options and records and any_requires_grad(*args[tensors:]):
            _refuse_learned_option(overload._schema, args)
        if casts and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):  # our own function has looked at it
                return run(records, args)
        return run(records, args)

    def run(records, args):
        if records:
            return applied(apply, *args)
        try:
            with below_autograd():
                return op(*args)
        except NotImplementedError as error:
            failed = error
        check(*args)  # names an argument that is None: without a tensor the dispatcher finds no device
        raise failed

    return call


def applied(apply: Callable, *args):
    """``apply(*args)`` of an autograd.Function. Autograd does not save tensors that were made under inference_mode:
    where there are some, their copies take their places."""
    if torch.compiler.is_compiling():
        return apply(*args)
    try:
        return apply(*args)
    except RuntimeError:
        made_there = [isinstance(arg, torch.Tensor) and arg.is_inference() for arg in args]
        if torch.is_inference_mode_enabled() or not any(made_there):
            raise
    return apply(*(arg.clone() if inference else arg for arg, inference in zip(args, made_there, strict=True)))


def _refuse_double_backward(name: str) -> Callable:
    def backward(ctx, *grads):
        raise RuntimeError(
            f"liger_ext::{name} has no second derivative: double backward (create_graph=True) is not supported"
        )

    return backward


def _refuse_forward_mode(name: str, args: tuple) -> None:
    if any(isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in args):
        raise RuntimeError(f"liger_ext::{name} has no forward-mode derivative (jvp). Use backward mode: torch.autograd")


def _refuse_learned_option(schema: torch.FunctionSchema, args: tuple) -> None:
    for argument, value in zip(schema.arguments, args, strict=False):
        if "Tensor" not in str(argument.type) and isinstance(value, torch.Tensor) and value.requires_grad:
            raise TypeError(
                f"{schema.name.removeprefix('liger_ext::')}: {argument.name} is a tensor that requires a gradient, "
                "expected a number: options have no gradient"
            )


def _refuse_transforms(op: str) -> Callable:
    def kernel(*args):
        raise RuntimeError(
            f"liger_ext::{op} does not work under torch.func transforms (grad, vmap, jvp, ...). Use torch.autograd; "
            "instead of vmap a loop, or, where the op takes any shape (..., n) and treats each row alone, one call "
            "with another leading dimension"
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
