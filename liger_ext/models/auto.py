"""Functions that patch all models of a type (`config.model_type`), or one model by the source text of its modules'
classes, and an auto class that builds patched models."""

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Iterable

from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from liger_ext.models.families import check_model, config_model_type, holds, holds_known_code, patch_function
from liger_ext.models.model_types import FAMILIES, FUNCTION_TYPES
from liger_ext.models.patching.handle import PatchHandle
from liger_ext.models.patching.warn import warn


def supported_model_types() -> tuple[str, ...]:
    """Returns the values of `config.model_type` that can be patched before a model is built."""
    return tuple(FUNCTION_TYPES)


def apply_liger_kernel(model_type: str, **options: bool | str | nn.Module | None) -> PatchHandle:
    """Patches models of one type. The options are the arguments of `apply_liger_kernel_to_<model_type>`: with `model`
    it patches this instance, without it every model of the type that is built from now on.

    Warns and patches nothing if the model type is unknown. Ignores options that the type's function does not take, with
    one warning for all of them.
    """
    return patch_type(model_type, options)


def apply_liger_kernel_to_instance(model: nn.Module, **options: bool | str | None) -> PatchHandle:
    """Patches every module of `model` whose code liger_ext recognises, whatever the model's type. `model` is a
    transformers model, or holds one or more: a wrapper of PEFT, DataParallel or DistributedDataParallel, nn.Sequential.

    Patches norms, MLPs and experts, decoder layers, rotary embeddings in attention, and heads with the loss of causal
    language models, also in code that came with the weights (`trust_remote_code=True`). It recognises none of the code
    of BERT, T5, ViT and Whisper.

    The options are the arguments of `apply_liger_kernel_to_<model_type>`, or of `apply_liger_kernel_to_llama` if that
    function does not exist. If a wrapper holds several models, the first one's type counts. Warns and patches nothing
    if neither `model` nor a module in it has a `config.model_type`, or if none of the code is known.

    Raises:
        TypeError: `model` is not an nn.Module.
    """
    return patch_instance(model, options)


# Returns the patch function of a model type. Under Liger-Kernel's name this reads a table to which users may add.
FunctionLookup = Callable[[str], Callable[..., PatchHandle]]


def patch_type(
    model_type: str,
    options: dict[str, object],
    known: Collection[str] = FUNCTION_TYPES,
    function_lookup: FunctionLookup = patch_function,
) -> PatchHandle:
    """Implements `apply_liger_kernel` for the types `known`, whose functions `function_lookup` returns."""
    if model_type not in known:
        like = "".join(f"; did you mean {name!r}?" for name in difflib.get_close_matches(model_type, known, 1))
        warn(f"model type {model_type!r} is not known to liger_ext, and its models stay as they are{like}")
        return PatchHandle()
    return _patch(model_type, options, function_lookup)


def patch_instance(
    model: nn.Module,
    options: dict[str, object],
    known: Collection[str] = FUNCTION_TYPES,
    function_lookup: FunctionLookup = patch_function,
) -> PatchHandle:
    """Implements `apply_liger_kernel_to_instance` for the types `known`, whose functions `function_lookup` returns."""
    check_model(model)
    model_type = next((found for found in map(config_model_type, model.modules()) if found is not None), None)
    if model_type is None:
        warn(f"{type(model).__name__} has no config.model_type, and stays as it is")
        return PatchHandle(model)
    options = {**options, "model": model}
    if model_type not in known and holds_known_code(model):
        return _patch(model_type, options, function_lookup)
    if model_type not in known or not _can_patch(model, model_type, function_lookup):
        warn(
            f"{type(model).__name__} of {type(model).__module__} runs no code that liger_ext knows, and stays as it is"
        )
        return PatchHandle(model)
    return patch_type(model_type, options, known, function_lookup)


def _can_patch(model: nn.Module, model_type: str, function_lookup: FunctionLookup = patch_function) -> bool:
    """Returns whether the function of this type accepts `model`. A user's function may accept any model."""
    is_ours = getattr(function_lookup(model_type), "__module__", "").startswith("liger_ext.")
    return not is_ours or holds(model, FUNCTION_TYPES.get(model_type, model_type))


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM` that builds patched models.

    `from_pretrained` and `from_config` take the options of the model's patch function as further keyword arguments.
    A model without known code is built unpatched. `AutoModelForCausalLM` itself builds the model, because the
    `auto_map` of code that comes with weights (`trust_remote_code=True`) lists classes under that name.
    """

    _patch_function = staticmethod(patch_function)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: object, **kwargs: object
    ) -> PreTrainedModel:
        return cls._build(AutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, config: PretrainedConfig, **kwargs: object) -> PreTrainedModel:
        return cls._build(AutoModelForCausalLM.from_config, config, **kwargs)

    @classmethod
    def _build(cls, build: Callable[..., PreTrainedModel], *args, **kwargs) -> PreTrainedModel:
        names = set().union(*(_option_names(patch_function(family)) for family in FAMILIES)) - {"model"}
        options = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        model = build(*args, **kwargs)
        if _can_patch(model, model.config.model_type):
            _patch(model.config.model_type, {**options, "model": model}, cls._patch_function)
        else:
            _warn_dropped(model.config.model_type, options)
        return model


def _patch(model_type: str, options: dict[str, object], function_lookup: FunctionLookup) -> PatchHandle:
    patch = function_lookup(model_type)
    names = _option_names(patch)
    _warn_dropped(model_type, {name for name, value in options.items() if name not in names and value is not None})
    return patch(**{name: value for name, value in options.items() if name in names})


def _option_names(patch: Callable[..., PatchHandle]) -> set[str]:
    """Returns every option that `patch` takes. Its signature may list fewer: see `patch_function`."""
    return set(getattr(patch, "options", None) or inspect.signature(patch).parameters)


def _warn_dropped(model_type: str, names: Iterable[str]) -> None:
    if names:
        warn(f"options without a meaning for model type {model_type!r} are ignored: {', '.join(sorted(names))}")
