"""The functions `apply_liger_kernel_to_<model_type>`, which patch a model's modules by the code of their classes.

The norms, MLPs, decoder layers, heads and rotary embeddings of many families run the same code as Llama's, which
transformers copies from class to class. Recognition reads the text of a class's `forward`, and of the functions that
this `forward` calls. If the code is known, a subclass with the methods of one of our mixins replaces the class. A class
with unknown code stays unpatched; a warning names it if its name ends like that of a norm, MLP, and so on. So a family
of known code needs no line here. `liger_ext.models.model_types` lists the model types that have their own function,
with the arguments of each function.
"""

import importlib
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

from liger_ext.models import llama
from liger_ext.models.model_types import FAMILIES, FUNCTION_TYPES, MLP_SWITCHES, model_folder
from liger_ext.models.modules.as_liger_kernel import mark
from liger_ext.models.modules.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.modules.decoder import Attention, DecoderLayer
from liger_ext.models.modules.experts import Experts
from liger_ext.models.modules.head import restore_heads
from liger_ext.models.modules.loss import MEMORY_LEVELS, causal_lm_cross_entropy
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.modules.norms import LayerNorm, Norm
from liger_ext.models.modules.stand_in import warn_about_adapters
from liger_ext.models.patches import find_llama_patch, find_patch, is_left_alone, is_norm, logits_size, stock_classes
from liger_ext.models.patching.classes import source_class, stock_class
from liger_ext.models.patching.handle import PatchHandle
from liger_ext.models.patching.names import MODELS, find_class_by_name
from liger_ext.models.patching.swap import on_construction, swap_classes
from liger_ext.models.patching.warn import warn
from liger_ext.models.recognise.known import ENDS, knows_loss


def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
    *,
    fused_add_rms_norm: bool = True,
    memory: str | None = None,
) -> PatchHandle:
    """Patches Hugging Face Llama to train with liger_ext: one model, or every Llama that is built from now on.

    Every Llama model is covered: causal LM, the classifiers and question answering (their own heads stay unpatched),
    the bare LlamaModel, and a Llama inside another module (PEFT, DDP, FSDP2, ...). Other models stay stock.
    `LlamaModel` is patched whatever the switches are (transformers 4.53 on): under torch.compile it builds no mask
    where none is needed.

    Args:
        rope: rotary position embedding.
        cross_entropy: the loss from logits. Excludes `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: language-model head and loss in one op; see `LlamaForCausalLM.forward`.
        rms_norm: all RMSNorms.
        swiglu: the MLPs' gated activation. MLPs with another `hidden_act` than SiLU and GELU stay unpatched.
        model: patch this instance only. None: patch every Llama that is constructed from now on, by its class or by
            `from_pretrained` and `from_config`, until the handle is reverted. Models built until then stay patched.
            If several calls pass None, the last applies.
        fused_add_rms_norm: residual addition and post-attention norm in one op; needs `rms_norm`.
        memory: the level of memory, which decides the tensors that a training step saves for its backward. None: an
            already patched model keeps its level, others get `"auto"`. `"fast"`: recomputes nothing. `"auto"`:
            recomputes the norms' outputs and silu(gate) * up, which cost little. `"low"`: also recomputes the outputs
            of gate and up, by a second run of their matmuls. `"min"`: as `"low"`, and with gradient checkpointing
            (transformers 4.53 on) the layers' inputs wait in pinned host memory, which must be large enough. The fused
            loss uses the same level (`fused_linear_cross_entropy`). Levels differ in the rounding of results. A level
            has its full effect on the layers only with `fused_add_rms_norm`, `swiglu` and `rope`. The argument `memory`
            of a model's forward sets the level of the loss only.

    Returns:
        A handle. Its `.revert()` undoes the patch; as a context manager it reverts at the end.

    Raises:
        ValueError: both cross entropies are True, `model` holds no Llama, `memory` is not a level, or `model` is
            already patched with other options. With the same options a second call changes only the level of memory.
        TypeError: `model` is not an nn.Module, or a switch is not Python's True or False (1, 0 and numpy's are not).
        ImportError: transformers is older than 4.51.3.
    """
    return apply(
        "llama",
        model=model,
        memory=memory,
        rope=rope,
        cross_entropy=cross_entropy,
        fused_linear_cross_entropy=fused_linear_cross_entropy,
        rms_norm=rms_norm,
        swiglu=swiglu,
        fused_add_rms_norm=fused_add_rms_norm,
    )


