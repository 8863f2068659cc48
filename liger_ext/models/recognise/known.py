"""Looks up code in `known.json`, the table of known code. Most entries name a class or function of liger_ext and the
transformers code that it replaces.

An entry has

- `part`: the code that the digest covers: a "module" (a class's `forward`), "experts" (their method `_apply_gate`), a
  "layer" or a "head" (its difference from Llama's of the same version), Llama's own "llama layer" and "llama head",
  the "loss", a "rope" (the function that applies rotary embeddings), an "activation" (its constructor and `forward`);
- `digest`: of the normal form;
- `replacement`: the class or function that computes the same: "norms.RMSNorm" is in `liger_ext.models.modules`; for an
  activation its name. null: nothing in the code can be fused (`note` gives the reason), or it is Llama's own;
- `attributes`: the attributes of `self` in the order of their first use. A word in capitals is an attribute of the
  replacement, which gets the name in the recognised class as its value (EPS becomes "variance_epsilon"). Any other word
  must be the name itself;
- `options`: attributes of the replacement, or arguments of a rope;
- `example`: a class or function that has this code; `versions`: the versions of transformers in which it was seen.
"""

import functools
import importlib.resources
import json
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from liger_ext.models.patching.forwards import parse_function, stock_function
from liger_ext.models.patching.source import names_read
from liger_ext.models.recognise import normal_form
from liger_ext.models.recognise.reading import (
    Form,
    build_form,
    build_head_form,
    build_layer_form,
    code_read,
    form_by_code,
)

# The name endings of classes that may be in the table. They only decide which classes warnings and reports name.
ENDS = {
    "norm": ("RMSNorm", "RMSNormGated", "L2Norm"),
    "MLP": ("MLP",),
    "experts": ("Experts",),
    "layer": ("DecoderLayer",),
    "head": ("ForCausalLM", "ForConditionalGeneration"),
    "attention": ("Attention",),
}


class Entry(NamedTuple):
    part: str
    digest: str
    replacement: str | None = None
    attributes: tuple[str, ...] = ()
    options: dict[str, object] = {}  # noqa: RUF012 (nobody writes to it)
    example: str = ""
    versions: str = ""
    note: str = ""

    def names(self, form: Form) -> dict[str, str] | None:
        """Returns the class's names for the attributes in capitals; None if another attribute lacks its fixed name."""
        if self.replacement is None or not self.attributes:
            return {}
        pairs = list(zip(self.attributes, form.attributes, strict=True))
        if any(word != name for word, name in pairs if not word.isupper()):
            return None
        return {word: name for word, name in pairs if word.isupper()}


@functools.cache
def entries() -> tuple[Entry, ...]:
    text = importlib.resources.files(__package__).joinpath("known.json").read_text()
    found = json.loads(text)
    return tuple(Entry(**entry | {"attributes": tuple(entry.get("attributes", "").split())}) for entry in found)


@functools.cache
def by_digest() -> dict[tuple[str, str], Entry]:
    return {(entry.part, entry.digest): entry for entry in entries()}


def look_up(cls: type[nn.Module]) -> tuple[Entry, Form] | None:
    """Returns the entry of a class, and its form; None if its code is not known."""
    for part, form in candidate_forms(cls):
        entry = find(part, form)
        if entry is not None:
            return entry, form
    return None


def candidate_forms(cls: type[nn.Module]) -> Iterable[tuple[str, Form | None]]:
    """Yields the parts of the table in which `cls` may be, each with the form that the part's digests cover."""
    yield "module", build_form(cls.forward, cls)
    if knows_loss():
        yield "head", _difference("head", build_head_form, cls, modeling_llama.LlamaForCausalLM)
    yield "layer", _difference("layer", build_layer_form, cls, modeling_llama.LlamaDecoderLayer)
    yield "experts", build_form(getattr(cls, "_apply_gate", None), cls)


def _difference(part: str, build_part_form: Callable, cls: type[nn.Module], llamas: type[nn.Module]) -> Form | None:
    """Returns the difference between the form of `cls` and that of Llama's class. It is empty if `cls` has the form of
    Llama's class in any version. None if `cls` has no form, or the form of Llama's class is not known."""
    form = build_part_form(cls)
    if form is None or find(f"llama {part}", form) is not None:
        return form and form._replace(text="")
    llama_form = form_by_code(build_part_form, llamas, code_read(llamas.forward, llamas))
    if llama_form is None or find(f"llama {part}", llama_form) is None:
        return None
    return form._replace(text=normal_form.difference(llama_form.text, form.text))


def ropes_in(cls: type[nn.Module]) -> dict[str, Entry]:
    """Returns the entries of the known functions that apply rotary embeddings in `cls.forward`, by name. Returns none
    if `forward` has a decorator such as `no_grad`: indexers, which select the keys that attention reads, have it."""
    definition = parse_function(cls.forward)
    if definition is None or definition.decorator_list:
        return {}
    names = [name for name in names_read(definition)[0] if name.startswith("apply_rotary_")]
    entries = {name: find_rope(vars(sys.modules[cls.__module__]).get(name)) for name in names}
    return {name: entry for name, entry in entries.items() if entry is not None}


def find_rope(rope: object) -> Entry | None:
    return find("rope", build_form(stock_function(rope)))


def knows_loss() -> bool:
    """Returns whether transformers' loss of causal language models is the one that ours computes."""
    return find("loss", build_form(loss_utils.ForCausalLMLoss)) is not None


def find(part: str, form: Form | None) -> Entry | None:
    """Returns the entry of a form, if the form has the attributes that the entry requires."""
    entry = None if form is None else by_digest().get((part, form.digest))
    return entry if entry is not None and entry.names(form) is not None else None
