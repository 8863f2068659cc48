"""Analyses functions of other libraries, above all `forward` methods: their module, source, wrappers and the functions
that they call. Also copies a function so that names in it refer to other functions, or a wrapper so that it calls
another function. The originals stay unchanged."""

import ast
import functools
import inspect
import types
from collections.abc import Callable

from torch import nn

from liger_ext.models.patching.names import REMOTE
from liger_ext.models.patching.source import definition_in, names_read, variables_read


def with_globals(function: Callable, **replacements: object) -> Callable:
    """Returns a copy of `function`, decorators included, in which global names refer to `replacements`.

    The copy shares the module's globals, so every other global keeps its meaning, also if it is replaced later. The
    replacements are stored in the module under new names; nothing that was in the module changes.
    """
    inner = inspect.unwrap(function)
    own = {name: f"_liger_ext_{name}" for name in replacements}
    for name, value in replacements.items():
        while inner.__globals__.setdefault(own[name], value) is not value:
            own[name] += "_"  # another copy uses the name
    code = inner.__code__.replace(co_names=tuple(own.get(name, name) for name in inner.__code__.co_names))
    return rewrap(function, inner, _copy_function(inner, code, inner.__closure__))


def with_arguments(function: types.FunctionType, names: list[str]) -> types.FunctionType:
    """Returns a copy of the method `function` whose arguments have these `names`, by which callers may pass them.
    Renames local variables that have one of the names. `function` must not have keyword-only arguments."""
    code, own = function.__code__, ["self", *names]
    if list(code.co_varnames[: code.co_argcount]) == own:
        return function
    if len(own) != code.co_argcount:
        raise TypeError(f"{function.__qualname__} cannot get the arguments {', '.join(names)}")
    variables = (f"{name} of {__name__}" if name in own else name for name in code.co_varnames[code.co_argcount :])
    code = code.replace(co_varnames=(*own, *variables))
    return _copy_function(function, code, function.__closure__)


def leads_to(wrapper: Callable, function: Callable) -> bool:
    """Returns whether `wrapper` is `function`, bound or not, or leads to it through `__wrapped__`."""
    try:
        end = inspect.unwrap(wrapper, stop=lambda level: getattr(level, "__func__", level) is function)
    except ValueError:  # it wraps itself, as pipelines of accelerate do
        return False
    return getattr(end, "__func__", end) is function


def rewrap(wrapper: Callable, old: Callable, new: Callable, instance: object = None) -> Callable:
    """Returns a copy of `wrapper` that leads to `new` where `wrapper` leads to `old`. Does not change `wrapper`.
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
    """Returns foreign code in `function`: a function that replaces `qualname` of `module`, or a decorator around it.
    None if `function` is the one that `module` defines, apart from decorators of the packages `trusted`."""
    while True:
        defined_in = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if defined_in.partition(".")[0] not in trusted:
            return function
        if not hasattr(function, "__wrapped__"):
            break
        if defined_in.startswith(REMOTE):  # a decorator of remote code; recognition reads only those of transformers
            return function
        function = function.__wrapped__
    is_function = isinstance(function, types.FunctionType)  # the package kernels may replace it by a module
    return function if is_function and (defined_in, function.__qualname__) != (module, qualname) else None


def parse_function(function: Callable) -> ast.FunctionDef | None:
    """Returns the syntax tree of a function without its wrappers: see `definition_in`. None if the source is not
    available."""
    try:
        return definition_in(inspect.getsource(inspect.unwrap(function)))
    except (OSError, TypeError):
        return None


def stock_function(found: object) -> object:
    """Returns `found`, or transformers' function if the package kernels has replaced it by a module."""
    if not hasattr(type(found), "kernel_layer_name"):
        return found
    return inspect.getclosurevars(type(found).forward).nonlocals.get("func", found)