def apply(
    model_type: str,
    *,
    model: nn.Module | None,
    memory: str | None,
    mlp_switch: str = "swiglu",
    as_liger_kernel: bool = False,
    **switches: bool,
) -> PatchHandle:
    """Patches models of `model_type` as `apply_liger_kernel_to_llama` describes.

    A module that an earlier call has patched or left out does not change, except for its level of memory. A switch with
    another value than that call's raises ValueError, unless it applies to no module of `model`.

    Args:
        mlp_switch: the name of the switch `swiglu` in this type's function.
        as_liger_kernel: the caller expects Liger-Kernel's behaviour. A switch that is None is off, and the logits of a
            training step that does not compute them are None. A model that is already patched keeps its options, and
            the log lists the switches that differ.
    """
    names = {switch: mlp_switch if switch == "swiglu" else switch for switch in switches}
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
    switches["fused_add_rms_norm"] &= switches["rms_norm"]
    if llama.create_causal_mask is not None:
        switches["mask"] = True
    wanted = {kind: switches[switch] for kind, switch in _SWITCHES.items() if switch in switches}

    def patch_rest(root: nn.Module, handle: PatchHandle) -> set[tuple[str, bool]]:
        """Patches the modules of `root` that no earlier call has patched or left out. Returns the switches that earlier
        calls have set for modules of `root`, with their values."""
        modules, earlier = list(root.modules()), set()
        classes = stock_classes(modules)
        _warn_unknown(classes, modules, wanted, fused_loss or cross_entropy)
        patches = [patch for patch in (*map(find_patch, classes), LayerNorm) if patch]
        known = {patch: kind for kind in wanted for patch in patches if issubclass(patch, kind)}
        for patch, kind in known.items():
            are_patched = {module: isinstance(module, patch) for module in _taken(patch, modules)}
            rest = _claim_modules(_SWITCHES[kind], switches, are_patched, handle, earlier)
            swap_classes(rest, patch, handle)
            if kind is CausalLM:
                handle.on_revert(restore_heads, weakref.WeakSet(rest))
            if as_liger_kernel:
                mark(rest, handle)
        heads = [m for m in modules if hasattr(m, "lm_head") and isinstance(m, PreTrainedModel)]
        are_patched = {head: vars(head).get("_loss_function") is causal_lm_cross_entropy for head in heads}
        _replace_loss(_claim_modules("cross_entropy", switches, are_patched, handle, earlier), handle)
        _set_memory(modules, memory, handle, only_new=model is None)
        for module in modules:
            if isinstance(module, DecoderLayer):
                module.adopt_checkpoint_function()
        return earlier

    handle = PatchHandle(model)
    try:
        if model is None:
            for cls in _model_classes(model_type):
                # The first hook decides, since later ones find the model patched. So the hook of the latest call goes
                # first. A call by liger_kernel's name goes last: it overrides no other.
                on_construction(cls, lambda m: patch_rest(m, PatchHandle()), handle, first=not as_liger_kernel)
        elif holds(model, model_type):
            earlier, name = patch_rest(model, handle), type(model).__name__
            differing = [switch for switch in switches if (switch, not switches[switch]) in earlier]
            said = ", ".join(f"{names[s]} is {not switches[s]} (asked for: {switches[s]})" for s in differing)
            if differing and not as_liger_kernel:
                raise ValueError(f"{name} is patched already, with other options: {said}. {_PATCHED_HINT}")
            if earlier and as_liger_kernel:
                level = logging.WARNING if differing else logging.INFO
                _logger.log(level, f"{name} is patched already, and keeps its options{': ' if said else ''}{said}")
            warn_about_adapters(model, (DecoderLayer, Attention, MLP))
            if not earlier:
                importlib.import_module("liger_ext.models.summary").report(model)  # it imports this module
        else:
            raise ValueError(
                f"{type(model).__name__} holds no {model_type} model to patch"
                + ("; apply_liger_kernel_to_instance(model) patches it" if holds_known_code(model) else "")
            )
    except BaseException:
        handle.revert()
        raise
    return handle


_logger = logging.getLogger("liger_ext")

_PATCHED_HINT = (
    "Call revert() on the handle of that call first. A model that was built under a patch of its class, or a copy, has "
    "no handle: pass the options that it has, or build it again without a patch and load the weights"
)

