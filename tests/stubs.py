"""Writes the type stubs of the modules whose names are created at run time, from these names and their signatures.

Run `make stubs` after a change of a public name or signature; tests/test_types.py compares the generated text with the
files. The stubs add two things to the sources: overloads of functions whose result type depends on an argument, and the
types of a module's call, which are those of its `forward`.
"""

import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from torch import nn

import liger_ext
from liger_ext import compat, functional, models, modules, ops

PACKAGE = Path(liger_ext.__file__).parent
HEAD = "# Made by `make stubs`: see tests/stubs.py.\n# fmt: off\n# ruff: noqa\n\n"
TYPES = "from typing import Generic, Literal, overload\n\nimport torch\nfrom torch import Tensor\n"
LOSS, LOG_PROBS = "Tensor | CrossEntropyOutput", "Tensor | LogProbsOutput"
ROTATED = "tuple[Tensor, Tensor | None]"


def overloads(signature: inspect.Signature, result: str) -> Iterator[tuple[inspect.Signature, str]]:
    """Yields (signature, result type); for a loss and for `rope` one for each type of the result."""
    asked = [name for name, p in signature.parameters.items() if p.default is False]
    flags = [name for name in asked if result == LOG_PROBS or name.startswith("return_")]
    if result in (LOSS, LOG_PROBS) and flags:
        yield annotated(signature, dict.fromkeys(flags, "Literal[False]")), "Tensor"
        yield annotated(signature, dict.fromkeys(flags, "Literal[True]")), result.removeprefix("Tensor | ")
    if result == ROTATED:
        yield annotated(signature, {"k": "Tensor"}), "tuple[Tensor, Tensor]"
        yield annotated(signature, {"k": "None"}), "tuple[Tensor, None]"
    else:
        yield signature, result


def annotated(signature: inspect.Signature, annotations: dict[str, str]) -> inspect.Signature:
    """Replaces annotations of a signature. The defaults of these parameters become `...`, as they may not have the new
    type."""
    parameters = []
    for name, p in signature.parameters.items():
        if name in annotations:
            p = p.replace(annotation=annotations[name], default=p.default if p.default is p.empty else ...)
        parameters.append(p)
    return signature.replace(parameters=parameters)


def function_stub(name: str, function: Callable) -> str:
    signature = inspect.signature(function)
    found = list(overloads(signature, annotation_text(signature.return_annotation)))
    return "".join("@overload\n" * (len(found) > 1) + definition(name, *one) for one in found)


def definition(name: str, signature: inspect.Signature, result: str) -> str:
    """Returns the stub of a function, wrapped to 120 characters instead of one parameter per line."""
    parts, by_name = [], False
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and not by_name:
            parts, by_name = [*parts, "*"], True
        annotation = "" if p.annotation is p.empty else f": {annotation_text(p.annotation)}"
        default = "" if p.default is p.empty else " = ..." if p.default is ... else f" = {p.default!r}"
        parts.append(p.name + annotation + default)
    line = f"def {name}({', '.join(parts)}) -> {result}: ...\n"
    if len(line) <= 116:
        return line
    unbroken = ", ".join(part.replace(" ", "\0") for part in parts)
    lines = textwrap.fill(unbroken, 115, initial_indent="    ", subsequent_indent="    ").replace("\0", " ")
    return f"def {name}(\n{lines},\n) -> {result}: ...\n"


def annotation_text(annotation: object) -> str:
    """Returns an annotation as the source writes it: names without their modules."""
    if isinstance(annotation, str):
        return annotation
    return " | ".join(part.rpartition(".")[2] for part in inspect.formatannotation(annotation).split(" | "))


