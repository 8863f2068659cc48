"""Functions of other libraries: whose they are, what they do, what wraps them, and copies that call something else."""

import ast
import functools
import inspect
import types
from collections.abc import Callable

from torch import nn

from liger_ext.models.patching.names import REMOTE
from liger_ext.models.patching.source import definition_in, names_read


def with_globals(function: Callable, **replacements: object) -> Callable:
    """A copy of `function`, decorators included, in which global names mean `replacements`.

    Every other global keeps its meaning, also when it is replaced later: the copy lives in the same module. What the
    names mean is kept there under names of its own, and nothing that was in the module changes.
    """
    inner = inspect.unwrap(function)
    own = {name: f"_liger_ext_{name}" for name in replacements}
    for name, value in replacements.items():
        while inner.__globals__.setdefault(own[name], value) is not value:
            own[name] += "_"  # another copy's name
    code = inner.__code__.replace(co_names=tuple(own.get(name, name) for name in inner.__code__.co_names))
    return rewrap(function, inner, _copy_function(inner, code, inner.__closure__))


def with_arguments(function: types.FunctionType, names: list[str]) -> types.FunctionType:
    """A copy of `function`, a method without arguments by name alone, with other names for its arguments: callers may
    pass them by name. A variable that has one of these gets another."""
    code, own = function.__code__, ["self", *names]
    if list(code.co_varnames[: code.co_argcount]) == own:
        return function
    if len(own) != code.co_argcount:
        raise TypeError(f"{function.__qualname__} cannot get the arguments {', '.join(names)}")
    variables = (f"{name} of {__name__}" if name in own else name for name in code.co_varnames[code.co_argcount :])
    code = code.replace(co_varnames=(*own, *variables))
    return _copy_function(function, code, function.__closure__)


def leads_to(wrapper: Callable, function: Callable) -> bool:
    """Whether `wrapper` is `function`, bound or not, or decorators around it that say so by `__wrapped__`."""
    try:
        end = inspect.unwrap(wrapper, stop=lambda level: getattr(level, "__func__", level) is function)
    except ValueError:  # it wraps itself, as pipelines of accelerate do
        return False
    return getattr(end, "__func__", end) is function


def rewrap(wrapper: Callable, old: Callable, new: Callable, instance: object = None) -> Callable:
    """A copy of `wrapper`, which leads to the function `old`, that leads to `new`. The wrapper itself stays as it is.
    Decorators of a method of `instance` may hold `old` bound to it, as TRL's do.

    Raises:
        TypeError: a decorator on the way keeps what it calls neither in its closure nor in an attribute.
    """
    if wrapper is old:
        return new
    if isinstance(wrapper, types.MethodType):
        return types.MethodType(rewrap(wrapper.__func__, old, new, wrapper.__self__), wrapper.__self__)
    inner = wrapper.__wrapped__
    replaced = rewrap(inner, old, new, instance)
    if isinstance(wrapper, types.FunctionType):
        held = wrapper.__closure__ or ()
        now = [_in_its_place(_contents(cell), inner, replaced, instance) for cell in held]
        cells = tuple(cell if value is None else types.CellType(value) for cell, value in zip(held, now, strict=True))
        found = any(ours is not theirs for ours, theirs in zip(cells, held, strict=True))
        copy = _copy_function(wrapper, wrapper.__code__, cells or None)
    else:
        attributes = {k: v for k, v in getattr(wrapper, "__dict__", {}).items() if k != "__wrapped__"}
        found = any(value is inner for value in attributes.values())
        # Not by copy.copy, which accelerate's object refuses.
        copy = object.__new__(type(wrapper)) if found else wrapper
        vars(copy).update({name: replaced if value is inner else value for name, value in attributes.items()})
    if not found:
        raise TypeError(f"{wrapper!r} keeps the function that it wraps neither in its closure nor in an attribute")
    copy.__wrapped__ = replaced
    return copy


def find_foreign(function: Callable, module: str, qualname: str, trusted: tuple[str, ...]) -> Callable | None:
    """What makes `function` another than the one that `module` defines as `qualname`: a function put in its place, or a
    decorator put around it. None if it is that one; decorators of the packages `trusted` may be around it."""
    while True:
        defined_in = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if defined_in.partition(".")[0] not in trusted:
            return function
        if not hasattr(function, "__wrapped__"):
            break
        if defined_in.startswith(REMOTE):  # a decorator; by the names of transformers' own, recognition goes
            return function
        function = function.__wrapped__
    is_function = isinstance(function, types.FunctionType)  # not where the package kernels makes a module of it
    return function if is_function and (defined_in, function.__qualname__) != (module, qualname) else None


