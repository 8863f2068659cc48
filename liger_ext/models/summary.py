"""Counts the parts of a model that run our code, and finds why others run transformers' code and why a loss needs
logits. Hooks, wrappers, adapters and reverts change the results, so none is stored.

A part counts if it is patched, if it could be, or if its class has the name of such a part. The reasons come from the
functions by which a step decides.
"""

import inspect
import logging
import os
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from liger_ext.models.families import _ENDS, _SWITCHES
from liger_ext.models.modules.called_head import all_rows_reason, vocabulary
from liger_ext.models.modules.causal_lm import CausalLM, CausalLMInside
from liger_ext.models.modules.decoder import Attention, DecoderLayer
from liger_ext.models.modules.experts import Experts
from liger_ext.models.modules.head import called_reason
from liger_ext.models.modules.loss import causal_lm_cross_entropy
from liger_ext.models.modules.mlp import MLP, only_activation_runs
from liger_ext.models.modules.norms import LayerNorm, Norm, is_plain_rms_norm
from liger_ext.models.modules.stand_in import adapters
from liger_ext.models.patches import find_patch, is_left_alone, is_norm, stock_classes
from liger_ext.models.patching.classes import inherits_forward, source_class, stock_class
from liger_ext.models.patching.forwards import leads_to
from liger_ext.models.patching.handle import Loss, Part, Summary
from liger_ext.models.patching.warn import warn
from liger_ext.models.recognise.known import ENDS

NAMES = {Norm: "norms", MLP: "MLPs", Experts: "experts", Attention: "attentions", DecoderLayer: "layers"}

_MIXINS = (*NAMES, CausalLM, CausalLMInside)


def summarise(model: nn.Module) -> Summary:
    """Implements `PatchHandle.summary`."""
    found: dict[str, list[tuple[str, str | None]]] = {}
    levels = {vars(m)["liger_memory"] for m in model.modules() if "liger_memory" in vars(m)}
    patches = _patches(model)
    for name, module in model.named_modules():
        patch = patches[type(module)]
        kind = _named_kind(module) if patch is None else _patched_kind(patch)
        if kind is DecoderLayer and patch is not None and not is_norm(getattr(module, patch.NORM, None)):
            continue  # a layer of a vision tower, with torch's norms, which no op adds to the residual stream
        if kind is not None:
            found.setdefault(NAMES[kind], []).append((name, _reason(module, patch, kind)))
    adapted = []
    for name, layer, reason in adapters(model, (DecoderLayer, Attention, MLP)):
        is_off = getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False)
        adapted.append((name, reason or ("it is disabled or merged" if is_off else None)))
    found |= {"adapters": adapted} if adapted else {}
    parts = {name: _part(found[name]) for name in (*NAMES.values(), "adapters") if name in found}
    return Summary(type(model).__name__, ", ".join(sorted(levels)) or None, parts, list(_losses(model)))


def report(model: nn.Module) -> None:
    """Warns of each patched head that trains with all logits, with their size and the reason. Logs one line about the
    model (level INFO), in the first of the processes that train together."""
    for loss in _losses(model):
        if loss.how == "all logits" and loss.is_patched:
            warn(f"{loss.model} trains with {loss.text(1000)}")
    logger = logging.getLogger("liger_ext")
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if is_grouped else int(os.environ.get("RANK", "0"))  # torchrun sets it
    if rank == 0 and logger.isEnabledFor(logging.INFO):
        logger.info(summarise(model).line())


def _part(modules: list[tuple[str, str | None]]) -> Part:
    stock: dict[str, list[str]] = {}
    for name, reason in modules:
        if reason is not None:
            stock.setdefault(reason, []).append(name)
    return Part(len(modules) - sum(map(len, stock.values())), len(modules), stock)


def _patches(model: nn.Module) -> dict[type[nn.Module], type[nn.Module] | None]:
    """Returns the patch of each class of the model's modules. A model has many modules of few classes."""
    return {cls: _patch(module) for cls, module in {type(m): m for m in model.modules()}.items()}


def _patch(module: nn.Module) -> type[nn.Module] | None:
    """Returns the patch that the module has, or that a patch function would give it."""
    cls = type(module)
    if isinstance(module, nn.LayerNorm) and source_class(cls, nn.LayerNorm) in (nn.LayerNorm, LayerNorm):
        return LayerNorm
    if isinstance(module, _MIXINS):
        return cls
    return next(iter(filter(None, map(find_patch, stock_classes([module])))), None)


