"""What patching Llama means: which module does what differently. `liger_ext.models.patch` is the mechanism.

Each class here replaces the class of the same name in transformers, by a swap on the instance, and is importable under
that name: a patched model pickles, and is saved with the names of the original classes.
"""

import inspect
import warnings

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.utils import can_return_tuple

from liger_ext.models.decoder import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    create_causal_mask,
    has_silu,
)
from liger_ext.models.head import Linear, heads_of
from liger_ext.models.loss import (
    FUSED_OPTIONS,
    MEMORY_LEVELS,
    OUTPUT_OPTIONS,
    VALUE_OPTIONS,
    LigerCausalLMOutputWithPast,
    causal_lm_cross_entropy,
    causal_lm_loss,
    counted_rows,
    fused_causal_lm_loss,
)
from liger_ext.models.patch import (
    PatchHandle,
    on_construction,
    record_change,
    stands_in,
    swap_classes,
)

_FORWARD = inspect.signature(modeling_llama.LlamaForCausalLM.forward)
_FORWARD_NAMES = tuple(_FORWARD.parameters)[1:]


@stands_in(modeling_llama)
class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
    liger_memory = "auto"

    @can_return_tuple
    def forward(self, *args, skip_logits: bool | None = None, **kwargs) -> CausalLMOutputWithPast:
        """transformers' forward, but in training with labels the loss comes from the hidden states: no logits exist.

        Args:
            skip_logits: False brings the logits back in training, True spares them in evaluation. None: the rule above.
            shift_labels, num_items_in_batch, ignore_index, label_smoothing, lse_square_scale, ce_weight,
                use_token_scaling, accum_dtype, memory, return_token_accuracy, return_predicted_tokens: for the loss.

        A training step with labels returns no cache of keys and values (`past_key_values`) unless `use_cache=True` asks
        for it, and `return_dict=False` leaves out of the tuple what is None: the logits, and the cache. The loss of
        labels that are all ignored is 0; transformers gives NaN. A loss of the user's own (`model.loss_function`) is
        obeyed: it gets logits, as it must, and all arguments that it would get unpatched.
        """
        arguments = {**dict(zip(_FORWARD_NAMES, args, strict=False)), **kwargs}
        labels, shift_labels = arguments.get("labels"), arguments.get("shift_labels")
        has_labels = labels is not None or shift_labels is not None
        trains = self.training and has_labels
        if trains and arguments.get("use_cache") is None and arguments.get("past_key_values") is None:
            arguments["use_cache"] = False  # transformers' default copies every key and value into a cache
        if skip_logits and not has_labels:
            raise ValueError("skip_logits=True leaves nothing to return without labels or shift_labels")
        if skip_logits is None:
            skip_logits = trains
        if self.loss_function not in (ForCausalLMLoss, causal_lm_cross_entropy):
            return super().forward(**arguments)
        options = {name: arguments.pop(name) for name in _LOSS_OPTIONS if name in arguments}
        options.pop("return_z_loss", None)  # it is in the loss; the output has no place for it alone
        if not has_labels or not (skip_logits or options or labels is None):
            return super().forward(**arguments)

        loss_arguments = {name: arguments.pop(name) for name in _LOSS_ARGUMENTS if name in arguments}
        logits_to_keep = arguments.pop("logits_to_keep", 0)
        if skip_logits and isinstance(logits_to_keep, int) and logits_to_keep == 0:
            loss_arguments |= counted_rows(self.lm_head, **loss_arguments)
        outputs = self.model(**arguments, return_dict=True)
        hidden_states = _keep(outputs.last_hidden_state, logits_to_keep)
        if skip_logits:
            logits = None
            if options.get("memory") is None:
                options["memory"] = self.liger_memory
            result = fused_causal_lm_loss(hidden_states, self.lm_head, **loss_arguments, **options)
        else:
            logits = self.lm_head(hidden_states)
            result = causal_lm_loss(logits, **loss_arguments, **options)
        return LigerCausalLMOutputWithPast(
            loss=result.loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            token_accuracy=result.token_accuracy,
            predicted_tokens=result.predicted_tokens,
        )

    # Trainer and generate() read the signature: which columns of a data set and which arguments the model takes.
    forward.__signature__ = _FORWARD.replace(
        parameters=[
            *(p for p in _FORWARD.parameters.values() if p.kind is not p.VAR_KEYWORD),
            inspect.Parameter("skip_logits", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None),
            *(p for p in _FORWARD.parameters.values() if p.kind is p.VAR_KEYWORD),
        ]
    )


_LOSS_ARGUMENTS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_LOSS_OPTIONS = (*VALUE_OPTIONS, *OUTPUT_OPTIONS, *FUSED_OPTIONS)


