"""What patching Llama means: which module does what differently. `liger_ext.models.patch` is the mechanism.

Each class here replaces the class of the same name in transformers, by a swap on the instance, and is importable under
that name: a patched model pickles, and is saved with the names of the original classes.
"""

import functools
import inspect
import warnings

import torch
from torch import nn
from transformers import activations, modeling_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.utils import can_return_tuple

from liger_ext import functional
from liger_ext.models.loss import (
    FUSED_OPTIONS,
    OUTPUT_OPTIONS,
    VALUE_OPTIONS,
    LigerCausalLMOutputWithPast,
    causal_lm_cross_entropy,
    causal_lm_loss,
    fused_causal_lm_loss,
)
from liger_ext.models.patch import (
    PatchHandle,
    copy_forward,
    is_plain_tensor,
    on_construction,
    only_forward_runs,
    record_change,
    stands_in,
    swap_classes,
)
from liger_ext.models.recompute import recomputed

try:
    from transformers.masking_utils import create_causal_mask  # 4.53 on
except ImportError:
    create_causal_mask = None


@stands_in(modeling_llama)
class LlamaRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not is_plain_tensor(self.weight):
            return super().forward(hidden_states)
        return recomputed(self, _rms_norm, hidden_states, self.weight, self.variance_epsilon)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if _raises_dtype(weight, x):
        return weight * functional.rms_norm(x, None, eps, 0.0)
    return functional.rms_norm(x, weight, eps, 0.0)


@stands_in(modeling_llama)
class LlamaMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (_has_silu(self) and only_forward_runs(self.act_fn)):  # one put in its place since, or a hook on it
            return super().forward(x)
        gate, up = self.gate_proj(x), self.up_proj(x)
        alike = gate.dtype == up.dtype and gate.shape == up.shape  # adapters of some projections may change either
        return self.down_proj(
            recomputed(self, functional.swiglu, gate, up, 1.0, 1.0) if alike else self.act_fn(gate) * up
        )


def _rope(q, k, cos, sin, *args, **kwargs):
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return (_stock_rope if learned else functional.rope)(q, k, cos, sin, *args, **kwargs)


_stock_rope = modeling_llama.apply_rotary_pos_emb


@stands_in(modeling_llama, apply_rotary_pos_emb=_rope)
class LlamaAttention(modeling_llama.LlamaAttention):
    """transformers' forward, in which the name `apply_rotary_pos_emb` means our function."""


def _raises_dtype(weight: torch.Tensor, *summands: torch.Tensor) -> bool:
    """Whether transformers' norm returns a wider dtype than its input's: of 16-bit hidden states and an fp32 weight."""
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in summands])
    return torch.promote_types(dtype, weight.dtype) != dtype


_LAYER = inspect.signature(modeling_llama.LlamaDecoderLayer.forward).parameters
_LAYER_DEFAULTS = {name: p.default for name, p in _LAYER.items() if p.default is not p.empty}  # all but hidden_states
_LAYER_RETURNS_TUPLE = "output_attentions" in _LAYER  # up to 4.53: hidden states[, attention weights]; then no tuple


@stands_in(modeling_llama)
class LlamaDecoderLayer(modeling_llama.LlamaDecoderLayer):
    """Adds the attention's output to the residual stream and normalises the sum in one op."""

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs):
        norm = self.post_attention_layernorm
        if not (isinstance(norm, LlamaRMSNorm) and only_forward_runs(norm) and is_plain_tensor(norm.weight)):
            return super().forward(hidden_states, *args, **kwargs)
        # The arguments differ between versions of transformers, but in each all of them go to the attention, by name.
        arguments = {**_LAYER_DEFAULTS, **dict(zip(_LAYER_DEFAULTS, args, strict=False)), **kwargs}
        attention, weights = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
        if _raises_dtype(norm.weight, attention, hidden_states):
            residual = hidden_states + attention
            normed = norm(residual)
        else:
            normed, residual = recomputed(
                self, functional.add_rms_norm, attention, hidden_states, norm.weight, norm.variance_epsilon, 0.0
            )
        hidden_states = residual + self.mlp(normed)
        if _LAYER_RETURNS_TUPLE:
            return (hidden_states, weights) if arguments["output_attentions"] else (hidden_states,)
        return hidden_states


_MODEL = inspect.signature(modeling_llama.LlamaModel.forward)
_MODEL_NAMES = tuple(_MODEL.parameters)[1:]