def _patched_kind(patch: type[nn.Module]) -> type | None:
    return Norm if patch is LayerNorm else next((kind for kind in NAMES if issubclass(patch, kind)), None)


def _named_kind(module: nn.Module) -> type | None:
    """Returns the kind that the name of a class stands for whose code is not known."""
    for cls in stock_classes([module]):
        if not is_left_alone(cls):
            return next((kind for kind in NAMES if cls.__name__.endswith(ENDS[_ENDS[kind]])), None)
    return None


def _reason(module: nn.Module, patch: type[nn.Module] | None, kind: type) -> str | None:
    """Returns why a module runs transformers' code; None: it runs ours."""
    if patch is None:
        return "its code is not known"
    runs = vars(module).get("_old_forward", vars(module).get("forward"))
    if runs is not None and not leads_to(runs, type(module).forward):
        return "another forward was set on it, which may call liger_ext's"
    if kind in (MLP, Experts) and patch.activation_op(module) is None:
        return "its activation has no op"
    if not isinstance(module, LayerNorm if patch is LayerNorm else kind):
        return _unpatched_reason(module, patch, kind)
    activation = getattr(patch, "ACTIVATION", "act_fn")  # of an MLP; of experts
    if kind in (MLP, Experts) and not only_activation_runs(getattr(module, activation, None)):
        return "its activation has a hook"
    if kind is Experts and not hasattr(patch.__bases__[0], "forward") and _loops(module):
        return "the experts implementation 'eager' runs no op"
    return _layer_reason(getattr(module, patch.NORM)) if kind is DecoderLayer else None


def _layer_reason(norm: nn.Module) -> str | None:
    """Returns why a patched layer adds to the residual stream without the norm's op; FSDP2 gathers a norm's weight."""
    if not isinstance(norm, Norm):
        return "its norm is not patched"
    is_sharded = hasattr(getattr(norm, "weight", None), "placements")
    return None if is_sharded or is_plain_rms_norm(norm) else "its norm has a hook, or another forward"


def _loops(experts: nn.Module) -> bool:
    """Returns whether transformers' loop over experts runs, without the method that our patch replaces."""
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", "eager")
    return implementation == "eager" and "_apply_gate" not in inspect.unwrap(type(experts).forward).__code__.co_names


def _unpatched_reason(module: nn.Module, patch: type[nn.Module], kind: type) -> str:
    switch = _SWITCHES[LayerNorm if patch is LayerNorm else kind]
    if switch in vars(module).get("_liger_left_out", ()):
        return f"{switch}=False"
    if patch is LayerNorm:
        return "it is torch's LayerNorm, and the patch has no switch for it"
    stock = stock_class(patch)
    return "it is not patched" if inherits_forward(type(module), stock) else "it has a forward of its own"


def _losses(model: nn.Module) -> Iterator[Loss]:
    """Yields the losses of the outermost models with a head."""
    patches, inside = _patches(model), set()
    for module in model.modules():
        patch = patches[type(module)]
        if module not in inside and _is_head(module, patch):
            inside.update(module.modules())
            yield _loss(module, patch)


def _is_head(module: nn.Module, patch: type[nn.Module] | None) -> bool:
    if patch is not None:
        return issubclass(patch, CausalLM | CausalLMInside)
    return any(cls.__name__.endswith(ENDS["head"]) for cls in stock_classes([module]))


def _loss(model: PreTrainedModel, patch: type[nn.Module] | None) -> Loss:
    head = model.get_output_embeddings()
    known = None if head is None else vocabulary(head)
    vocab = known or getattr(model.config.get_text_config(), "vocab_size", None)
    facts = vocab, model.dtype, type(model).__name__, isinstance(model, CausalLM | CausalLMInside)
    if patch is None:
        return Loss("all logits", f"the code of {type(model).__name__} is not known", *facts)
    if not isinstance(model, CausalLM | CausalLMInside):
        reason = _unpatched_reason(model, patch, CausalLM)
        is_ours = vars(model).get("_loss_function") is causal_lm_cross_entropy
        return Loss("all logits", f"{reason}; the cross entropy is liger_ext's" if is_ours else reason, *facts)
    reason = model.stock_reason()
    if reason is not None:
        return Loss("all logits", reason, *facts)
    head = (model if isinstance(model, CausalLM) else model.language_model).lm_head
    reason, all_rows = called_reason(head), all_rows_reason(head)
    if reason is None:
        return Loss("fused", None, *facts)
    return Loss("in chunks" if all_rows is None else "all logits", all_rows or reason, *facts)
