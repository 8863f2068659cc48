"""Which models can be patched, and what of them: told by the code that their classes run.

Most families' norms, MLPs, decoder layers and heads run the code that Llama's run, copied by transformers from class to
class, and so do their rotary embeddings. A class is recognised by the text of its `forward`, and of what that calls in
its own class or module. A subclass of it with our `forward` then takes its place, made of the same mixin as Llama's.
What is not recognised stays as it is, and is named in a warning. So a family that is made of known code needs no line
here; `liger_ext.models.FAMILIES` says where the classes are that are to be patched as soon as they are built.
"""

import functools
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

from liger_ext.models import FAMILIES, llama
from liger_ext.models.causal_lm import CausalLM, DividedCausalLM, MoeCausalLM, MultipliedCausalLM, SoftcappedCausalLM
from liger_ext.models.decoder import (
    MLP,
    Attention,
    DecoderLayer,
    Norm,
    PackedMLP,
    RMSNormInFloat,
    ZeroCenteredRMSNorm,
    create_causal_mask,
    gated_unit,
    rope_for,
)
from liger_ext.models.forwards import text_of
from liger_ext.models.head import Linear, heads_of
from liger_ext.models.loss import MEMORY_LEVELS, causal_lm_cross_entropy
from liger_ext.models.patch import PatchHandle, on_construction, record_change, stands_in, stock_class, swap_classes
from liger_ext.models.warn import warn

_MODELS = "transformers.models."


def apply(
    model_type: str,
    model: nn.Module | None,
    rope: bool,
    cross_entropy: bool,
    fused_linear_cross_entropy: bool,
    rms_norm: bool,
    swiglu: bool,
    fused_add_rms_norm: bool,
    memory: str,
) -> PatchHandle:
    """What `apply_liger_kernel_to_llama` says, of models of `model_type`."""
    for name, value in {name: value for name, value in locals().items() if name not in _NOT_SWITCHES}.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}, expected True or False")
    if cross_entropy and fused_linear_cross_entropy:
        raise ValueError("cross_entropy and fused_linear_cross_entropy exclude each other: set one of them to False")
    if memory not in MEMORY_LEVELS:
        raise ValueError(f"memory is {memory!r}, expected {', '.join(map(repr, MEMORY_LEVELS))}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r:.80}, expected a model or None")
    wanted = {
        Attention: rope,
        CausalLM: fused_linear_cross_entropy,
        Norm: rms_norm,
        MLP: swiglu,
        DecoderLayer: rms_norm and fused_add_rms_norm,
        modeling_llama.LlamaModel: create_causal_mask is not None,
    }

    def patch_modules(root: nn.Module, handle: PatchHandle | None = None) -> None:
        modules = list(root.modules())
        classes = _stock_classes(modules)
        patches = [patch for patch in map(patch_of, classes) if patch]
        known = {patch: ask for kind, ask in wanted.items() for patch in patches if issubclass(patch, kind)}
        kept = [p.__name__ for p, ask in known.items() if not ask and any(isinstance(m, p) for m in modules)]
        if kept:
            names = ", ".join(kept)
            warn(f"{names}: patched by an earlier call, and stays so: revert its handle first")
        _warn_of_unknown(classes, wanted)
        for patch in (patch for patch, ask in known.items() if ask):
            swap_classes(filter(gated_unit, modules) if issubclass(patch, MLP) else modules, patch, handle)
        if fused_linear_cross_entropy:
            models = (module for module in modules if isinstance(module, CausalLM))
            swap_classes([head for model in models for head in heads_of(model)], Linear, handle)
        for module in modules:
            if hasattr(module, "liger_memory"):
                _set_memory(module, memory, handle)
            if isinstance(module, DecoderLayer):
                module.adopt_checkpoint_function()
            if cross_entropy and hasattr(module, "lm_head") and isinstance(module, PreTrainedModel):
                _replace_loss(module, handle)

    with PatchHandle() as handle:  # a failure on the way undoes what was done
        if model is None:
            for cls in _models_of(model_type):
                on_construction(cls, patch_modules, handle)
        elif holds_known_code(model, model_type):
            patch_modules(model, handle)
        else:
            raise ValueError(f"{type(model).__name__} holds no {FAMILIES.get(model_type, model_type)} model to patch")
        return handle.pop_all()


_NOT_SWITCHES = ("model_type", "model", "memory")


