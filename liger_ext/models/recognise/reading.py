"""Builds the normal forms of transformers' functions and classes, with the functions that they call."""

import ast
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from liger_ext.models.patching.forwards import called_by, functions_read, parse_function
from liger_ext.models.recognise import normal_form


class Form(NamedTuple):
    """A normal form, and the names of the attributes of `self` behind its numbers a0, a1, ..."""

    text: str
    attributes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return normal_form.digest(self.text)


def build_form(function: Callable | None, cls: type[nn.Module] | None = None) -> Form | None:
    """Returns the form of `function`, with the functions of transformers and the methods of `cls` that it calls.

    None if `function` is None, or if some of the source is not available.
    """
    texts, attributes = [], {}
    functions = [] if function is None else [inspect.unwrap(function)]
    for each in functions:
        definition = parse_function(each)
        if definition is None:
            return None
        functions += [f for f in called_by(definition, each, cls) if f not in functions]
        texts.append(normal_form.dump_tree(normal_form.number_names(definition, attributes, _keeps_its_name)))
    return Form("\n".join(texts), tuple(attributes)) if texts else None


def code_read(function: Callable, cls: type | None = None) -> tuple:
    """Returns the functions and code objects that a form is built from: the key of a cache of forms, which is valid
    until somebody edits one of them."""
    return tuple((f, getattr(f, "__code__", None)) for f in functions_read(function, cls))


def _keeps_its_name(attribute: str) -> bool:
    """Returns whether an attribute keeps its name in the form, because PyTorch or transformers defines its meaning."""
    return attribute in ("config", "training") or hasattr(PreTrainedModel, attribute)


def build_layer_form(cls: type[nn.Module]) -> Form | None:
    """Returns the form of a decoder layer without the arguments that it passes to its attention; None if it uses them
    in another way."""
    definition, attributes = parse_function(cls.forward), {}
    definition = definition and normal_form.reduce_layer(definition)
    if definition is None:
        return None
    called = called_by(definition, inspect.unwrap(cls.forward), cls)
    definition = normal_form.number_names(definition, attributes, _keeps_its_name, variables=False)
    return Form(_with_codes(definition, called, cls), tuple(attributes))


def build_head_form(cls: type[nn.Module]) -> Form | None:
    """Returns the form of a causal language model's head without the arguments that it passes to its model; None if it
    uses them in another way, or if `cls` is no PreTrainedModel."""
    if not issubclass(cls, PreTrainedModel):
        return None
    definition = parse_function(cls.forward)
    definition = definition and normal_form.reduce_head(definition)
    if definition is None:
        return None
    return Form(_with_codes(definition, called_by(definition, inspect.unwrap(cls.forward), cls), cls))


def _with_codes(definition: ast.FunctionDef, called: list[Callable], cls: type[nn.Module]) -> str:
    """Returns the text of `definition`, and digests of the functions that it calls, except those that a patch calls or
    replaces."""
    forms = {f.__name__: build_form(f, cls) for f in called if f.__name__ not in CALLED_BY_PATCHES}
    codes = [f"{name} {form and form.digest}" for name, form in forms.items()]
    return "\n".join([normal_form.dump_tree(definition), *codes])


CALLED_BY_PATCHES = "loss_function", "load_balancing_loss_func"


@functools.cache
def form_by_code(form: Callable, cls: type[nn.Module], code: tuple) -> Form | None:
    return form(cls)