# The switch that controls each kind of module.
_SWITCHES = {
    modeling_llama.LlamaModel: "mask",
    Attention: "rope",
    CausalLM: "fused_linear_cross_entropy",
    CausalLMInside: "fused_linear_cross_entropy",
    Norm: "rms_norm",
    LayerNorm: "layer_norm",
    MLP: "swiglu",
    Experts: "swiglu",
    DecoderLayer: "fused_add_rms_norm",
}


def _claim_modules(
    switch: str,
    switches: dict[str, bool],
    are_patched: dict[nn.Module, bool],
    handle: PatchHandle,
    earlier: set[tuple[str, bool]],
) -> list[nn.Module]:
    """Returns the modules that this call patches because of `switch`. If the switch is off, marks the modules as left
    out instead. A module that an earlier call has patched or left out does not change: that call's value of the switch
    is added to `earlier`."""
    rest = []
    for module, patched in are_patched.items():
        left_out = vars(module).get("_liger_left_out", frozenset())  # a set of switches; copies and pickles keep it
        if patched or switch in left_out:
            earlier.add((switch, patched))
        elif switches[switch]:
            rest.append(module)
        else:
            handle.replace(module, "_liger_left_out", left_out | {switch})
    return rest


def check_model(model: nn.Module) -> None:
    """Raises TypeError if `model` is not an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {_shown(model)}, expected a model, which is an nn.Module")


def _shown(value: object) -> str:
    line = repr(value).partition("\n")[0]
    return f"{line:.80}, of {type(value)}"


def _taken(patch: type[nn.Module], modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules that `patch` applies to. It leaves out MLPs and experts whose activation has no op, decoder
    layers whose norm cannot be patched, and subclasses of nn.LayerNorm that PyTorch did not create."""
    stock = stock_class(patch)
    taken = [module for module in modules if isinstance(module, stock)]
    if patch is LayerNorm:
        return [module for module in taken if source_class(type(module), stock) in (stock, patch)]
    if issubclass(patch, MLP | Experts):
        return [module for module in taken if patch.activation_op(module) is not None]
    if issubclass(patch, DecoderLayer):
        norms = {module: getattr(module, patch.NORM, None) for module in taken}
        norm_by_class = {type(norm): norm for norm in norms.values()}
        ours = {cls for cls, norm in norm_by_class.items() if is_norm(norm)}
        return [module for module, norm in norms.items() if type(norm) in ours]
    return taken


def holds_known_code(model: nn.Module) -> bool:
    """Returns whether any module of `model` can be patched."""
    modules = list(model.modules())
    return any(_taken(patch, modules) for patch in map(find_patch, stock_classes(modules)) if patch)


def holds(model: nn.Module, model_type: str) -> bool:
    """Returns whether `model` holds a model of this family: a class from the family's folder in transformers, or a
    configuration of this type together with any known code. For a type without its own function, returns whether any
    code is known."""
    if model_type not in FAMILIES:
        return holds_known_code(model)
    folder, classes = f"{MODELS}{model_folder(model_type)}.", stock_classes(model.modules())
    if any(c.__module__.startswith(folder) or (model_type == "llama" and find_llama_patch(c)) for c in classes):
        return True
    types = map(config_model_type, model.modules())  # for remote code, whose classes are in no folder of transformers
    return any(FUNCTION_TYPES.get(found) == model_type for found in types) and holds_known_code(model)


def config_model_type(module: nn.Module) -> str | None:
    """Returns `module.config.model_type`, or None."""
    return getattr(getattr(module, "config", None), "model_type", None)


