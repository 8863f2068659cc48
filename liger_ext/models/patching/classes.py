"""Inserts a patch among the ancestors of a class, and removes it again.

PyTorch derives classes from a module's class at run time: FSDP2's `fully_shard` derives `FSDP<Name>`, and
`torch.nn.utils.parametrize` derives `Parametrized<Name>`, which it removes later. No source file contains these
classes, so a copy with another ancestor is as good as the original. A patch becomes such an ancestor ("below" the
class), as if it had been there first, and can be removed. A class from a source file is never copied, because `super()`
in its methods refers to the class itself, and because its author would not recognise the copy. A patch of such a class
is derived from it ("on top"). If other code derives a class from the patch, the patch is below a class from a source
file and cannot be removed.
"""

import ast
import functools
import inspect
import sys
import weakref
from collections.abc import Callable

from torch import nn

from liger_ext.models.patching.forwards import parse_function


def stock_class(patch: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that `patch` replaces: its only base, or the last one, behind our mixin."""
    return patch.__bases__[-1]


def source_class(cls: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    """Returns `cls`, a subclass of `stock`, or, if PyTorch created it at run time, the nearest ancestor that it did not
    create."""
    while _is_runtime_class(cls):
        cls = next(base for base in cls.__bases__ if issubclass(base, stock))
    return cls


def with_patch(cls: type[nn.Module], patch: type[nn.Module]) -> type[nn.Module]:
    """Returns the class that replaces `cls`, a class from a source file, in a patched module."""
    return patch if cls is stock_class(patch) else _stack(cls, patch)


def with_ancestor(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module] | None:
    """Returns `cls` with `new` in place of `old`, which is `cls` or one of its ancestors. None if `cls` or a class
    between the two is from a source file."""
    if cls is old:
        return new
    if old not in cls.__mro__:
        return cls
    bases = tuple(with_ancestor(base, old, new) for base in cls.__bases__)
    if None in bases or not _is_runtime_class(cls):
        return None
    namespace = _namespace(cls, old)
    for copy in _copies.setdefault(cls, weakref.WeakSet()):
        if copy.__bases__ == bases and _is_same(_namespace(copy, new), namespace):
            return copy
    copy = type(cls)(cls.__name__, bases, namespace)
    _copies[cls].add(copy)
    _copies[copy] = weakref.WeakSet([cls])
    return copy


def inherits_forward(cls: type, base: type) -> bool:
    """Returns whether `cls.forward` is `base.forward`, which GradientCheckpointingLayer may have wrapped again for a
    subclass, or only passes its arguments on to it."""
    return _is_same_forward(_forward_in(cls.__mro__), _forward_in(base.__mro__))


def defines_forward(cls: type) -> bool:
    """Returns whether `cls` has a `forward` of its own: `inherits_forward` is False for its next ancestor."""
    return not _is_same_forward(_forward_in(cls.__mro__), _forward_in(cls.__mro__[1:]))


def _forward_in(classes: tuple[type, ...]) -> Callable | None:
    """Returns the first `forward` of these classes that does more than pass its arguments on to the next."""
    found = (cls.forward for cls in classes if "forward" in vars(cls))
    return next((forward for forward in found if not passes_on(forward)), None)


def passes_on(forward: Callable) -> bool:
    """Returns whether `forward` is ``return super().forward(*args, **kwargs)`` and nothing else."""
    while getattr(forward, "__globals__", {}).get("__name__") == _LAYERS and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    code = getattr(forward, "__code__", None)
    if code is None or "super" not in code.co_names or hasattr(forward, "__wrapped__"):
        return False
    definition = parse_function(forward)
    return definition is not None and ast.unparse(definition) == _PASSES_ON


_LAYERS = "transformers.modeling_layers"  # defines GradientCheckpointingLayer
_PASSES_ON = "def forward(self, *args, **kwargs):\n    return super().forward(*args, **kwargs)"


def _is_same_forward(ours: Callable, theirs: Callable) -> bool:
    same_code = getattr(ours, "__code__", ours) is getattr(theirs, "__code__", theirs)
    return same_code and inspect.unwrap(ours) is inspect.unwrap(theirs)


# Links a class that PyTorch created with its copies from `with_ancestor`, in both directions.
_copies: weakref.WeakKeyDictionary[type[nn.Module], weakref.WeakSet] = weakref.WeakKeyDictionary()


def _is_runtime_class(cls: type) -> bool:
    """Returns whether PyTorch created `cls` at run time, rather than defined it in a source file."""
    defined = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
    return cls.__module__.startswith("torch.") and defined is not cls


def _namespace(cls: type[nn.Module], ancestor: type[nn.Module]) -> dict[str, object]:
    """Returns the namespace of a copy of `cls`. It lacks a `forward` that only wraps that of `ancestor`: creating the
    copy wraps it again."""
    left = {"__dict__", "__weakref__"} | ({"forward"} if inherits_forward(cls, ancestor) else set())
    return {name: value for name, value in vars(cls).items() if name not in left}


def _is_same(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())


@functools.cache
def _stack(cls: type[nn.Module], patch: type[nn.Module]) -> type[nn.Module]:
    """Returns a class with `patch` on top of `cls`, a subclass of the class that `patch` replaces. A pickle stores the
    two and calls `_stack` again."""

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return pickled_as(type(cls)(cls.__name__, (patch, cls), namespace), _stack, cls, patch)


def pickled_as(cls: type, find: Callable[..., type], *stored: type) -> type:
    """Returns `cls`, changed so that a pickle of an instance stores the classes `stored` in place of `cls`; unpickling
    calls `find(*stored)` for the class."""

    def __reduce_ex__(self, protocol):
        make, (stored_cls, *arguments), *rest = super(cls, self).__reduce_ex__(protocol)
        if stored_cls is cls:
            return _make, (make, find, stored, *arguments), *rest
        return make, (stored_cls, *arguments), *rest

    cls.__reduce_ex__ = __reduce_ex__
    return cls


def _make(make: Callable, find: Callable[..., type], stored: tuple[type, ...], *arguments: object) -> object:
    return make(find(*stored), *arguments)