def module_stub(cls: type[nn.Module]) -> str:
    """Returns the stub of a module: a subclass of the class in `ops` and of its public base classes."""
    name, forward = cls.__name__, inspect.signature(cls.forward)
    bases = [f"_{name}", *(base.__name__ for base in cls.__bases__ if base.__name__ in modules.__all__)]
    methods, result = [], annotation_text(forward.return_annotation)
    if result == LOSS:
        bases, result = [*bases, "Generic[_Result]"], "_Result"
        for signature, made in overloads(inspect.signature(cls.__init__), LOSS):
            signature = annotated(signature, {"self": f"{name}[{made}]"})
            methods.append("@overload\n" + definition("__init__", signature, "None"))
    if "forward" in vars(cls):
        methods.append(definition("__call__", forward, result))
    body = "\n" + textwrap.indent("".join(methods), "    ") if methods else " ...\n"
    return f"class {name}({', '.join(bases)}):{body}"


def listed(space: ModuleType) -> str:
    """Returns the text of its `__all__`."""
    names = textwrap.fill(", ".join(f'"{name}"' for name in space.__all__), 115)
    return f"__all__ = [\n{textwrap.indent(names, '    ')},\n]\n"


def origins() -> dict[str, str]:
    """Returns the module of each public name in `ops`."""
    files = [f"{ops.__name__}.{file.name}" for file in pkgutil.iter_modules(ops.__path__)]
    return {name: file for file in files for name in getattr(importlib.import_module(file), "__all__", ())}


def functions_stub(space: ModuleType) -> str:
    """Returns the stub of `functional` or `compat`."""
    files, imports, made = origins(), [], []
    for name in space.__all__:
        text = function_stub(name, getattr(space, name)) if inspect.isfunction(getattr(space, name)) else ""
        if text.startswith("@overload"):
            made.append(text)
        else:
            imports.append(f"from {files[name]} import {name} as {name}\n")
    if space is compat:
        imports.append("from liger_ext.functional import CountedRows, CrossEntropyOutput\n")
        imports.append("from liger_ext.models.patching.handle import PatchHandle as _PatchHandle\n")
        made.append(function_stub("install", compat.install))
    return "\n".join([HEAD + TYPES, "".join(sorted(imports)), listed(space), *made])


def modules_stub() -> str:
    files = origins()
    types = "from typing_extensions import TypeVar\n\nfrom liger_ext.functional import CrossEntropyOutput\n"
    imports = [f"from {files[name]} import {name} as _{name}\n" for name in modules.__all__]
    classes = sorted((getattr(modules, name) for name in modules.__all__), key=lambda cls: len(cls.__mro__))
    variable = f'_Result = TypeVar("_Result", bound={LOSS}, default=Tensor)\n'
    head = HEAD + TYPES + types + "".join(imports)
    return "\n".join([head, listed(modules), variable, *map(module_stub, classes)])


def models_stub() -> str:
    """Returns the stub of `models`, where each family's function has its own arguments."""
    imports, made = [], []
    for name, file in models._MODULES.items():
        if file == "families":
            made.append(function_stub(name, getattr(models, name)))
        else:
            imports.append(f"from liger_ext.models.{file} import {name} as {name}\n")
    return "".join([HEAD, "from torch.nn import Module\n\n", *sorted(imports), "\n", listed(models), "\n", *made])


def package_stub() -> str:
    spaces = [f"from liger_ext import {space} as {space}\n" for space in ("compat", "functional", "losses", "modules")]
    names = [f"from liger_ext.{space} import *\n" for space in ("compat", "functional", "modules")]
    patching = [f"from liger_ext.models import {name} as {name}\n" for name in liger_ext._PATCHING]
    return "".join([HEAD, *spaces, *names, *patching, "\n", listed(liger_ext), "__version__: str\n"])


def stubs() -> dict[Path, str]:
    """Returns the text of each file by path."""
    return {
        PACKAGE / "__init__.pyi": package_stub(),
        PACKAGE / "compat.pyi": functions_stub(compat),
        PACKAGE / "functional.pyi": functions_stub(functional),
        PACKAGE / "models/__init__.pyi": models_stub(),
        PACKAGE / "modules.pyi": modules_stub(),
    }


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