def patch_function(model_type: str, as_liger_kernel: bool = False) -> Callable[..., PatchHandle]:
    """Returns `apply_liger_kernel_to_<model_type>`; for the type of a part of a model, the function of the whole model.

    `as_liger_kernel`: see `apply`. `inspect.signature` then lists only the arguments of Liger-Kernel's function,
    because callers build their arguments from it. The function also accepts the others.
    """
    family = FUNCTION_TYPES.get(model_type, model_type)
    if family == "llama" and not as_liger_kernel:
        return apply_liger_kernel_to_llama
    taken = FAMILIES.get(family, ())
    mlp_switch = next((name for name in MLP_SWITCHES if name in taken), "swiglu")
    signature = inspect.signature(apply_liger_kernel_to_llama)
    parameters = {mlp_switch if name == "swiglu" else name: p for name, p in signature.parameters.items()}
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
        activation = bound.arguments.pop(mlp_switch)
        return apply(
            family, swiglu=activation, mlp_switch=mlp_switch, as_liger_kernel=as_liger_kernel, **bound.arguments
        )

    patch.__name__ = patch.__qualname__ = f"apply_liger_kernel_to_{family}"
    patch.__doc__ = f"""Patches Hugging Face models of type {family!r} to train with liger_ext. Arguments, result and
    errors are those of :func:`apply_liger_kernel_to_llama`, in Liger-Kernel's order. `geglu` and `relu_squared` replace
    `swiglu` for MLPs with another activation. `layer_norm` controls modules of the class `nn.LayerNorm`, as in vision
    towers. A module whose code is not known stays unpatched, mostly with a warning."""
    patch.options = tuple(signature.parameters)
    patch.__signature__ = signature.replace(parameters=ordered) if as_liger_kernel else signature
    return patch


def __getattr__(name: str) -> object:
    """Returns the function of a family, or a patch by the name that pickles store (`patching.names`)."""
    model_type = name.removeprefix("apply_liger_kernel_to_")
    if model_type in FAMILIES:
        function = globals()[name] = patch_function(model_type)
        return function
    stock = find_class_by_name(name)
    if stock is not None and find_patch(stock) is not None:
        return find_patch(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ENDS = {Norm: "norm", MLP: "MLP", Experts: "experts", DecoderLayer: "layer", CausalLM: "head", Attention: "attention"}
_unknown: set[Callable] = set()


def _warn_unknown(
    classes: list[type[nn.Module]], modules: list[nn.Module], wanted: dict[type, bool], wants_loss: bool
) -> None:
    """Warns once of each class whose name ends like a part to be patched and whose code is not known, with the size of
    the logits if it is a head; and once of transformers' loss if its code is not known."""
    ends = tuple(end for kind, part in _ENDS.items() if wanted[kind] for end in ENDS[part])
    candidates = [cls for cls in classes if cls.__name__.endswith(ends) and cls not in _unknown]
    unknown = [cls for cls in candidates if find_patch(cls) is None and not is_left_alone(cls)]
    heads = tuple(cls for cls in unknown if cls.__name__.endswith(ENDS["head"]))
    sizes = dict.fromkeys(logits_size(module) for module in modules if isinstance(module, heads))
    if wants_loss and ForCausalLMLoss not in _unknown and not knows_loss():
        unknown.append(ForCausalLMLoss)
    _unknown.update(unknown)
    if unknown:
        names = ", ".join(cls.__name__ for cls in unknown)
        warn(f"{names}: liger_ext does not know this code, and leaves it as it is{''.join(sizes)}")


def _model_classes(model_type: str) -> list[type[nn.Module]]:
    """Returns the model classes of a family that define `__init__` and `forward`.

    Raises:
        ImportError: this version of transformers lacks the family.
    """
    folder = model_folder(model_type)
    name = f"{MODELS}{folder}.modeling_{folder}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"this version of transformers has no {name}; upgrade transformers") from error
    defined = [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == name]
    return [c for c in defined if issubclass(c, PreTrainedModel) and {"__init__", "forward"} <= vars(c).keys()]


def _replace_loss(models: Iterable[nn.Module], handle: PatchHandle) -> None:
    """Stores our loss in the attribute that transformers' setter uses. A loss that the user has set stays."""
    for model in models:
        if "_loss_function" not in vars(model) and model.loss_function is ForCausalLMLoss and knows_loss():
            handle.replace(model, "_loss_function", causal_lm_cross_entropy)


def _set_memory(modules: Iterable[nn.Module], level: str | None, handle: PatchHandle, only_new: bool) -> None:
    """Sets the level of memory of the `modules` that read one (`liger_memory`). With `only_new`, or if `level` is None,
    a module that has a level keeps it. If `level` is None, a module without one gets another module's, or "auto"."""
    levels = {module: vars(module).get("liger_memory") for module in modules if hasattr(module, "liger_memory")}
    default = level or next(filter(None, levels.values()), "auto")
    for module, now in levels.items():
        wanted = now if now and (only_new or level is None) else default
        if wanted != now:
            handle.replace(module, "liger_memory", wanted)
