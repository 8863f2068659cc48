"""Which models can be patched, and what of them: told by the code that their classes run.

Most families' norms, MLPs, decoder layers and heads run the code that Llama's run, copied by transformers from class to
class, and so do their rotary embeddings. A class is recognised by the text of its `forward`, and of what that calls in
its own class or module. A subclass of it with our `forward` then takes its place, made of the same mixin as Llama's.
What is not recognised stays as it is, and is named in a warning. So a family that is made of known code needs no line
here; `liger_ext.models.model_types` says which model types have functions of their own, with which arguments.
"""

import importlib
import inspect
from collections.abc import Callable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

from liger_ext.models import llama
from liger_ext.models.as_liger_kernel import mark
from liger_ext.models.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.classes import stock_class, written_class
from liger_ext.models.decoder import Attention, DecoderLayer
from liger_ext.models.earlier import leave_out, set_memory, tell, were_left_out
from liger_ext.models.experts import Experts
from liger_ext.models.head import Linear, heads_of
from liger_ext.models.known_code import is_left_alone, knows_loss, patch_of, patch_of_llamas, stock_classes
from liger_ext.models.loss import MEMORY_LEVELS, causal_lm_cross_entropy
from liger_ext.models.mlp import MLP
from liger_ext.models.model_types import FAMILIES, FUNCTION_OF, UNITS, folder_of
from liger_ext.models.names import MODELS, class_of
from liger_ext.models.norms import LayerNorm, Norm
from liger_ext.models.patch import PatchHandle, on_construction, record_change, swap_classes
from liger_ext.models.warn import warn


def apply(
    model_type: str,
    *,
    model: nn.Module | None,
    memory: str | None,
    unit: str = "swiglu",
    as_liger_kernel: bool = False,
    **switches: bool,
) -> PatchHandle:
    """What `apply_liger_kernel_to_llama` says, of models of `model_type`, whose function calls `swiglu` `unit`.

    `as_liger_kernel`: the caller expects Liger-Kernel. A switch that is None is off, and logits that a training step
    does not compute are None.
    """
    names = {switch: unit if switch == "swiglu" else switch for switch in switches}
    if as_liger_kernel:
        switches = {switch: False if value is None else value for switch, value in switches.items()}
    for switch, value in switches.items():
        if not isinstance(value, bool):
            hint = "; a model is given by its name, model=..." if isinstance(value, nn.Module) else ""
            raise TypeError(f"{names[switch]} is {_shown(value)}, expected Python's True or False{hint}")
    fused_loss, cross_entropy = switches["fused_linear_cross_entropy"], switches["cross_entropy"]
    if cross_entropy and fused_loss:
        raise ValueError("cross_entropy and fused_linear_cross_entropy exclude each other: set one of them to False")
    if memory is not None and memory not in MEMORY_LEVELS:
        raise ValueError(f"memory is {memory!r}, expected {', '.join(map(repr, MEMORY_LEVELS))}")
    if model is not None:
        check_model(model)
    wanted = {kind: switches[switch] for kind, switch in _SWITCHES.items() if switch in switches}
    wanted[DecoderLayer] &= switches["rms_norm"]
    wanted[modeling_llama.LlamaModel] = llama.create_causal_mask is not None

    def patch_modules(root: nn.Module, handle: PatchHandle | None = None) -> None:
        modules, added, kept = list(root.modules()), [], []
        classes = stock_classes(modules)
        _warn_of_unknown(classes, wanted, fused_loss or cross_entropy)
        patches = [patch for patch in (*map(patch_of, classes), LayerNorm) if patch]
        known = {patch: kind for kind in wanted for patch in patches if issubclass(patch, kind)}
        for patch, kind in known.items():
            taken, name = _taken(patch, modules), names.get(_SWITCHES.get(kind))
            if wanted[kind]:
                if were_left_out(taken, patch):
                    added.append(name)
                swap_classes(taken, patch, handle)
            else:
                if any(isinstance(module, patch) for module in taken):
                    kept.append(name)
                leave_out(taken, patch, handle)
        if fused_loss:
            models = (module for module in modules if isinstance(module, CausalLM))
            swap_classes([head for model in models for head in heads_of(model)], Linear, handle)
        for model in (m for m in modules if hasattr(m, "lm_head") and isinstance(m, PreTrainedModel)):
            if cross_entropy:
                _replace_loss(model, handle)
            elif _has_our_loss(model):
                kept.append("cross_entropy")
        set_memory(modules, memory, handle)
        if as_liger_kernel:
            mark(modules, handle)
        for module in modules:
            if isinstance(module, DecoderLayer):
                module.adopt_checkpoint_function()
        tell(added, kept)

    with PatchHandle() as handle:  # a failure on the way undoes what was done
        if model is None:
            for cls in _models_of(model_type):
                on_construction(cls, patch_modules, handle)
        elif holds(model, model_type):
            patch_modules(model, handle)
        else:
            raise ValueError(
                f"{type(model).__name__} holds no {model_type} model to patch; "
                "apply_liger_kernel_to_instance(model) takes a model of any type"
            )
        return handle.pop_all()


