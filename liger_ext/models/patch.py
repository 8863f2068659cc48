"""How a model is patched: the class of a module is swapped for a subclass, and swapped back.

Why classes and not bound methods or module globals:

- A subclass is seen by `isinstance`, survives `deepcopy`, pickling and PEFT's wrapping; one assignment undoes it.
- transformers checkpoints a decoder layer in code that it wraps around the *class's* `forward` when a subclass is made;
  a `forward` set on an instance or on the class itself silently runs without gradient checkpointing.
- A class swap touches one instance. Nothing global changes, so stock models in the same process stay stock.

Models built later are patched by the same swap, at the end of their constructor (`on_construction`): `Class(config)`,
`from_config` and `from_pretrained` all come through it, in every version of transformers.

Other libraries swap classes as well: FSDP2's `fully_shard` puts `FSDP<Name>` on top of a module's class. Patching after
it puts our class on top of theirs; undoing a patch that lies below theirs rebuilds their class without ours.
"""

import contextlib
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook


class PatchHandle(contextlib.ExitStack):
    """What a patch did, and how to undo it: call `revert()`, or use the handle as a context manager.

    Reverting twice is harmless, and handles may be reverted in any order. A handle does not keep a model alive.
    """

    def revert(self) -> None:
        """Undoes the patch. Modules that were patched get back the class they had."""
        self.close()


def swap_class(module: nn.Module, patch: type[nn.Module], handle: PatchHandle | None = None) -> bool:
    """Gives `module` the class `patch`, a direct subclass of the class that it replaces; the undo goes on `handle`.

    Returns False, and leaves the module alone, when it is patched already, or when it has a `forward` of its own: one
    that a subclass defines, or one that was set on the instance. The latter two draw a warning.
    """
    cls, original = type(module), patch.__base__
    if issubclass(cls, patch):
        return False
    if not _inherits_forward(cls, original) or not _release_forward(module):
        warnings.warn(f"{cls.__name__} has a forward of its own and is not patched", stacklevel=2)
        return False
    patched = patch if cls is original else _stack(cls, patch)
    _set_class(module, patched)
    if handle is not None:
        handle.callback(_restore_class, weakref.ref(module), patched, cls)
    return True


def on_construction(cls: type[nn.Module], patch: Callable[[nn.Module], object], handle: PatchHandle) -> None:
    """Calls `patch(instance)` at the end of every `cls.__init__` from now on, until `handle` is reverted."""
    if cls not in _constructors:
        _constructors[cls] = _HookedConstructor(cls)
    _constructors[cls].hooks.append(patch)
    handle.callback(_remove_constructor_hook, cls, patch)


def with_globals(function: Callable, **replacements: object) -> Callable:
    """A copy of `function` that sees `replacements` in place of the globals of those names. Its decorators are kept."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return _copy_function(function, {**function.__globals__, **replacements}, function.__closure__)
    copied = with_globals(inner, **replacements)
    cells = function.__closure__ or ()
    if not any(cell.cell_contents is inner for cell in cells):
        raise TypeError(f"{function.__qualname__} does not keep the function that it decorates in its closure")
    closure = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    wrapper = _copy_function(function, function.__globals__, closure)
    wrapper.__wrapped__ = copied
    return wrapper


def only_forward_runs(module: nn.Module) -> bool:
    """Whether calling `module` does no more than its class's `forward`: no hooks, and no `forward` set on the instance.

    Only then may a fused op do the module's work without calling it.
    """
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__ and not _has_any_global_hook()


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is neither a DTensor nor another subclass with a meaning of its own (quantised weights, ...)."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


class _HookedConstructor:
    """`cls.__init__` while there are hooks to be called after it."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.hooks: list[Callable[[nn.Module], object]] = []
        self.original = original = cls.__init__

        @functools.wraps(original)
        def __init__(instance, *args, **kwargs):
            original(instance, *args, **kwargs)
            for hook in tuple(self.hooks):
                hook(instance)

        self.wrapper = cls.__init__ = __init__


_constructors: dict[type[nn.Module], _HookedConstructor] = {}


def _remove_constructor_hook(cls: type[nn.Module], patch: Callable[[nn.Module], object]) -> None:
    constructor = _constructors[cls]
    constructor.hooks.remove(patch)
    if not constructor.hooks:
        del _constructors[cls]
        # If another library has wrapped it since, ours stays below, and does nothing.
        if cls.__init__ is constructor.wrapper:
            cls.__init__ = constructor.original


def _restore_class(reference: weakref.ref, patched: type[nn.Module], original: type[nn.Module]) -> None:
    module = reference()
    if module is not None:
        if not _release_forward(module):
            name = type(module).__name__
            warnings.warn(f"the forward of this {name} was wrapped after patching, and keeps the patch", stacklevel=2)
        _set_class(module, _without(type(module), patched, original))


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Sets the class; accelerate's device hooks keep the bound `forward` that they wrap, which must follow."""
    wrapped = module.__dict__.get("_old_forward")
    follows = isinstance(wrapped, types.MethodType) and wrapped.__func__ is type(module).forward
    module.__class__ = cls
    if follows:
        module._old_forward = cls.forward.__get__(module)


def _release_forward(module: nn.Module) -> bool:
    """Whether the class's `forward` is what runs.

    transformers 4.54 to 5.0, having recorded hidden states, leaves each layer its own bound `forward` as an instance
    attribute. That one means nothing and is removed, so that the class counts again.
    """
    own = module.__dict__.get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is type(module).forward:
        del module.__dict__["forward"]
        own = None
    return own is None or "_old_forward" in module.__dict__


def _inherits_forward(cls: type, base: type) -> bool:
    """Whether `cls.forward` is `base`'s, or that one wrapped again by GradientCheckpointingLayer for a subclass."""
    ours, theirs = cls.forward, base.forward
    return ours is theirs or (ours.__code__ is theirs.__code__ and inspect.unwrap(ours) is inspect.unwrap(theirs))


@functools.cache
def _stack(cls: type[nn.Module], patch: type[nn.Module]) -> type[nn.Module]:
    """`patch` on top of `cls`, a subclass of what `patch` replaces."""
    return type(cls)(cls.__name__, (patch, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


@functools.cache
def _without(cls: type[nn.Module], patched: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """`cls` with `patched` in its ancestry replaced by `original`."""
    if cls is patched:
        return original
    if patched not in cls.__mro__:
        return cls
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    if _inherits_forward(cls, patched):
        namespace.pop("forward", None)  # it wraps the patch's forward; making the class wraps the original's
    return type(cls)(cls.__name__, tuple(_without(base, patched, original) for base in cls.__bases__), namespace)


def _copy_function(function: types.FunctionType, namespace: dict, closure: tuple | None) -> types.FunctionType:
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    return copy
