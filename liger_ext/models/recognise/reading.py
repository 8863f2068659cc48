"""The normal forms of functions and classes of transformers, with the functions that they call."""

import ast
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from liger_ext.models.patching.forwards import called_by, definition_of, functions_read
from liger_ext.models.recognise import normal_form


class Form(NamedTuple):
    """A normal form, and the names of the attributes of `self` behind its numbers a0, a1, ..."""

    text: str
    attributes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return normal_form.digest(self.text)


def form_of(function: Callable | None, cls: type[nn.Module] | None = None) -> Form | None:
    """The form of `function`, with the functions of transformers that it calls, and the methods of `cls`.

    None if some of the source is not there to be read.
    """
    texts, attributes = [], {}
    functions = [] if function is None else [inspect.unwrap(function)]
    for each in functions:
        definition = definition_of(each)
        if definition is None:
            return None
        functions += [f for f in called_by(definition, each, cls) if f not in functions]
        texts.append(normal_form.written(normal_form.numbered(definition, attributes, _keeps_its_name)))
    return Form("\n".join(texts), tuple(attributes)) if texts else None


def code_read(function: Callable, cls: type | None = None) -> tuple:
    """All that a form is made of: what is remembered of it holds for as long as nobody edits that."""
    return tuple((f, getattr(f, "__code__", None)) for f in functions_read(function, cls))


def _keeps_its_name(attribute: str) -> bool:
    """Whether an attribute's name says what it is: PyTorch and transformers have defined it."""
    return attribute in ("config", "training") or hasattr(PreTrainedModel, attribute)


def form_of_layer(cls: type[nn.Module]) -> Form | None:
    """That of a decoder layer without the arguments that it gives to its attention; None if it does more with them."""
    definition, attributes = definition_of(cls.forward), {}
    definition = definition and normal_form.of_layer(definition)
    if definition is None:
        return None
    called = called_by(definition, inspect.unwrap(cls.forward), cls)
    definition = normal_form.numbered(definition, attributes, _keeps_its_name, variables=False)
    return Form(_with_codes(definition, called, cls), tuple(attributes))


def form_of_head(cls: type[nn.Module]) -> Form | None:
    """That of a causal language model's head without the arguments that it gives to its model."""
    if not issubclass(cls, PreTrainedModel):
        return None
    definition = definition_of(cls.forward)
    definition = definition and normal_form.of_head(definition)
    if definition is None:
        return None
    return Form(_with_codes(definition, called_by(definition, inspect.unwrap(cls.forward), cls), cls))


def _with_codes(definition: ast.FunctionDef, called: list[Callable], cls: type[nn.Module]) -> str:
    """The text of `definition`, and digests of what it calls, but for functions that a patch calls as well."""
    forms = {f.__name__: form_of(f, cls) for f in called if f.__name__ not in CALLED_BY_PATCHES}
    codes = [f"{name} {form and form.digest}" for name, form in forms.items()]
    return "\n".join([normal_form.written(definition), *codes])


CALLED_BY_PATCHES = "loss_function", "load_balancing_loss_func"


@functools.cache
def form_by_code(form: Callable, cls: type[nn.Module], code: tuple) -> Form | None:
    return form(cls)
