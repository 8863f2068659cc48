"""Checks whether a call of a module runs only its class's `forward`, or also code that others have attached to it.

A fused op does the work of a module without calling it. Attached code must still run: hooks, and replacements, on the
instance or on its class, of the functions through which PyTorch calls `forward` or of the methods that `forward` calls.
The result for a class is cached until somebody replaces one of these functions.
"""

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.module_tracker import ModuleTracker

from liger_ext.models.patching.forwards import find_foreign, methods_called
from liger_ext.models.patching.names import REMOTE
from liger_ext.ops._compile import assume_constant_result


def is_exported() -> bool:
    """Returns whether torch.export traces. (`torch.compiler.is_exporting()` is True in any graph before torch 2.14.)"""
    return getattr(torch.compiler, "_is_exporting_flag", False)


def exports_onnx() -> bool:
    """Returns whether torch.onnx exports the model. ONNX has no operators for our ops, so a patch then runs the code of
    the class that it replaces: no call counts as known (`_is_known`), and no tensor as plain (`is_plain_tensor`)."""
    return (is_exported() or torch.jit.is_tracing()) and torch.onnx.is_in_onnx_export()


def only_forward_runs(module: nn.Module) -> bool:
    """Returns whether a call of `module` runs only the `forward` that its library or a patch defines: it has no hooks,
    `module.compile()` was not called, and nobody has replaced a function on the way, on the instance or on the class.

    Only then may a fused op do the module's work without calling it.
    """
    return not (any(module_hooks(module)) or has_global_hook() or _is_compiled(module)) and _is_known(module, _ALL)


def is_called_bare(module: nn.Module) -> bool:
    """Returns whether a call of `module` runs only its class's `forward`, whatever code that is."""
    hooked = any(module_hooks(module)) or has_global_hook()
    return not hooked and "forward" not in module.__dict__ and has_torch_call(module)


def has_torch_call(module: nn.Module) -> bool:
    """Returns whether a call of `module` runs only its hooks and its `forward`, whatever code these are."""
    return not _is_compiled(module) and _is_known(module, _CALL)


def has_known_methods(module: nn.Module) -> bool:
    """Returns whether nobody has replaced the methods that transformers' `forward` calls. A patch's `forward` does
    their work without calling them."""
    return _is_known(module, _METHODS)


def has_global_hook() -> bool:
    """Returns whether all modules have a hook, other than those by which FLOP counters find the name of a module."""
    if not _has_any_global_hook():
        return False
    kinds = "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
    hooks = (hook for kind in kinds for hook in getattr(torch_module, kind).values())
    return not all(isinstance(getattr(hook, "__self__", None), ModuleTracker) for hook in hooks)


def module_hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


_CALL_FUNCTIONS = "__call__", "_call_impl"  # the functions through which a call reaches `forward`
# Parts of a call: `_CALL_FUNCTIONS`; the methods that `forward` calls; both and `forward`.
_CALL, _METHODS, _ALL = range(3)


class _Call(NamedTuple):
    """The functions of a class that a call of an instance runs."""

    read: operator.attrgetter
    functions: tuple[Callable, ...]  # the result of `read` until somebody replaces a function
    # By part: the attributes by which an instance may replace the functions. None: the functions are not known.
    names: tuple[tuple[str, ...] | None, ...]


_calls: dict[type[nn.Module], _Call] = {}


def _is_compiled(module: nn.Module) -> bool:
    return module.__dict__.get("_compiled_call_impl") is not None  # by `module.compile()`


def _is_known(module: nn.Module, part: int) -> bool:
    """Returns whether this part of a call of `module` runs the functions that a known library or a patch defines."""
    names = (_names_in_graph if torch.compiler.is_compiling() else _names)(type(module), part)
    if names is None or exports_onnx():
        return False
    own = module.__dict__
    for name in names:  # noqa: SIM110 (it runs for each module in each step)
        if name in own and not _is_class_method(own[name], module, name):
            return False
    return True


def _is_class_method(function: Callable, module: nn.Module, name: str) -> bool:
    """Returns whether `function`, an attribute of the instance, is its class's method. The package kernels sets it on a
    module for which it finds no kernel."""
    bound_to = getattr(function, "__self__", None)
    return bound_to is module and function.__func__ is getattr(type(module), name)


def _names(cls: type[nn.Module], part: int) -> tuple[str, ...] | None:
    call = _calls.get(cls)
    if call is None or call.read(cls) != call.functions:
        call = _calls[cls] = _inspect_call(cls)
    return call.names[part]


@assume_constant_result
def _names_in_graph(cls: type[nn.Module], part: int) -> tuple[str, ...] | None:
    """Returns `_names` as a constant of the graph: torch.compile cannot trace it."""
    return _names(cls, part)


def _inspect_call(cls: type[nn.Module]) -> _Call:
    methods = tuple(methods_called(cls))
    class_names = _CALL_FUNCTIONS, methods, (*_CALL_FUNCTIONS, "forward", *methods)
    # Python looks up `__call__` only in the class.
    instance_names = ("_call_impl",), methods, ("_call_impl", "forward", *methods)
    known = {name for name in class_names[_ALL] if _is_library_function(cls, name)}
    names = tuple(
        own if known.issuperset(part) else None for part, own in zip(class_names, instance_names, strict=True)
    )
    read = operator.attrgetter(*class_names[_ALL])
    return _Call(read, read(cls), names)


def _is_library_function(cls: type[nn.Module], name: str) -> bool:
    """Returns whether the function `name` of `cls` is still the one that a known library or a patch has defined."""
    owner = next(c for c in cls.__mro__ if name in vars(c))
    function = vars(owner)[name]
    if owner in _forwards and name == "forward":
        return function is _forwards[owner]
    function = getattr(function, "__func__", function)  # of a static method
    if is_exported() and getattr(function, "__globals__", {}).get("__name__") == "torch.fx._symbolic_trace":
        function = function.__wrapped__  # below the wrapper by which torch.export records calls of modules
    library = owner.__module__.partition(".")[0]
    if library not in _LIBRARIES or (library == "torch" and hasattr(function, "__wrapped__")):  # no_grad, autocast, ...
        return False
    if owner.__module__.startswith(REMOTE) and name in _CALL_FUNCTIONS:  # recognition does not read these
        return False
    qualname = (
        "Module._wrapped_call_impl" if owner is nn.Module and name == "__call__" else f"{owner.__qualname__}.{name}"
    )
    return find_foreign(function, owner.__module__, qualname, (library, *_DECORATING)) is None


_LIBRARIES = "torch", "transformers", REMOTE.rstrip("."), "peft", "bitsandbytes", "liger_ext"
_DECORATING = "kernels", "transformers"
_forwards: dict[type[nn.Module], Callable] = {}  # of patches


def is_patch(cls: type[nn.Module]) -> bool:
    return cls in _forwards


def record_forward(patch: type[nn.Module]) -> None:
    """Records the present `forward` of a patch as the one that the patch defines."""
    _forwards[patch] = patch.forward