def arguments_read(function: Callable) -> set[str]:
    """Returns the names of the arguments that a function's code reads: of all, if the source is not available."""
    definition, names = parse_function(function), inspect.signature(function).parameters.keys()
    return set(names) if definition is None else variables_read(definition) & names


def source_text(function: Callable) -> str | None:
    """Returns a function's code without comments, annotations and decorators; None if the source is not available."""
    definition = parse_function(function)
    if definition is None:
        return None
    definition.decorator_list = []
    return ast.unparse(definition)


def called_by(definition: ast.FunctionDef, function: Callable, cls: type | None = None) -> list[types.FunctionType]:
    """Returns the functions of transformers or remote code, and the methods and properties of `cls`, that the text of
    `function` names. Functions of transformers.utils and torch are left out: they are assumed not to change."""
    names, self_names = names_read(definition)
    found = [function.__globals__.get(name) for name in names]
    found += [inspect.getattr_static(cls, name, None) for name in self_names] if cls else []
    return list(dict.fromkeys(f for f in map(_unwrapped_function, found) if _is_model_code(f)))


def functions_read(function: Callable, cls: type | None = None) -> list[Callable]:
    """Returns `function` without its wrappers, and the functions that `recognise.reading.build_form` reads with it."""
    found = [inspect.unwrap(stock_function(function))]
    for each in found:
        definition = _cached_definition(each.__code__) if isinstance(each, types.FunctionType) else None
        if definition is not None:
            found += [f for f in called_by(definition, each, cls) if f not in found]
    return found


_cached_definition = functools.cache(parse_function)  # the keys are code objects, which are immutable


def _unwrapped_function(found: object) -> object:
    """Unwraps a method or a property: returns the function that runs."""
    found = stock_function(found)
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    return inspect.unwrap(found) if callable(found) and not isinstance(found, type) else found


def _is_model_code(found: object) -> bool:
    module = found.__module__ if isinstance(found, types.FunctionType) else ""
    return module.startswith(("transformers.", REMOTE)) and not module.startswith("transformers.utils.")


def methods_called(cls: type[nn.Module]) -> list[str]:
    """Returns the names of methods of `cls` that the `forward` of transformers' class calls, also through others."""
    inherited = (vars(c)["forward"] for c in cls.__mro__ if "forward" in vars(c) and c is not nn.Module)
    functions, found = list(inherited), []
    for function in functions:
        for name in _self_attributes(function):
            method = inspect.getattr_static(cls, name, None)
            is_method = callable(method) and not isinstance(method, type) and not hasattr(nn.Module, name)
            if is_method and name not in found:
                found.append(name)
                functions.append(method)
    return found


def _self_attributes(function: Callable) -> list[str]:
    """Returns the attributes of `self` that a method names. Returns none for a patch's method, since the method that it
    replaces is read as well."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, types.FunctionType):
        return []
    if function.__globals__.get("__name__", "").startswith("liger_ext."):
        return []
    text = source_text(function)
    if text is None:  # without source: every attribute and global that the bytecode names
        return list(function.__code__.co_names)
    reads = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return list(dict.fromkeys(node.attr for node in reads if ast.unparse(node.value) == "self"))


def describe(function: Callable) -> str:
    """Returns the place where a function is defined, for messages. A decorator may copy its name, but not its code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return f"a {type(function).__module__}.{type(function).__qualname__}"
    return f"{code.co_name} ({code.co_filename}, line {code.co_firstlineno})"


def _in_its_place(value: object, inner: Callable, replaced: Callable, instance: object) -> Callable | None:
    """Returns `replaced` if `value` is `inner`, bound to `instance` if `value` is bound to it; else None."""
    if value is inner:
        return replaced
    if isinstance(value, types.MethodType) and value.__func__ is inner and value.__self__ is instance:
        return types.MethodType(replaced, instance)
    return None


def _contents(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _copy_function(function: types.FunctionType, code: types.CodeType, closure: tuple | None) -> types.FunctionType:
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__
    return copy