def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: nn.Module | None = None,
    *,
    fused_add_rms_norm: bool = True,
    memory: str = "auto",
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
        swiglu: the MLPs' activation. Models with another `hidden_act` than SiLU keep theirs.
        model: patch this instance only. None: patch every Llama that is constructed from now on, by its class or by
            `from_pretrained` and `from_config`, until the handle is reverted; models built meanwhile stay patched.
        fused_add_rms_norm: residual addition and post-attention norm in one; needs `rms_norm`.
        memory: how much a training step keeps for its backward. `"fast"`: what transformers' modules keep. `"auto"`:
            without what is made again at little cost, the norms' outputs and silu(gate) * up; the fused loss has an
            `"auto"` of its own. `"low"`: the outputs of gate and up are made again, too, by a second run of their
            matmuls, and on a GPU the logits exist in chunks of a quarter of the head's gradient in fp32. `"min"`: the
            chunks are half as large, and with gradient checkpointing (transformers 4.53 on) the layers' inputs wait in
            pinned host memory, which must be large enough. Results are the same. The levels need `fused_add_rms_norm`,
            `swiglu` for the MLP's share and `rope` for the attention's. The argument `memory` of a model's forward is
            that of its loss alone.

    Returns:
        The handle: `.revert()` undoes the patch. As a context manager it reverts at the end.

    Raises:
        ValueError: both cross entropies are asked for, `model` holds no Llama, or `memory` is another word.
        TypeError: `model` is no module, or an option is neither True nor False.
        ImportError: transformers is older than 4.51.3.
    """
    for name, value in {name: value for name, value in locals().items() if name not in ("model", "memory")}.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}, expected True or False")
    if cross_entropy and fused_linear_cross_entropy:
        raise ValueError("cross_entropy and fused_linear_cross_entropy exclude each other: set one of them to False")
    if memory not in MEMORY_LEVELS:
        raise ValueError(f"memory is {memory!r}, expected {', '.join(map(repr, MEMORY_LEVELS))}")
    wanted = {
        LlamaAttention: rope,
        LlamaForCausalLM: fused_linear_cross_entropy,
        LlamaRMSNorm: rms_norm,
        LlamaMLP: swiglu,
        LlamaDecoderLayer: rms_norm and fused_add_rms_norm,
        LlamaModel: create_causal_mask is not None,
    }

    def patch_modules(root: nn.Module, handle: PatchHandle | None = None) -> None:
        modules = list(root.modules())
        kept = [p.__name__ for p, ask in wanted.items() if not ask and any(isinstance(m, p) for m in modules)]
        if kept:
            names = ", ".join(kept)
            warnings.warn(f"{names}: patched by an earlier call, and stays so: revert its handle first", stacklevel=3)
        for patch in (patch for patch, ask in wanted.items() if ask):
            swap_classes(filter(has_silu, modules) if patch is LlamaMLP else modules, patch, handle)
        if fused_linear_cross_entropy:
            models = (module for module in modules if isinstance(module, LlamaForCausalLM))
            swap_classes([head for model in models for head in heads_of(model)], Linear, handle)
        for module in modules:
            if hasattr(module, "liger_memory"):
                _set_memory(module, memory, handle)
            if isinstance(module, LlamaDecoderLayer):
                module.adopt_checkpoint_function()
            if cross_entropy and isinstance(module, modeling_llama.LlamaForCausalLM):
                _replace_loss(module, handle)

    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r:.80}, expected a model or None")
    with PatchHandle() as handle:  # a failure on the way undoes what was done
        if model is None:
            on_construction(modeling_llama.LlamaModel, patch_modules, handle)
            on_construction(modeling_llama.LlamaForCausalLM, patch_modules, handle)
        elif any(isinstance(module, modeling_llama.LlamaPreTrainedModel) for module in model.modules()):
            patch_modules(model, handle)
        else:
            raise ValueError(f"{type(model).__name__} holds no Llama model to patch")
        return handle.pop_all()


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


def _keep(hidden_states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """The positions whose logits are wanted: the last n (0: all), those of a 1-D index, or, row by row, of a 2-D index
    [batch, n] or a 2-D bool mask [batch, seq] (which gives [n_true, hidden_size])."""
    if isinstance(logits_to_keep, int):
        return hidden_states if logits_to_keep == 0 else hidden_states[:, -logits_to_keep:]
    if logits_to_keep.dim() < 2:
        return hidden_states[:, logits_to_keep]
    if logits_to_keep.dtype == torch.bool:
        return hidden_states[logits_to_keep]
    return hidden_states.take_along_dim(logits_to_keep.unsqueeze(-1), dim=1)
