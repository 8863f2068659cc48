"""Classes with a patch among their ancestors: made of those without it, and made into those again.

PyTorch makes classes of a module's class while a program runs: FSDP2's `fully_shard` puts `FSDP<Name>` on top of it,
`torch.nn.utils.parametrize` a `Parametrized<Name>`, which it takes off again. Nobody has written these, so that a copy
with another ancestor is as good: a patch goes below them, as if it had been there first, and comes out again. A class
that somebody has written stays what it is. A patch goes on top of it, and one that lies below it cannot be taken out:
`super()` in its methods finds its way by the class itself, and the copy would not be the class that its author knows.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable

from torch import nn


def stock_class(patch: type[nn.Module]) -> type[nn.Module]:
    """The class that `patch` replaces: its only base, or the last, behind a mixin of ours."""
    return patch.__bases__[-1]


def written_class(cls: type[nn.Module], stock: type[nn.Module]) -> type[nn.Module]:
    """`cls`, a subclass of `stock`; the first of its ancestors that somebody has written, if PyTorch has made it."""
    while _is_made_by_torch(cls):
        cls = next(base for base in cls.__bases__ if issubclass(base, stock))
    return cls


def with_patch(cls: type[nn.Module], patch: type[nn.Module]) -> type[nn.Module]:
    """What takes the place of `cls`, which somebody has written, in a patched module."""
    return patch if cls is stock_class(patch) else _stack(cls, patch)


def with_ancestor(cls: type[nn.Module], old: type[nn.Module], new: type[nn.Module]) -> type[nn.Module] | None:
    """`cls` with `new` in the place of `old`, which is `cls` or one of its ancestors. None if somebody has written
    a class on the way."""
    if cls is old:
        return new
    if old not in cls.__mro__:
        return cls
    bases = tuple(with_ancestor(base, old, new) for base in cls.__bases__)
    if None in bases or not _is_made_by_torch(cls):
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
    """Whether `cls.forward` is `base`'s, or that one wrapped again by GradientCheckpointingLayer for a subclass."""
    ours, theirs = cls.forward, base.forward
    same_code = getattr(ours, "__code__", ours) is getattr(theirs, "__code__", theirs)
    return same_code and inspect.unwrap(ours) is inspect.unwrap(theirs)


# Classes that PyTorch has made: which were made of which by `with_ancestor`, in both directions.
_copies: weakref.WeakKeyDictionary[type[nn.Module], weakref.WeakSet] = weakref.WeakKeyDictionary()


def _is_made_by_torch(cls: type) -> bool:
    """Whether PyTorch has made `cls` of another class, rather than defined it."""
    defined = getattr(sys.modules.get(cls.__module__), cls.__name__, None)
    return cls.__module__.startswith("torch.") and defined is not cls


def _namespace(cls: type[nn.Module], ancestor: type[nn.Module]) -> dict[str, object]:
    """What a copy of `cls` has. A `forward` that wraps that of `ancestor` is made again with the copy."""
    left = {"__dict__", "__weakref__"} | ({"forward"} if inherits_forward(cls, ancestor) else set())
    return {name: value for name, value in vars(cls).items() if name not in left}


def _is_same(one: dict[str, object], other: dict[str, object]) -> bool:
    return one.keys() == other.keys() and all(other[name] is value for name, value in one.items())


@functools.cache
def _stack(cls: type[nn.Module], patch: type[nn.Module]) -> type[nn.Module]:
    """`patch` on top of `cls`, a subclass of what `patch` replaces. Pickles have these two, and make it again."""

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return pickled_as(type(cls)(cls.__name__, (patch, cls), namespace), _stack, cls, patch)


def pickled_as(made: type, find: Callable[..., type], *of: type) -> type:
    """`made`, of whose instances a pickle has the classes `of` in the place of the class, which is `find(*of)`."""

    def __reduce_ex__(self, protocol):
        make, (cls, *arguments), *rest = super(made, self).__reduce_ex__(protocol)
        return (_make, (make, find, of, *arguments), *rest) if cls is made else (make, (cls, *arguments), *rest)

    made.__reduce_ex__ = __reduce_ex__
    return made


def _make(make: Callable, find: Callable[..., type], of: tuple[type, ...], *arguments: object) -> object:
    return make(find(*of), *arguments)
