"""Builds the patch of a transformers class: a subclass that replaces the class of a module.

A patch inherits from one of our mixins (`replacement` in the table of known code) and from the transformers class. The
mixin reads the module's attributes by names that the table binds (EPS = "variance_epsilon"). No class of the installed
transformers is patched before its code is recognised. This includes Llama's classes, although `liger_ext.models.llama`
defines their patches by hand.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from liger_ext.models import llama
from liger_ext.models.modules.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.modules.decoder import Attention, DecoderLayer
from liger_ext.models.modules.norms import Norm
from liger_ext.models.modules.rope import known_rope
from liger_ext.models.patching.calls import is_patch
from liger_ext.models.patching.classes import defines_forward, passes_on, pickled_as, stock_class
from liger_ext.models.patching.forwards import functions_read, parse_function, source_text, with_arguments
from liger_ext.models.patching.names import MODELS, REMOTE, pickle_name
from liger_ext.models.patching.swap import find_functions, find_replacements, replaces
from liger_ext.models.recognise.known import ENDS, Entry, look_up, ropes_in
from liger_ext.models.recognise.reading import code_read


def find_patch(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Returns the patch of a transformers class; None if its code is not known, or nothing in it can be fused."""
    llama_patch = find_llama_patch(cls)
    if llama_patch and any(find_replacements(llama_patch)):
        return llama_patch  # `swap_classes` refuses this patch and names the code that replaced transformers'
    code = code_read(cls.forward, cls)
    if llama_patch is llama.LlamaModel:
        return llama_patch if code == _LLAMA_CODE[llama_patch] and llama.knows_model(cls) else None
    found = _recognised(cls)
    if found is None or found.kind is None:
        return None
    if llama_patch and code == _LLAMA_CODE[llama_patch] and _computes(llama_patch, found):
        return llama_patch
    return _build_patch(cls, found.kind, tuple(found.attributes.items()), tuple(found.functions.items()), code)


@dataclasses.dataclass
class Recognised:
    """The result of recognition for a transformers class."""

    kind: type | None  # the mixin; None: nothing in the class can be fused
    attributes: dict[str, object]  # class attributes of the patch
    functions: dict[str, Callable]  # replacements of global functions that the class's `forward` calls, by name


def _computes(patch: type[nn.Module], found: Recognised) -> bool:
    """Returns whether `patch`, which `liger_ext.models.llama` defines by hand, is what `_build_patch` would build."""
    alike = all(getattr(patch, name) == value for name, value in found.attributes.items())
    return patch.__bases__[0] is found.kind and alike and find_functions(patch) == found.functions


def recognise(cls: type[nn.Module]) -> Recognised | None:
    """Looks up the code of `cls`; returns None if it is not known, or if remote code uses a name of the mixin."""
    found = look_up(cls)
    if found is not None:
        (entry, form), kind = found, _replacement_class(found[0])
        if _author_names(cls) & _mixin_names(kind):
            return None
        return Recognised(kind, {**entry.options, **entry.names(form)}, {})
    ropes = {name: known_rope(vars(sys.modules[cls.__module__])[name]) for name in ropes_in(cls)}
    return Recognised(Attention, {}, ropes) if ropes else None


def _author_names(cls: type[nn.Module]) -> set[str]:
    """Returns the names that remote code (`trust_remote_code=True`) defines in the class, and those that its methods
    read or set."""
    written = [value for c in cls.__mro__ if c.__module__.startswith(REMOTE) for value in vars(c).items()]
    codes = (getattr(inspect.unwrap(value), "__code__", None) for _, value in written if callable(value))
    return {name for name, _ in written}.union(*(code.co_names for code in codes if code))


def _mixin_names(kind: type | None) -> set[str]:
    """Returns the names of a mixin's methods and attributes. An attribute with the same name in remote code would
    collide with the mixin's."""
    ours = [name for c in kind.__mro__ if c is not object for name in vars(c)] if kind else []
    return {name for name in ours if name != "forward" and not name.startswith("__")}


def _replacement_class(entry: Entry) -> type | None:
    if entry.replacement is None:
        return None
    module, name = entry.replacement.split(".")
    return getattr(importlib.import_module(f"liger_ext.models.modules.{module}"), name)


def _recognised(cls: type[nn.Module]) -> Recognised | None:
    """Returns `recognise(cls)`, cached until the code that it reads is edited."""
    return _recognise_once(cls, code_read(cls.forward, cls), code_read(loss_utils.ForCausalLMLoss))


