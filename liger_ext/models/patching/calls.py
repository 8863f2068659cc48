"""What a call of a module runs: its class's `forward` and nothing else, or something of others as well.

Fused ops do the work of modules without calling them. What others have put on a module's call must run all the same:
hooks, functions in the place of those that PyTorch calls on the way to `forward`, on the instance or on its class, and
methods in the place of those that `forward` calls. What a class has is looked at once, and remembered for as long as
nobody replaces any of it.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from liger_ext.models.patching.forwards import find_foreign, methods_called
from liger_ext.models.patching.names import REMOTE
from liger_ext.ops._compile import assume_constant_result


def is_exported() -> bool:
    """Whether torch.export makes the graph; `torch.compiler.is_exporting()` is True in every one before torch 2.14."""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def exports_onnx() -> bool:
    """Whether torch.onnx exports the model. ONNX has no operators for our ops: patches do then what the class does that
    they replace, since no call counts as known (`_is_known`), and no tensor as plain (`is_plain_tensor`)."""
    return (is_exported() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def only_forward_runs(module: nn.Module) -> bool:
    """Whether calling `module` runs nothing but the `forward` that its library gives to its class: no hooks, and
    nothing of others in the place of a function on the way, on the instance or on the class.

    Only then may a fused op do the module's work without calling it.
    """
    return not (any(hooks_of(module)) or _has_any_global_hook() or _is_compiled(module)) and _is_known(module, _ALL)


def is_called_bare(module: nn.Module) -> bool:
    """Whether calling `module` runs its class's `forward`, whatever that is, and nothing else."""
    hooked = any(hooks_of(module)) or _has_any_global_hook()
    return not hooked and "forward" not in module.__dict__ and call_is_torchs(module)


def call_is_torchs(module: nn.Module) -> bool:
    """Whether calling `module` runs its hooks and its `forward`, whatever these are, and nothing else."""
    return not _is_compiled(module) and _is_known(module, _CALL)


def has_known_methods(module: nn.Module) -> bool:
    """Whether the methods that transformers' `forward` calls are those that `module`'s class has there: what a patch's
    `forward` does then in their place is the same."""
    return _is_known(module, _METHODS)


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


_WAYS = "__call__", "_call_impl"  # on which a call comes to `forward`
_CALL, _METHODS, _ALL = range(3)  # of what a call runs: how it comes to `forward`; what that calls; these and `forward`


class _Call(NamedTuple):
    """What a call of an instance runs of its class."""

    read: operator.attrgetter
    functions: tuple[Callable, ...]  # what `read` gives until somebody replaces any of them
    names: tuple[tuple[str, ...] | None, ...]  # what an instance may have in their place; None: they are not known


_calls: dict[type[nn.Module], _Call] = {}


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None  # by `module.compile()`


def _is_known(module: nn.Module, part: int) -> bool:
    """Whether `part` of what a call of `module` runs is what a library that we know, or a patch, gives to its class."""
    names = (_names_in_graph if torch.compiler.is_compiling() else _names)(type(module), part)
    if names is None or exports_onnx():
        return False
    own = module.__dict__
    for name in names:  # noqa: SIM110 (it runs for each module in each step)
        if name in own and not _is_class_method(own[name], module, name):
            return False
    return True


def _is_class_method(function: Callable, module: nn.Module, name: str) -> bool:
    """Whether `function`, which `module` has itself, is its class's method. The package kernels puts that on a module
    for which it finds no kernel."""
    bound_to = getattr(function, "__self__", None)
    return bound_to is module and function.__func__ is getattr(type(module), name)


def _names(cls: type[nn.Module], part: int) -> tuple[str, ...] | None:
    call = _calls.get(cls)
    if call is None or call.read(cls) != call.functions:
        call = _calls[cls] = _look_at_call(cls)
    return call.names[part]


@assume_constant_result
def _names_in_graph(cls: type[nn.Module], part: int) -> tuple[str, ...] | None:
    """torch.compile cannot look into it."""
    return _names(cls, part)


def _look_at_call(cls: type[nn.Module]) -> _Call:
    methods = tuple(methods_called(cls))
    of_class = _WAYS, methods, (*_WAYS, "forward", *methods)
    # Python looks up `__call__` in the class alone.
    of_instance = ("_call_impl",), methods, ("_call_impl", "forward", *methods)
    known = {name for name in of_class[_ALL] if _is_librarys(cls, name)}
    names = tuple(own if known.issuperset(part) else None for part, own in zip(of_class, of_instance, strict=True))
    read = operator.attrgetter(*of_class[_ALL])
    return _Call(read, read(cls), names)


def _is_librarys(cls: type[nn.Module], name: str) -> bool:
    """Whether the function that `cls` has by this name is still what a library, or a patch, has defined by it."""
    owner = next(c for c in cls.__mro__ if name in vars(c))
    function = vars(owner)[name]
    if owner in _forwards and name == "forward":
        return function is _forwards[owner]
    function = getattr(function, "__func__", function)  # of a static method
    if is_exported() and getattr(function, "__globals__", {}).get("__name__") == "torch.fx._symbolic_trace":
        function = function.__wrapped__  # under what notes, while torch.export traces, which module is called
    library = owner.__module__.partition(".")[0]
    if library not in _LIBRARIES or (library == "torch" and hasattr(function, "__wrapped__")):  # no_grad, autocast, ...
        return False
    if owner.__module__.startswith(REMOTE) and name in _WAYS:  # of which recognition reads nothing
        return False
    qualname = (
        "Module._wrapped_call_impl" if owner is nn.Module and name == "__call__" else f"{owner.__qualname__}.{name}"
    )
    return find_foreign(function, owner.__module__, qualname, (library, *_DECORATING)) is None


_LIBRARIES = "torch", "transformers", REMOTE.rstrip("."), "peft", "liger_ext"
_DECORATING = "kernels", "transformers"
_forwards: dict[type[nn.Module], Callable] = {}  # of patches


def is_patch(cls: type[nn.Module]) -> bool:
    return cls in _forwards


def know_forward(patch: type[nn.Module]) -> None:
    """Notes that the `forward` that a patch has now is its own."""
    _forwards[patch] = patch.forward
