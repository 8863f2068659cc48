"""Finding the patch of a model by its model type; model classes that patch what they build."""

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterable

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from liger_ext.models.patch import PatchHandle

# config.model_type -> module and function
_PATCHES = {"llama": ("liger_ext.models.llama", "apply_liger_kernel_to_llama")}


def supported_model_types() -> tuple[str, ...]:
    """The values of `config.model_type` that can be patched."""
    return tuple(_PATCHES)


def apply_liger_kernel(model_type: str, **options) -> PatchHandle:
    """Patches models of one type; the type's own function, such as `apply_liger_kernel_to_llama`, has the options.

    An unknown model type is left alone, and options that the type's function does not take are dropped; each draws one
    warning.
    """
    if model_type not in _PATCHES:
        _warn(f"model type {model_type!r} is not known to liger_ext and stays as it is (known: {', '.join(_PATCHES)})")
        return PatchHandle()
    patch = _patch_function(model_type)
    _warn_dropped(model_type, options.keys() - _option_names(patch))
    return patch(**{name: value for name, value in options.items() if name in _option_names(patch)})


def apply_liger_kernel_to_instance(model: nn.Module, **options) -> PatchHandle:
    """Patches `model`, of transformers or a PEFT wrapper, by its `config.model_type`; see `apply_liger_kernel`.

    A model without one is left alone, with a warning.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        _warn(f"{type(model).__name__} has no config.model_type and stays as it is (known: {', '.join(_PATCHES)})")
        return PatchHandle()
    return apply_liger_kernel(model_type, model=model, **options)


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` that builds patched models.

    `from_pretrained` and `from_config` take the options of the model's patch function as further keyword arguments.
    Models of types that liger_ext does not know are built as they are.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str, *model_args, **kwargs) -> PreTrainedModel:
        return _build(super().from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, config, **kwargs) -> PreTrainedModel:
        return _build(super().from_config, config, **kwargs)


def _build(build: Callable[..., PreTrainedModel], *args, **kwargs) -> PreTrainedModel:
    """Builds with every known type patched while it is built, so that the type need not be known before."""
    patches = {model_type: _patch_function(model_type) for model_type in _PATCHES}
    names = set().union(*map(_option_names, patches.values())) - {"model"}
    options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
    with PatchHandle() as handle:
        for patch in patches.values():
            handle.enter_context(patch(**{name: options[name] for name in options.keys() & _option_names(patch)}))
        model = build(*args, **kwargs)
    model_type = model.config.model_type
    _warn_dropped(model_type, options.keys() - (_option_names(patches[model_type]) if model_type in patches else set()))
    return model


def _patch_function(model_type: str) -> Callable[..., PatchHandle]:
    module, function = _PATCHES[model_type]
    return getattr(importlib.import_module(module), function)


def _option_names(patch: Callable[..., PatchHandle]) -> set[str]:
    return set(inspect.signature(patch).parameters)


def _warn_dropped(model_type: str, names: Iterable[str]) -> None:
    if names:
        _warn(f"options without a meaning for model type {model_type!r} are ignored: {', '.join(sorted(names))}")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)