def holds_known_code(model: nn.Module, model_type: str | None = None) -> bool:
    """Whether something of `model` can be patched; with one of `FAMILIES`, whether a part of it is of that family."""
    classes = _stock_classes(model.modules())
    if model_type in FAMILIES:
        family = f"{_MODELS}{model_type}."
        if not any(c.__module__.startswith(family) or (model_type == "llama" and _llamas(c)) for c in classes):
            return False
    return any(map(patch_of, classes))


def patch_function(model_type: str) -> Callable[..., PatchHandle]:
    """`apply_liger_kernel_to_<model_type>`."""
    if model_type == "llama":
        return llama.apply_liger_kernel_to_llama
    unit = "geglu" if model_type.startswith("gemma") else "swiglu"
    signature = inspect.signature(llama.apply_liger_kernel_to_llama)
    parameters = [p.replace(name=unit) if p.name == "swiglu" else p for p in signature.parameters.values()]
    signature = signature.replace(parameters=parameters)

    def patch(*args, **kwargs) -> PatchHandle:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return apply(model_type, swiglu=bound.arguments.pop(unit), **bound.arguments)

    patch.__name__ = patch.__qualname__ = f"apply_liger_kernel_to_{model_type}"
    patch.__doc__ = f"""Makes Hugging Face models of type {model_type!r} train with liger_ext; arguments, result and
    errors are those of :func:`apply_liger_kernel_to_llama`. What runs code that liger_ext does not know stays as it is,
    with a warning."""
    patch.__signature__ = signature
    return patch


def __getattr__(name: str) -> object:
    """The functions of families, and patches: pickled models look for them."""
    model_type = name.removeprefix("apply_liger_kernel_to_")
    if model_type in FAMILIES:
        function = globals()[name] = patch_function(model_type)
        return function
    module, separator, cls = name.rpartition("__")
    if separator and module and not name.startswith("_"):
        patch = patch_of(getattr(importlib.import_module(_MODELS + module.replace("__", ".")), cls))
        if patch is not None:
            return patch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def patch_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass that takes the place of a class of transformers; None where its code is not known."""
    if _llamas(cls):
        return _llamas(cls)
    kind = _kinds().get(_code_of(cls.forward, cls))
    if kind is None and issubclass(cls, PreTrainedModel):
        kind = _HEADS.get(_difference(cls.forward, stock_class(llama.LlamaForCausalLM).forward))
    module, replacements = sys.modules[cls.__module__], {}
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if kind is None and code is not None and "apply_rotary_pos_emb" in code.co_names:
        rope = vars(module).get("apply_rotary_pos_emb")
        if _code_of(rope) in _known_ropes():
            kind, replacements = Attention, {"apply_rotary_pos_emb": rope_for(rope)}
    if kind is None:
        return None
    name = cls.__module__.removeprefix(_MODELS).replace(".", "__") + "__" + cls.__name__
    namespace = {"__module__": __name__, "__qualname__": name}
    if hasattr(kind, "forward"):
        namespace["forward"] = kind.forward
    return stands_in(module, **replacements)(type(cls)(cls.__name__, (kind, cls), namespace))


@functools.cache
def _kinds() -> dict[str, type]:
    """By the digest of a class's code: the mixin that does the same."""
    patches = llama.LlamaRMSNorm, llama.LlamaMLP, llama.LlamaDecoderLayer, llama.LlamaForCausalLM
    codes = {_code_of(stock_class(patch).forward, stock_class(patch)): patch.__bases__[0] for patch in patches}
    return {code: kind for code, kind in codes.items() if code is not None} | _OTHERS


_OTHERS = {
    "b748919e3a9033e5": ZeroCenteredRMSNorm,  # GemmaRMSNorm, of all supported versions
    "eef4e978a32aa4a4": RMSNormInFloat,  # Olmo2RMSNorm of 4.52 on, GptOssRMSNorm
    "e8d404cbecb96285": PackedMLP,  # Phi3MLP, of all supported versions
}

# All heads change from version to version, but what others do differently from Llama's in the same version does not.
_HEADS = {
    "c006464ec1fb226b": MoeCausalLM,  # MixtralForCausalLM of 5.5 on
    "03c1a4b6c0b8e831": CausalLM,  # NemotronForCausalLM of 5.5 on
    "e1f25f3af8ff4648": SoftcappedCausalLM,  # Gemma2ForCausalLM of 5.0 on
    "f640631abebe49fa": DividedCausalLM,  # GraniteForCausalLM, but for 4.57 and 5.0
    "9aef9e819a041980": MultipliedCausalLM,  # CohereForCausalLM, but for 4.57 and 5.0
}