def definition_of(function: Callable) -> ast.FunctionDef | None:
    """The syntax tree of a function, under the wrappers around it: see `definition_in`. None if its source is not there
    to be read."""
    try:
        return definition_in(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None


def written_function(found: object) -> object:
    """`found`, or the function that transformers has written, if the package kernels has made a module of it."""
    if not hasattr(type(found), "kernel_layer_name"):
        return found
    return inspect.getclosurevars(type(found).forward).nonlocals.get("func", found)


def text_of(function: Callable) -> str | None:
    """A function's code without comments, annotations and decorators. None if its source is not there to be read."""
    definition = definition_of(function)
    if definition is None:
        return None
    definition.decorator_list = []
    return ast.unparse(definition)


def called_by(definition: ast.FunctionDef, function: Callable, cls: type | None = None) -> list[types.FunctionType]:
    """The functions of transformers or of a model's own code, and the methods and properties of `cls`, that the text of
    `function` names. What is in transformers.utils is taken for granted, as torch is."""
    names, of_self = names_read(definition)
    found = [function.__globals__.get(name) for name in names]
    found += [inspect.getattr_static(cls, name, None) for name in of_self] if cls else []
    return list(dict.fromkeys(f for f in map(_function_of, found) if _is_of_models(f)))


def functions_read(function: Callable, cls: type | None = None) -> list[Callable]:
    """`function`, under the wrappers around it, and what `recognise.reading.form_of` reads with it."""
    found = [inspect.unwrap(written_function(function))]
    for each in found:
        definition = _definition_of_code(each.__code__) if isinstance(each, types.FunctionType) else None
        if definition is not None:
            found += [f for f in called_by(definition, each, cls) if f not in found]
    return found


_definition_of_code = functools.cache(definition_of)  # by code objects, which nobody can edit


def _function_of(found: object) -> object:
    """Unwraps a method or a property: returns the function that runs."""
    found = written_function(found)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found) if callable(found) and not isinstance(found, type) else found


def _is_of_models(found: object) -> bool:
    module = found.__module__ if isinstance(found, types.FunctionType) else ""
    return module.startswith(("transformers.", REMOTE)) and not module.startswith("transformers.utils.")


def methods_called(cls: type[nn.Module]) -> list[str]:
    """The names of methods of `cls` that the `forward` of transformers' class calls, or that these call."""
    inherited = (vars(c)["forward"] for c in cls.__mro__ if "forward" in vars(c) and c is not nn.Module)
    functions, found = list(inherited), []
    for function in functions:
        for name in _names_read_of_self(function):
            method = inspect.getattr_static(cls, name, None)
            is_method = callable(method) and not isinstance(method, type) and not hasattr(nn.Module, name)
            if is_method and name not in found:
                found.append(name)
                functions.append(method)
    return found


def _names_read_of_self(function: Callable) -> list[str]:
    """Of a method: which attributes of its module it names. None of a patch's, as the class that it replaces is asked,
    too."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        return []
    if function.__globals__.get("__name__", "").startswith("liger_ext."):
        return []
    text = text_of(function)
    if text is None:  # the source is not there: what it names of anything
        return list(function.__code__.co_names)
    reads = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return list(dict.fromkeys(node.attr for node in reads if ast.unparse(node.value) == "self"))


def describe(function: Callable) -> str:
    """Where a function is defined, for who looks for it: decorators of others take over its name, but not its code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"a {type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_name} ({code.co_filename}, line {code.co_firstlineno})"


def _in_its_place(value: object, inner: Callable, replaced: Callable, instance: object) -> Callable | None:
    """`replaced` for `inner`, and bound to `instance` where that is; None for anything else."""
    if value is inner:
        return replaced
    if isinstance(value, types.MethodType) and value.__func__ is inner and value.__self__ is instance:
        return types.MethodType(replaced, instance)
    return None


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return None


def _copy_function(function: types.FunctionType, code: types.CodeType, closure: tuple | None) -> types.FunctionType:
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    return copy