@stands_in(modeling_llama)
class LlamaModel(modeling_llama.LlamaModel):
    """Gives attention no mask under torch.compile where transformers gives none without it.

    transformers decides by looking into position_ids and the mask, which a graph cannot, and so hands a graph a mask of
    [batch, 1, seq, seq]: sdpa's fast kernels take none, only `is_causal`. What was not passed needs no look.
    """

    def forward(self, *args, **kwargs):
        arguments = {**dict(zip(_MODEL_NAMES, args, strict=False)), **kwargs}
        if torch.compiler.is_compiling() and _is_only_causal(self.config, arguments):
            return _forward_without_mask(self, **arguments)
        return super().forward(*args, **kwargs)

    forward.__signature__ = _MODEL


_forward_without_mask = copy_forward(LlamaModel, create_causal_mask=lambda *args, **kwargs: None)

# transformers (4.54 on) looks up by a class's name what output_hidden_states and output_attentions record.
if hasattr(modeling_utils, "_CAN_RECORD_REGISTRY"):
    dict.__setitem__(modeling_utils._CAN_RECORD_REGISTRY, str(LlamaModel), LlamaModel._can_record_outputs)


def _is_only_causal(config, arguments: dict[str, object]) -> bool:
    """Whether a call of LlamaModel means causal attention and nothing else, by sdpa, which needs no mask for it."""
    return (
        config._attn_implementation == "sdpa"
        and modeling_llama.create_causal_mask is create_causal_mask  # not one that other code has put there
        and all(arguments.get(name) is None for name in _MAKE_A_MASK)
        and False not in (arguments.get("is_causal"), getattr(config, "is_causal", None))
    )


_MAKE_A_MASK = ("attention_mask", "position_ids", "past_key_values", "cache_position")
_FORWARD = inspect.signature(modeling_llama.LlamaForCausalLM.forward)
_FORWARD_NAMES = tuple(_FORWARD.parameters)[1:]


@stands_in(modeling_llama)
class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
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
        outputs = self.model(**arguments, return_dict=True)
        hidden_states = _keep(outputs.last_hidden_state, logits_to_keep)
        if skip_logits:
            logits = None
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


_SILU = (nn.SiLU, getattr(activations, "SiLUActivation", nn.SiLU))  # the latter is new in transformers 5
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
) -> PatchHandle:
    """Makes Hugging Face Llama train with liger_ext: one model, or all that are built from now on.

    Every Llama model is covered: causal LM, the classifiers and question answering (whose own heads stay as they are),
    the bare LlamaModel, and a Llama inside another module (PEFT, DDP, FSDP2, ...). Nothing global is replaced.

    Args:
        rope: rotary position embedding.
        cross_entropy: the loss from logits. Excludes `fused_linear_cross_entropy`.
        fused_linear_cross_entropy: language-model head and loss in one; see `LlamaForCausalLM.forward`.
        rms_norm: all RMSNorms.
        swiglu: the MLPs' activation. Models with another `hidden_act` than SiLU keep theirs.
        model: patch this instance only. None: patch every Llama that is constructed from now on, by its class or by
            `from_pretrained` and `from_config`, until the handle is reverted; models built meanwhile stay patched.
        fused_add_rms_norm: residual addition and post-attention norm in one; needs `rms_norm`.

    Returns:
        The handle: `.revert()` undoes the patch. As a context manager it reverts at the end.

    Raises:
        ValueError: both cross entropies are asked for, or `model` holds no Llama.
        TypeError: `model` is no module, or an option is neither True nor False.
        ImportError: transformers is older than 4.51.3.
    """
    for name, value in {name: value for name, value in locals().items() if name != "model"}.items():
        if value not in (True, False):
            raise TypeError(f"{name} is {value!r}, expected True or False")
    if cross_entropy and fused_linear_cross_entropy:
        raise ValueError("cross_entropy and fused_linear_cross_entropy exclude each other: set one of them to False")
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
            swap_classes(filter(_has_silu, modules) if patch is LlamaMLP else modules, patch, handle)
        for module in modules:
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


def _has_silu(module: nn.Module) -> bool:
    """Whether the MLP's activation is the one that ours has: by its module, as users put others in its place."""
    return isinstance(module, modeling_llama.LlamaMLP) and type(getattr(module, "act_fn", None)) in _SILU


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