@functools.cache
def _known_ropes() -> set[str]:
    return {_code_of(modeling_llama.apply_rotary_pos_emb), "8d9f48cd1cdefb65"} - {None}  # the latter of Qwen3-Next


def _code_of(function: Callable | None, cls: type | None = None, seen: tuple = ()) -> str | None:
    """A digest of what `function` does, with the functions of its module, and the methods of `cls`, that it names.

    None if some of the source is not there to be read; it is then like no other.
    """
    text = None if function is None else text_of(function)
    if text is None:
        return None
    function = inspect.unwrap(function)
    texts = [text]
    for name in function.__code__.co_names:
        found = vars(cls).get(name) if cls else None
        found = function.__globals__.get(name) if found is None else found
        found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else None
        if found is not None and found.__module__ == function.__module__ and found not in (*seen, function):
            texts.append(_code_of(found, cls, (*seen, function)))
    return None if None in texts else _digest(texts)


def _difference(function: Callable, other: Callable) -> str | None:
    """A digest of the lines that only `function` has, and of those that only `other` has."""
    texts = text_of(function), text_of(other)
    if None in texts:
        return None
    ours, theirs = (text.splitlines() for text in texts)
    return _digest(
        [line for line in ours if line not in theirs] + ["-"] + [line for line in theirs if line not in ours]
    )


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _stock_classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """The classes of models of transformers that `modules` are of, or are derived from."""
    found = {}
    for cls in dict.fromkeys(map(type, modules)):
        stock = [c for c in cls.__mro__ if c.__module__.startswith(_MODELS) or _llamas(c)]
        found.update(dict.fromkeys([c for c in stock if "forward" in vars(c)][:1]))
    return list(found)


def _llamas(cls: type) -> type[nn.Module] | None:
    """The patch of a class of Llama's: by the class, which may be one that other code has put there."""
    patch = getattr(llama, cls.__name__, None)
    return patch if isinstance(patch, type) and cls in patch.__bases__ else None


_NAMES = {Norm: "RMSNorm", MLP: "MLP", DecoderLayer: "DecoderLayer", CausalLM: "ForCausalLM", Attention: "Attention"}
_unknown: set[type[nn.Module]] = set()


def _warn_of_unknown(classes: list[type[nn.Module]], wanted: dict[type, bool]) -> None:
    """Once for each class that looks like one that is to be patched, and runs other code."""
    ends = tuple(end for kind, end in _NAMES.items() if wanted[kind])
    unknown = [cls for cls in classes if cls.__name__.endswith(ends) and cls not in _unknown and patch_of(cls) is None]
    _unknown.update(unknown)
    if unknown:
        names = ", ".join(cls.__name__ for cls in unknown)
        warn(f"{names}: liger_ext does not know this code, and leaves it as it is")


def _models_of(model_type: str) -> list[type[nn.Module]]:
    name = f"{_MODELS}{model_type}.modeling_{model_type}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this version of transformers has no {name}; upgrade transformers") from error
    return [getattr(module, FAMILIES[model_type] + end) for end in ("Model", "ForCausalLM")]


def _set_memory(module: nn.Module, level: str, handle: PatchHandle | None) -> None:
    """The level of the last patch counts, until all are undone."""
    first = "liger_memory" not in module.__dict__
    module.liger_memory = level
    record_change(module, "memory", handle, (lambda module: delattr(module, "liger_memory")) if first else None)


def _replace_loss(model: nn.Module, handle: PatchHandle | None) -> None:
    """By transformers' own setter; a loss that the user has set stays."""
    if _has_our_loss(model):
        record_change(model, causal_lm_cross_entropy, handle)
    elif "_loss_function" not in model.__dict__ and model.loss_function is ForCausalLMLoss:
        model.loss_function = causal_lm_cross_entropy
        record_change(model, causal_lm_cross_entropy, handle, _restore_loss)


def _restore_loss(model: nn.Module) -> None:
    if _has_our_loss(model):
        del model._loss_function


def _has_our_loss(model: nn.Module) -> bool:
    return model.__dict__.get("_loss_function") is causal_lm_cross_entropy
