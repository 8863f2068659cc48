"""Which models can be patched, and what of them: told by the code that their classes run.

Most families' norms, MLPs, decoder layers and heads run the code that Llama's run, copied by transformers from class to
class, and so do their rotary embeddings. A class is recognised by the text of its `forward`, and of what that calls in
its own class or module. A subclass of it with our `forward` then takes its place, made of the same mixin as Llama's.
What is not recognised stays as it is, and is named in a warning. So a family that is made of known code needs no line
here; `liger_ext.models.model_types` says which model types have functions of their own, with which arguments.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

from liger_ext.models import llama
from liger_ext.models.model_types import FAMILIES, FUNCTION_OF, UNITS, folder_of
from liger_ext.models.modules.as_liger_kernel import mark
from liger_ext.models.modules.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.modules.decoder import Attention, DecoderLayer
from liger_ext.models.modules.experts import Experts
from liger_ext.models.modules.head import Linear, heads_of
from liger_ext.models.modules.loss import MEMORY_LEVELS, causal_lm_cross_entropy
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.modules.norms import LayerNorm, Norm
from liger_ext.models.patches import is_left_alone, patch_of, patch_of_llamas, stock_classes
from liger_ext.models.patching.classes import stock_class, written_class
from liger_ext.models.patching.names import MODELS, class_of
from liger_ext.models.patching.swap import PatchHandle, on_construction, swap_classes
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
    """Makes Hugging Face Llama train with liger_ext: one model, or all that are built from now on.

    Every Llama model is covered: causal LM, the classifiers and question answering (whose own heads stay as they are),
    the bare LlamaModel, and a Llama inside another module (PEFT, DDP, FSDP2, ...). Nothing global is replaced.
    Whatever is asked for, `LlamaModel` is patched as well: it makes no mask under torch.compile where none is needed.

    Args:
        rope: rotary position embedding.
        cross_entropy: the loss from logits. Excludes `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: language-model head and loss in one; see `LlamaForCausalLM.forward`.
        rms_norm: all RMSNorms.
        swiglu: the MLPs' activation. Models with another `hidden_act` than SiLU and GELU keep theirs.
        model: patch this instance only. None: patch every Llama that is constructed from now on, by its class or by
            `from_pretrained` and `from_config`, until the handle is reverted; models built meanwhile stay patched.
            Of several such calls the last one counts.
        fused_add_rms_norm: residual addition and post-attention norm in one; needs `rms_norm`.
        memory: how much a training step keeps for its backward. None: the level that a patched model has, or `"auto"`.
            `"fast"`: what transformers' modules keep. `"auto"`: without what is made again at little cost,
            the norms' outputs and silu(gate) * up; the fused loss has an `"auto"` of its own. `"low"`: the outputs of
            gate and up are made again, too, by a second run of their matmuls, and on a GPU the logits exist in chunks
            of a quarter of the head's gradient in fp32. `"min"`: the chunks are half as large, and with gradient
            checkpointing (transformers 4.53 on) the layers' inputs wait in pinned host memory, which must be large
            enough. Results are the same. The levels need `fused_add_rms_norm`, `swiglu` for the MLP's share and `rope`
            for the attention's. The argument `memory` of a model's forward is that of its loss alone.

    Returns:
        A handle, whose `.revert()` undoes the patch. As a context manager it reverts at the end.

    Raises:
        ValueError: both cross entropies are asked for, `model` holds no Llama, `memory` is another word, or `model` is
            patched already, with other options. With the same ones a second call changes the level of memory alone.
        TypeError: `model` is no module, or a switch is neither True nor False (1, 0 and numpy's are neither).
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
    unit: str = "swiglu",
    as_liger_kernel: bool = False,
    **switches: bool,
) -> PatchHandle:
    """What `apply_liger_kernel_to_llama` says, of models of `model_type`, whose function calls `swiglu` `unit`.

    What an earlier call has patched or left out stays as it is, but for the level of memory. Other switches than that
    call's are a ValueError; a switch that has no meaning for `model` does not count.

    `as_liger_kernel`: the caller expects Liger-Kernel. A switch that is None is off, and logits that a training step
    does not compute are None. Of a model that is patched already the log says so, and which switches differ.
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
    switches["fused_add_rms_norm"] &= switches["rms_norm"]
    if llama.create_causal_mask is not None:
        switches["mask"] = True
    wanted = {kind: switches[switch] for kind, switch in _SWITCHES.items() if switch in switches}

    def patch_rest(root: nn.Module, handle: PatchHandle) -> set[tuple[str, bool]]:
        """Patches what of `root` is neither patched nor left out by an earlier call. Returns the switches that
        earlier calls have decided for modules of `root`, with their values."""
        modules, earlier = list(root.modules()), set()
        classes = stock_classes(modules)
        _warn_of_unknown(classes, wanted, fused_loss or cross_entropy)
        patches = [patch for patch in (*map(patch_of, classes), LayerNorm) if patch]
        known = {patch: kind for kind in wanted for patch in patches if issubclass(patch, kind)}
        for patch, kind in known.items():
            are_patched = {module: isinstance(module, patch) for module in _taken(patch, modules)}
            rest = _rest(_SWITCHES[kind], switches, are_patched, handle, earlier)
            swap_classes(rest, patch, handle)
            if as_liger_kernel:
                mark(rest, handle)
        if fused_loss:
            models = (module for module in modules if isinstance(module, CausalLM))
            swap_classes([head for model in models for head in heads_of(model)], Linear, handle)
        heads = [m for m in modules if hasattr(m, "lm_head") and isinstance(m, PreTrainedModel)]
        are_patched = {head: vars(head).get("_loss_function") is causal_lm_cross_entropy for head in heads}
        _replace_loss(_rest("cross_entropy", switches, are_patched, handle, earlier), handle)
        _set_memory(modules, memory, handle, only_new=model is None)
        for module in modules:
            if isinstance(module, DecoderLayer):
                module.adopt_checkpoint_function()
        return earlier

    with PatchHandle() as handle:  # a failure on the way undoes what was done
        if model is None:
            for cls in _models_of(model_type):
                # A model stays patched. The last of such calls decides; one by liger_kernel's name overrides no other.
                on_construction(cls, lambda m: patch_rest(m, PatchHandle()), handle, first=not as_liger_kernel)
        elif holds(model, model_type):
            earlier, name = patch_rest(model, handle), type(model).__name__
            differing = [switch for switch in switches if (switch, not switches[switch]) in earlier]
            said = ", ".join(f"{names[s]} is {not switches[s]} (asked for: {switches[s]})" for s in differing)
            if differing and not as_liger_kernel:
                raise ValueError(f"{name} is patched already, with other options: {said}. {_WAYS_OUT}")
            if earlier and as_liger_kernel:
                level = logging.WARNING if differing else logging.INFO
                _logger.log(level, f"{name} is patched already, and keeps its options{': ' if said else ''}{said}")
        else:
            raise ValueError(
                f"{type(model).__name__} holds no {model_type} model to patch; "
                "apply_liger_kernel_to_instance(model) takes a model of any type"
            )
        return handle.pop_all()


_logger = logging.getLogger("liger_ext")

_WAYS_OUT = (
    "Call revert() on the handle of that call first. There is none for a model that was built under a patch of its "
    "class, nor for a copy: ask for the options that it has, or build it again without a patch and load the weights"
)

# Which switch is for which modules.
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


def _rest(
    switch: str,
    switches: dict[str, bool],
    are_patched: dict[nn.Module, bool],
    handle: PatchHandle,
    earlier: set[tuple[str, bool]],
) -> list[nn.Module]:
    """Returns the modules, of those that `switch` is for, that a call is to patch. The call notes on the others that it
    leaves them out, or finds that an earlier call has decided: what that has patched or left out stays as it is, and
    `earlier` gets that call's value of the switch."""
    rest = []
    for module, patched in are_patched.items():
        left_out = vars(module).get("_liger_left_out", frozenset())  # for which switches; copies and pickles have it
        if patched or switch in left_out:
            earlier.add((switch, patched))
        elif switches[switch]:
            rest.append(module)
        else:
            handle.replace(module, "_liger_left_out", left_out | {switch})
    return rest


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
    """The modules that `patch` is for: of MLPs those with an activation of ours, of layers those with a norm of ours,
    and no nn.LayerNorm of others."""
    stock = stock_class(patch)
    taken = [module for module in modules if isinstance(module, stock)]
    if patch is LayerNorm:
        return [module for module in taken if written_class(type(module), stock) in (stock, patch)]
    if issubclass(patch, MLP | Experts):
        return [module for module in taken if patch.unit_of(module) is not None]
    if issubclass(patch, DecoderLayer):
        norms = {module: getattr(module, patch.NORM, None) for module in taken}
        one_of_each = {type(norm): norm for norm in norms.values()}
        ours = {cls for cls, norm in one_of_each.items() if _is_norm(norm)}
        return [module for module, norm in norms.items() if type(norm) in ours]
    return taken


def _is_norm(module: object) -> bool:
    """Whether a patch of a norm takes the place of its class, or has taken it."""
    return any(issubclass(patch, Norm) for patch in map(patch_of, stock_classes([module])) if patch)


def holds_known_code(model: nn.Module) -> bool:
    """Whether something of `model` can be patched."""
    modules = list(model.modules())
    return any(_taken(patch, modules) for patch in map(patch_of, stock_classes(modules)) if patch)


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
        return apply_liger_kernel_to_llama
    taken = FAMILIES.get(family, ())
    unit = next((name for name in UNITS if name in taken), "swiglu")
    signature = inspect.signature(apply_liger_kernel_to_llama)
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


_ENDS = {Norm: "norm", MLP: "MLP", Experts: "experts", DecoderLayer: "layer", CausalLM: "head", Attention: "attention"}
_unknown: set[Callable] = set()


def _warn_of_unknown(classes: list[type[nn.Module]], wanted: dict[type, bool], wants_loss: bool) -> None:
    """Once for each class that looks like one that is to be patched, and for the loss, if it runs other code."""
    ends = tuple(end for kind, part in _ENDS.items() if wanted[kind] for end in ENDS[part])
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


def _replace_loss(models: Iterable[nn.Module], handle: PatchHandle) -> None:
    """Where transformers' own setter has it; a loss that the user has set stays."""
    for model in models:
        if "_loss_function" not in vars(model) and model.loss_function is ForCausalLMLoss and knows_loss():
            handle.replace(model, "_loss_function", causal_lm_cross_entropy)


def _set_memory(modules: Iterable[nn.Module], level: str | None, handle: PatchHandle, only_new: bool) -> None:
    """Gives a level of memory to those of `modules` that look at one. None, or with `only_new`: each keeps what it has.
    One that has none gets, without `level`, what the others have, or "auto"."""
    levels = {module: vars(module).get("liger_memory") for module in modules if hasattr(module, "liger_memory")}
    default = level or next(filter(None, levels.values()), "auto")
    for module, now in levels.items():
        wanted = now if now and (only_new or level is None) else default
        if wanted != now:
            handle.replace(module, "liger_memory", wanted)
