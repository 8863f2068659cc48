"""What patching Llama means: which module does what differently. `liger_ext.models.patch` is the mechanism.

Each class here replaces the class of the same name in transformers, by a swap on the instance, and is importable under
that name: a patched model pickles, and is saved with the names of the original classes.
"""

import ast
import inspect

from torch import nn
from transformers import modeling_utils
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from liger_ext.models.calls import exports_onnx
from liger_ext.models.causal_lm import CausalLM
from liger_ext.models.decoder import Attention, DecoderLayer
from liger_ext.models.embedding import embedding, is_one_op
from liger_ext.models.forwards import definition_of, written_function
from liger_ext.models.mlp import MLP
from liger_ext.models.norms import RMSNorm
from liger_ext.models.patch import PatchHandle, copy_forward, stands_in
from liger_ext.models.recognise.normal_form import find_calls
from liger_ext.models.rope import rope_for

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, sdpa_mask  # 4.53 on
except ImportError:
    create_causal_mask = None


_MODEL = inspect.signature(modeling_llama.LlamaModel.forward)
_MODEL_NAMES = tuple(_MODEL.parameters)[1:]


@stands_in(modeling_llama)
class LlamaModel(modeling_llama.LlamaModel):
    """Gives attention no mask when there is nothing to mask but the future, which sdpa knows.

    transformers (4.53 on) looks into position_ids and attention_mask for packed or padded rows, and waits for the GPU
    to do so. A graph of torch.compile cannot look: it gets a mask of [batch, 1, seq, seq], with which sdpa cannot use
    its fast kernels. What was not passed needs no look.
    """

    def forward(self, *args, **kwargs):
        arguments = {**dict(zip(_MODEL_NAMES, args, strict=False)), **kwargs}
        if exports_onnx():
            return super().forward(**arguments)
        ids, given = arguments.get("input_ids"), arguments.get("inputs_embeds")
        if ids is not None and given is None and is_one_op(self.embed_tokens, self.training):
            arguments.update(input_ids=None, inputs_embeds=embedding(ids, self.embed_tokens))
        if _needs_no_mask(self.config, arguments):
            return _forward_without_mask(self, **arguments)
        return super().forward(**arguments)

    forward.__signature__ = _MODEL


_forward_without_mask = copy_forward(LlamaModel, create_causal_mask=lambda *args, **kwargs: None)

# transformers (4.54 on) looks up by a class's name what output_hidden_states and output_attentions record.
if hasattr(modeling_utils, "_CAN_RECORD_REGISTRY"):
    dict.__setitem__(modeling_utils._CAN_RECORD_REGISTRY, str(LlamaModel), LlamaModel._can_record_outputs)


def _needs_no_mask(config, arguments: dict[str, object]) -> bool:
    """Whether nothing in a call of LlamaModel asks for a mask, and attention is sdpa, which can do without."""
    return (
        config._attn_implementation == "sdpa"
        and modeling_llama.create_causal_mask is create_causal_mask  # not one that other code has put there
        and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
        and all(arguments.get(name) is None for name in _MAKE_A_MASK)
    )


_MAKE_A_MASK = ("attention_mask", "position_ids", "past_key_values", "cache", "cache_position")


def knows_model(cls: type[nn.Module]) -> bool:
    """Whether `cls.forward` does with the tokens, and with the mask, what `LlamaModel` here takes it to do."""
    definition = definition_of(cls.forward)
    if definition is None:
        return False
    text, names = ast.unparse(definition), (node.id for node in ast.walk(definition) if isinstance(node, ast.Name))
    masks = find_calls(definition, "create_causal_mask")
    given = {keyword.arg: ast.unparse(keyword.value) for call in masks for keyword in call.keywords}
    known = {name: name for name in _MAKE_A_MASK} | {"config": "self.config"}
    known |= dict.fromkeys(("input_embeds", "inputs_embeds"), "inputs_embeds")
    only_embeds = all(use in text for use in _USES_OF_IDS) and list(names).count("input_ids") == len(_USES_OF_IDS)
    return only_embeds and len(masks) == 1 and not masks[0].args and given.items() <= known.items()


_USES_OF_IDS = (
    "(input_ids is None) ^ (inputs_embeds is not None)",
    "if inputs_embeds is None:\n        inputs_embeds = self.embed_tokens(input_ids)\n",
)


@stands_in(modeling_llama)
class LlamaRMSNorm(RMSNorm, modeling_llama.LlamaRMSNorm):
    forward = RMSNorm.forward


@stands_in(modeling_llama)
class LlamaMLP(MLP, modeling_llama.LlamaMLP):
    forward = MLP.forward


@stands_in(modeling_llama, apply_rotary_pos_emb=rope_for(written_function(modeling_llama.apply_rotary_pos_emb)))
class LlamaAttention(Attention, modeling_llama.LlamaAttention):
    pass


@stands_in(modeling_llama)
class LlamaDecoderLayer(DecoderLayer, modeling_llama.LlamaDecoderLayer):
    pass


@stands_in(modeling_llama, (loss_utils, "fixed_cross_entropy"))
class LlamaForCausalLM(CausalLM, modeling_llama.LlamaForCausalLM):
    pass


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
    from liger_ext.models.families import apply  # made of the classes above

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
