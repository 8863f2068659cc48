"""Which code of transformers is known: told by the text of a class's `forward`, and of what it calls.

`liger_ext.models.digests` lists what is known, Llama's own classes among it: nothing of the installed version is taken
for granted. Heads and decoder layers change from version to version, and most in what does not matter. So theirs is the
normal form (`liger_ext.models.normal_form`), and the other families' is how theirs differs from Llama's, once Llama's
is known.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss import loss_utils

from liger_ext.models import digests, llama, normal_form
from liger_ext.models.calls import is_patch
from liger_ext.models.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.classes import inherits_forward, pickled_as, stock_class
from liger_ext.models.decoder import Attention
from liger_ext.models.forwards import called_by, code_of, definition_of, functions_read
from liger_ext.models.names import MODELS, REMOTE, name_of
from liger_ext.models.patch import find_replacements, stands_in
from liger_ext.models.rope import known_rope


def patch_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass that takes the place of a class of transformers; None where its code is not known."""
    of_llama = patch_of_llamas(cls)
    if of_llama and any(find_replacements(of_llama)):
        return of_llama  # which `swap_classes` refuses, and says whose code is there
    if of_llama is llama.LlamaModel:
        return of_llama if llama.knows_model(cls) else None
    kind = _kind_by_code(cls, _code_read(cls.forward, cls), _code_read(loss_utils.ForCausalLMLoss))
    if kind is None or (of_llama and issubclass(of_llama, kind)):
        return None if kind is None else of_llama
    return _patch_made(cls, kind)


def _code_read(function: Callable, cls: type | None = None) -> tuple:
    """All that recognition reads with `function`: what is remembered of it holds for as long as nobody edits that."""
    return tuple((f, getattr(f, "__code__", None)) for f in functions_read(function, cls))


@functools.cache
def _kind_by_code(cls: type[nn.Module], code: tuple, of_loss: tuple) -> type | None:
    return _kind_of(cls)[0]


@functools.cache
def _patch_made(cls: type[nn.Module], kind: type) -> type[nn.Module]:
    replacements = _kind_of(cls)[1]
    if cls.__module__.startswith(REMOTE):  # transformers copies the file of the class's module beside saved weights
        namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    else:  # the module's __getattr__ finds it again
        namespace = {"__module__": "liger_ext.models.families", "__qualname__": name_of(cls)}
    if hasattr(kind, "forward"):
        namespace["forward"] = kind.forward
    patch = type(cls)(cls.__name__, (kind, cls), namespace)
    if cls.__module__.startswith(REMOTE):
        pickled_as(patch, _patch_or_class, cls)
    others = ((loss_utils, "fixed_cross_entropy"),) if issubclass(kind, CausalLM | CausalLMInside) else ()
    return stands_in(sys.modules[cls.__module__], *others, **replacements)(patch)


def _patch_or_class(cls: type[nn.Module]) -> type[nn.Module]:
    """What a pickle of a patched module is read as: another version may not know the code."""
    return patch_of(cls) or cls


def _kind_of(cls: type[nn.Module]) -> tuple[type | None, dict[str, Callable]]:
    """The mixin that does what `cls` does, and what names in its `forward` are to mean."""
    kind = digests.MODULES.get(code_of(cls.forward, cls))
    if kind is None and issubclass(cls, PreTrainedModel) and knows_loss():
        kind = digests.HEADS.get(_of_head(cls))
    kind = kind or digests.LAYERS.get(_of_layer(cls))
    kind = kind or digests.GATES_OF_EXPERTS.get(code_of(getattr(cls, "_apply_gate", None)))
    ropes = {} if kind else _ropes_of(cls)
    return (Attention, ropes) if ropes else (kind, {})


def _ropes_of(cls: type[nn.Module]) -> dict[str, Callable]:
    """The functions that apply rotary embeddings in `cls.forward`, and ours for those that are known. None where other
    decorators are around it: indexers, which choose what attention reads, have no gradient."""
    definition = definition_of(cls.forward)
    if definition is None or definition.decorator_list:
        return {}
    names = [name for name in normal_form.names_read(definition)[0] if name.startswith("apply_rotary_")]
    ropes = {name: vars(sys.modules[cls.__module__]).get(name) for name in names}
    known = {name: known_rope(rope) for name, rope in ropes.items()}
    return {name: rope for name, rope in known.items() if rope is not None}


def knows_loss() -> bool:
    """Whether transformers' loss of causal language models is the one that ours computes."""
    return code_of(loss_utils.ForCausalLMLoss) in digests.LOSSES


def is_left_alone(cls: type[nn.Module]) -> bool:
    """Whether the code is known, and nothing is to be gained."""
    return not digests.LEFT_ALONE.isdisjoint((_of_layer(cls), code_of(cls.forward, cls)))


def _of_layer(cls: type[nn.Module]) -> str | None:
    return _difference(normal_form.of_layer, cls, llama.LlamaDecoderLayer, digests.LAYERS_OF_LLAMA)


def _of_head(cls: type[nn.Module]) -> str | None:
    return _difference(normal_form.of_head, cls, llama.LlamaForCausalLM, digests.HEADS_OF_LLAMA)


def _difference(normal: Callable, cls: type[nn.Module], patch: type[nn.Module], known: set[str]) -> str | None:
    """Returns a digest of the difference between the normal forms of `cls` and of Llama's class, which `patch`
    replaces: none where it is Llama's of any version. None if one of the two has no normal form, or Llama's is not
    known."""
    text, llamas = _form(normal, cls), stock_class(patch)
    if text is not None and normal_form.digest(text) in known:
        return normal_form.digest("")
    of_llama = _form_by_code(normal, llamas, _code_read(llamas.forward, llamas))
    if text is None or of_llama is None or normal_form.digest(of_llama) not in known:
        return None
    return normal_form.digest(normal_form.difference(of_llama, text))


@functools.cache
def _form_by_code(normal: Callable, cls: type[nn.Module], code: tuple) -> str | None:
    return _form(normal, cls)


def _form(normal: Callable, cls: type[nn.Module]) -> str | None:
    """The normal form of a class, and of the functions that it calls, but for those that a patch calls as well."""
    definition = definition_of(cls.forward)
    form = None if definition is None else normal(definition)
    if form is None:
        return None
    called = called_by(form, inspect.unwrap(cls.forward), cls)
    codes = [f"{f.__name__} {code_of(f, cls)}" for f in called if f.__name__ not in _CALLED_BY_PATCHES]
    return "\n".join([normal_form.written(form), *codes])


_CALLED_BY_PATCHES = "loss_function", "load_balancing_loss_func"


def stock_classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """The classes of models of transformers, or of code that came with the weights, that `modules` are of, or are
    derived from."""
    found = {}
    for cls in dict.fromkeys(map(type, modules)):
        stock = [c for c in cls.__mro__ if c.__module__.startswith(MODELS) or is_remote(c) or patch_of_llamas(c)]
        found.update(dict.fromkeys([c for c in stock if "forward" in vars(c)][:1]))
    return list(found)


def is_remote(cls: type) -> bool:
    """Whether `cls` is a class of code that came with a model's weights, and its `forward` is written there."""
    written = cls.__module__.startswith(REMOTE) and issubclass(cls, nn.Module) and not is_patch(cls)
    return written and not inherits_forward(cls, super(cls, cls))


def patch_of_llamas(cls: type) -> type[nn.Module] | None:
    """The patch of a class of Llama's: by the class, which may be one that other code has put there."""
    patch = getattr(llama, cls.__name__, None)
    return patch if isinstance(patch, type) and cls in patch.__bases__ else None
