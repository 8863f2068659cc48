"""Writes the stubs (`*.pyi`) of modules whose names are made at run time, for type checkers: `make stubs`.

Most lines hand on a name from the file in which it is defined. Written out are patch functions, which no file defines,
and functions whose result depends on an argument: one overload for each result. tests/test_types.py fails when a stub
is not what this makes of the installed signatures.
"""

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import liger_ext
from liger_ext import compat, functional, models, modules, ops
from liger_ext.models.patch import PatchHandle

PACKAGE = Path(liger_ext.__file__).parent
_HEAD = '"""Made by tests/stubs.py (`make stubs`)."""\n\n'
_FILES = [path.stem for path in sorted((PACKAGE / "ops").glob("[a-z]*.py"))]
_OF_FLAGS = "Tensor | CrossEntropyOutput"  # the first where no flag is True


def stubs() -> dict[Path, str]:
    """The text of each stub."""
    patching = {f"apply_liger_kernel_to_{family}" for family in models.FAMILIES}
    parts = {module.__name__.rpartition(".")[2]: module for module in (functional, modules, compat)}
    texts = {name: _HEAD + _imports(module.__all__) + _overloads(module.__all__) for name, module in parts.items()}
    texts["compat"] += "\ndef install() -> PatchHandle: ...\n"
    texts["compat"] = texts["compat"].replace(_HEAD, f"{_HEAD}from liger_ext.models.patch import PatchHandle\n")
    own = [name for name in models.__all__ if name not in patching]
    texts["models/__init__"] = (
        f"{_HEAD}from torch import nn\n\n"
        + "".join(f"from liger_ext.models.{_file_of_model(n)} import {n} as {n}\n" for n in own)
        + "\nOLDEST_TRANSFORMERS: str\nNEWEST_TRANSFORMERS: str\nFAMILIES: dict[str, tuple[str, ...]]\n"
        + "".join(f"\ndef {name}{_signature(getattr(models, name))}: ...\n" for name in sorted(patching))
    )
    texts["__init__"] = _HEAD + "from liger_ext import compat as compat, functional as functional, modules as modules\n"
    of_models = [name for name in liger_ext.__all__ if name in models.__all__]
    texts["__init__"] += "".join(f"from liger_ext.models import {name} as {name}\n" for name in of_models)
    for name, module in parts.items():
        texts["__init__"] += "".join(f"from liger_ext.{name} import {n} as {n}\n" for n in module.__all__)
    texts["__init__"] += "\n__version__: str\n"
    return {PACKAGE / f"{name}.pyi": text for name, text in texts.items()}


def _imports(names: list[str]) -> str:
    """The lines of what is not written out, and of the types of what is."""
    written = [name for name in names if _has_overloads(getattr(ops, name))]
    types = []
    if written:
        types = ["from typing import Literal, overload", "import torch", "from torch import Tensor"]
        if any("CrossEntropyOutput" in str(inspect.signature(getattr(ops, name))) for name in written):
            types += [_handed_on(name) for name in ("CountedRows", "CrossEntropyOutput") if name not in names]
    return "\n".join(types + [_handed_on(name) for name in names if name not in written]) + "\n"


def _handed_on(name: str) -> str:
    files = (file for file in _FILES if name in importlib.import_module(f"liger_ext.ops.{file}").__all__)
    return f"from liger_ext.ops.{next(files)} import {name} as {name}"


def _file_of_model(name: str) -> str:
    return inspect.getmodule(getattr(models, name)).__name__.rpartition(".")[2]


def _has_overloads(value: object) -> bool:
    return inspect.isfunction(value) and any(_variants(inspect.signature(value)))


def _overloads(names: list[str]) -> str:
    text = ""
    for name in names:
        if _has_overloads(getattr(ops, name)):
            for variant in _variants(inspect.signature(getattr(ops, name))):
                text += f"\n@overload\ndef {name}{_text(variant)}: ...\n"
    return text


def _variants(signature: inspect.Signature) -> Iterator[inspect.Signature]:
    """The overloads of a function; none where its result does not depend on an argument."""
    parameters = signature.parameters
    flags = [name for name in parameters if name.startswith("return_")]
    if signature.return_annotation == _OF_FLAGS and flags:
        tensor, output = _OF_FLAGS.split(" | ")
        yield _with(signature, tensor, dict.fromkeys(flags, "Literal[False]"))
        for flag in flags:
            yield _with(signature, output, {flag: "Literal[True]"}, by_name=flag)
        yield signature
    elif signature.return_annotation == "tuple[Tensor, Tensor | None]":
        yield _with(signature, "tuple[Tensor, Tensor]", {"k": "Tensor"})
        yield _with(signature, "tuple[Tensor, None]", {"k": "None"})
        yield signature


def _with(
    signature: inspect.Signature, result: str, types: dict[str, str], by_name: str | None = None
) -> inspect.Signature:
    """With other types. The argument `by_name`, and those behind it, are given by name, and it has no default."""
    parameters, kind = [], None
    for parameter in signature.parameters.values():
        kind = parameter.KEYWORD_ONLY if parameter.name == by_name else kind
        default = parameter.empty if parameter.name == by_name else parameter.default
        annotation = types.get(parameter.name, parameter.annotation)
        kind_now = kind or parameter.kind
        parameters.append(parameter.replace(kind=kind_now, default=default, annotation=annotation))
    return signature.replace(parameters=parameters, return_annotation=result)


def _signature(function: object) -> str:
    return _text(inspect.signature(function))


def _text(signature: inspect.Signature) -> str:
    """With `...` for every default but None, numbers and text."""
    parameters, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            parameters.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parameters.append(f"{parameter.name}: {_type(parameter.annotation)}{default}")
    return f"({', '.join(parameters)}) -> {_type(signature.return_annotation)}"


def _type(annotation: object) -> str:
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("torch.nn.modules.module.", "nn.")


if __name__ == "__main__":
    assert PatchHandle.__name__ in stubs()[PACKAGE / "compat.pyi"]
    for path, text in stubs().items():
        path.write_text(text)