# Which switch is for which modules.
_SWITCHES = {
    Attention: "rope",
    CausalLM: "fused_linear_cross_entropy",
    CausalLMInside: "fused_linear_cross_entropy",
    Norm: "rms_norm",
    LayerNorm: "layer_norm",
    MLP: "swiglu",
    Experts: "swiglu",
    DecoderLayer: "fused_add_rms_norm",
}


def check_model(model: nn.Module) -> None:
    """
    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_shown(model)}, expected a model, which is an nn.Module")


def _shown(value: object) -> str:
    line = repr(value).partition("\n")[0]
    return f"{line:.80}, of {type(value)}"


def _taken(patch: type[nn.Module], modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that `patch` is for: of MLPs those with an activation of ours, and no nn.LayerNorm of others."""
    stock = stock_class(patch)
    taken = [module for module in modules if isinstance(module, stock)]
    if patch is LayerNorm:
        return [module for module in taken if written_class(type(module), stock) in (stock, patch)]
    return [m for m in taken if patch.unit_of(m) is not None] if issubclass(patch, MLP | Experts) else taken


def holds_known_code(model: nn.Module) -> bool:
    """Whether something of `model` can be patched."""
    return any(map(patch_of, stock_classes(model.modules())))


def holds(model: nn.Module, model_type: str) -> bool:
    """Whether a part of `model` is of this family, by transformers' classes, or by its configuration where any code is
    known. Of types without a function of their own, whether any code is known."""
    if model_type not in FAMILIES:
        return holds_known_code(model)
    folder, classes = f"{MODELS}{folder_of(model_type)}.", stock_classes(model.modules())
    if any(c.__module__.startswith(folder) or (model_type == "llama" and patch_of_llamas(c)) for c in classes):
        return True
    types = map(type_of, model.modules())  # of code that came with its weights
    return any(FUNCTION_OF.get(found) == model_type for found in types) and holds_known_code(model)


def type_of(module: nn.Module) -> str | None:
    """Its `config.model_type`."""
    return getattr(getattr(module, "config", None), "model_type", None)