@functools.cache
def _recognise_once(cls: type[nn.Module], code: tuple, loss_code: tuple) -> Recognised | None:
    return recognise(cls)


@functools.cache
def _build_patch(
    cls: type[nn.Module],
    kind: type,
    attributes: tuple[tuple[str, object], ...],
    functions: tuple[tuple[str, Callable], ...],
    code: tuple,  # only a part of the cache's key: the mixin has inspected it
) -> type[nn.Module]:
    if cls.__module__.startswith(REMOTE):  # `save_pretrained` copies the file of this module next to the weights
        namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    else:  # pickle finds the class through the `__getattr__` of that module
        namespace = {"__module__": "liger_ext.models.families", "__qualname__": pickle_name(cls)}
    if hasattr(kind, "forward"):
        arguments = [*inspect.signature(cls.forward).parameters][1:]
        takes_same = not issubclass(kind, DecoderLayer)  # which takes *args and **kwargs
        namespace["forward"] = with_arguments(kind.forward, arguments) if takes_same else kind.forward
    patch = type(cls)(cls.__name__, (kind, cls), namespace | dict(attributes))
    if cls.__module__.startswith(REMOTE):
        pickled_as(patch, _patch_or_class, cls)
    others = ((loss_utils, "fixed_cross_entropy"),) if issubclass(kind, CausalLM | CausalLMInside) else ()
    return replaces(sys.modules[cls.__module__], *others, **dict(functions))(patch)


def _patch_or_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of an unpickled module: the patch of `cls`, or `cls` itself if its code is not known here."""
    return find_patch(cls) or cls


def is_left_alone(cls: type[nn.Module]) -> bool:
    """Returns whether no op replaces a part of `cls`: its entry has no replacement, or it is an attention without
    rotary embeddings, or an MLP without a gate, as in most vision towers."""
    found = _recognised(cls)
    if found is not None:
        return found.kind is None
    if cls.__name__.endswith(ENDS["attention"]):
        text = source_text(cls.forward)
        return text is not None and "apply_rotary_" not in text
    definitions = list(map(parse_function, functions_read(cls.forward, cls)))
    if not cls.__name__.endswith(ENDS["MLP"]) or None in definitions:
        return False
    nodes = [node for definition in definitions for node in ast.walk(definition)]
    return not any(isinstance(node, ast.operator) or getattr(node, "attr", None) == "glu" for node in nodes)


def logits_size(model: PreTrainedModel) -> str:
    """Returns the end of the warning about an unknown head: the size of the logits with which it trains."""
    vocab, dtype = getattr(model.get_output_embeddings(), "out_features", None), model.dtype
    if vocab is None:
        return ""
    size, name = 1000 * vocab * dtype.itemsize / 2**20, str(dtype).removeprefix("torch.")
    head = type(model).__name__
    return f"; {head} trains with all logits, {size:,.0f} MiB for 1,000 tokens (vocabulary {vocab:,}, {name})"


def is_norm(module: object) -> bool:
    """Returns whether `module` is a norm that is patched or can be."""
    return any(issubclass(patch, Norm) for patch in map(find_patch, stock_classes([module])) if patch)


def stock_classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """Returns, for each class of `modules`, the nearest ancestor with its own `forward` that transformers or remote
    code defines."""
    found = {}
    for cls in dict.fromkeys(map(type, modules)):
        stock = [c for c in cls.__mro__ if c.__module__.startswith(MODELS) or is_remote(c) or find_llama_patch(c)]
        found.update(dict.fromkeys([c for c in stock if "forward" in vars(c) and not passes_on(c.forward)][:1]))
    return list(found)


def is_remote(cls: type) -> bool:
    """Returns whether remote code (`trust_remote_code=True`) defines `cls` and its `forward`."""
    written = cls.__module__.startswith(REMOTE) and issubclass(cls, nn.Module) and not is_patch(cls)
    return written and defines_forward(cls)


def find_llama_patch(cls: type) -> type[nn.Module] | None:
    """Returns the patch that `liger_ext.models.llama` defines for `cls`: a Llama class, or a class with which other
    code had replaced it before that module was imported."""
    patch = getattr(llama, cls.__name__, None)
    return patch if isinstance(patch, type) and cls in patch.__bases__ else None


# The code that Llama's classes had when `liger_ext.models.llama` defined their patches.
_LLAMA_CODE = {
    patch: code_read(stock_class(patch).forward, stock_class(patch))
    for patch in vars(llama).values()
    if isinstance(patch, type) and patch.__module__ == llama.__name__
}
