"""Puts the code of a class of transformers in the place of another class's, as an edit of transformers would: the class
and its functions stay the same objects, and their code changes."""

import inspect
import types

import pytest
from torch import nn

from liger_ext.models.patching.forwards import functions_read


def put_class(patch: pytest.MonkeyPatch, cls: type[nn.Module], other: type[nn.Module]) -> None:
    """Gives `cls` the `forward` of `other`, the methods that this calls, and the attributes of the class `other`, until
    `patch` is undone."""
    read = functions_read(other.forward, other)
    for name, found in inspect.getmembers_static(other):
        if not name.startswith("_") and not callable(found) and not hasattr(cls, name):
            patch.setattr(cls, name, found, raising=False)
            continue
        function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
        if function not in read:
            continue
        if name in vars(cls):
            _put(patch, inspect.unwrap(vars(cls)[name]), function)
        else:
            wrapper = type(found) if isinstance(found, staticmethod | classmethod | property) else lambda f: f
            copy = _copied(patch, function, vars(inspect.getmodule(cls)), f"{cls.__qualname__}.{name}")
            patch.setattr(cls, name, wrapper(copy), raising=False)


def _put(patch: pytest.MonkeyPatch, here: types.FunctionType, there: types.FunctionType) -> None:
    for name in ("__code__", "__defaults__", "__kwdefaults__"):
        patch.setattr(here, name, getattr(there, name))
    _put_globals(patch, here.__globals__, there)


def _put_globals(patch: pytest.MonkeyPatch, names: dict[str, object], there: types.FunctionType) -> None:
    """Gives the names that the code of `there` reads the same meaning in the module with the globals `names`."""
    for name in there.__code__.co_names:  # and names of attributes, such as __name__
        if name.startswith("__"):
            continue
        value, here = there.__globals__.get(name), names.get(name)
        value, here = (inspect.unwrap(each) if callable(each) else each for each in (value, here))
        if value is None or value is here or getattr(value, "__code__", 0) is getattr(here, "__code__", 1):
            continue
        if not isinstance(value, types.FunctionType) or value.__module__ != there.__module__:
            patch.setitem(names, name, value)
        elif isinstance(here, types.FunctionType):
            _put(patch, here, value)
        else:
            patch.setitem(names, name, _copied(patch, value, names, name))


def _copied(
    patch: pytest.MonkeyPatch, function: types.FunctionType, names: dict[str, object], qualname: str
) -> types.FunctionType:
    """Returns a copy of `function` as if the module with the globals `names` had defined it."""
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__module__, copy.__qualname__ = function.__kwdefaults__, names["__name__"], qualname
    _put_globals(patch, names, function)
    return copy