def patch_function(model_type: str, as_liger_kernel: bool = False) -> Callable[..., PatchHandle]:
    """`apply_liger_kernel_to_<model_type>`; for a part of a model, that of the whole.

    `as_liger_kernel`: as `apply` has it. `inspect.signature` then gives the arguments that Liger-Kernel's function has,
    of which callers make their own; the others are taken all the same.
    """
    family = FUNCTION_OF.get(model_type, model_type)
    if family == "llama" and not as_liger_kernel:
        return llama.apply_liger_kernel_to_llama
    taken = FAMILIES.get(family, ())
    unit = next((name for name in UNITS if name in taken), "swiglu")
    signature = inspect.signature(llama.apply_liger_kernel_to_llama)
    parameters = {unit if name == "swiglu" else name: p for name, p in signature.parameters.items()}
    if "layer_norm" in taken:
        parameters["layer_norm"] = parameters["rms_norm"]
    ordered = [parameters[name].replace(name=name) for name in taken]
    by_name = [name for name in parameters if name not in taken]
    others = [parameters[name].replace(name=name, kind=inspect.Parameter.KEYWORD_ONLY) for name in by_name]
    signature = signature.replace(parameters=ordered + others)

    def patch(*args, **kwargs) -> PatchHandle:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{patch.__name__}() {error}") from None
        bound.apply_defaults()
        activation = bound.arguments.pop(unit)
        return apply(family, swiglu=activation, unit=unit, as_liger_kernel=as_liger_kernel, **bound.arguments)

    patch.__name__ = patch.__qualname__ = f"apply_liger_kernel_to_{family}"
    patch.__doc__ = f"""Makes Hugging Face models of type {family!r} train with liger_ext; arguments, result and
    errors are those of :func:`apply_liger_kernel_to_llama`, in Liger-Kernel's order. `geglu` and `relu_squared` are
    `swiglu` of MLPs with another activation; `layer_norm` is of all `nn.LayerNorm`, which are in the parts that look at
    images. What runs code that liger_ext does not know stays as it is, with a warning."""
    patch.options = tuple(signature.parameters)
    patch.__signature__ = signature.replace(parameters=ordered) if as_liger_kernel else signature
    return patch


def __getattr__(name: str) -> object:
    """The functions of families, and patches: pickled models look for them."""
    model_type = name.removeprefix("apply_liger_kernel_to_")
    if model_type in FAMILIES:
        function = globals()[name] = patch_function(model_type)
        return function
    stock = class_of(name)
    if stock is not None and patch_of(stock) is not None:
        return patch_of(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NAMES = {
    Norm: ("RMSNorm", "RMSNormGated", "L2Norm"),
    MLP: ("MLP",),
    Experts: ("Experts",),
    DecoderLayer: ("DecoderLayer",),
    CausalLM: ("ForCausalLM", "ForConditionalGeneration"),
    Attention: ("Attention",),
}
_unknown: set[Callable] = set()


def _warn_of_unknown(classes: list[type[nn.Module]], wanted: dict[type, bool], wants_loss: bool) -> None:
    """Once for each class that looks like one that is to be patched, and for the loss, if it runs other code."""
    ends = tuple(end for kind, ends in _NAMES.items() if wanted[kind] for end in ends)
    candidates = [cls for cls in classes if cls.__name__.endswith(ends) and cls not in _unknown]
    unknown = [cls for cls in candidates if patch_of(cls) is None and not is_left_alone(cls)]
    if wants_loss and ForCausalLMLoss not in _unknown and not knows_loss():
        unknown.append(ForCausalLMLoss)
    _unknown.update(unknown)
    if unknown:
        names = ", ".join(cls.__name__ for cls in unknown)
        warn(f"{names}: liger_ext does not know this code, and leaves it as it is")


def _models_of(model_type: str) -> list[type[nn.Module]]:
    """The classes of models of a family: with their own constructor, and something to run."""
    folder = folder_of(model_type)
    name = f"{MODELS}{folder}.modeling_{folder}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this version of transformers has no {name}; upgrade transformers") from error
    defined = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == name]
    return [c for c in defined if issubclass(c, PreTrainedModel) and {"__init__", "forward"} <= vars(c).keys()]


def _replace_loss(model: nn.Module, handle: PatchHandle | None) -> None:
    """By transformers' own setter; a loss that the user has set stays."""
    if _has_our_loss(model):
        record_change(model, causal_lm_cross_entropy, handle)
    elif "_loss_function" not in model.__dict__ and model.loss_function is ForCausalLMLoss and knows_loss():
        model.loss_function = causal_lm_cross_entropy
        record_change(model, causal_lm_cross_entropy, handle, _restore_loss)


def _restore_loss(model: nn.Module) -> None:
    if _has_our_loss(model):
        del model._loss_function


def _has_our_loss(model: nn.Module) -> bool:
    return model.__dict__.get("_loss_function") is causal_lm_cross_entropy
