"""The patches of Llama's classes: subclasses that `liger_ext.models.patching.swap` assigns to modules.

A patch has the name of the transformers class that it replaces, and is importable under it: a patched model can be
pickled, and is saved with the names of the original classes.
"""

import ast
import inspect

from torch import nn
from transformers import modeling_utils
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from liger_ext.models.modules.causal_lm import CausalLM
from liger_ext.models.modules.decoder import Attention, DecoderLayer
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.modules.norms import RMSNorm
from liger_ext.models.modules.rope import rope_for
from liger_ext.models.patching.calls import exports_onnx
from liger_ext.models.patching.forwards import parse_function, stock_function
from liger_ext.models.patching.source import find_calls
from liger_ext.models.patching.swap import copy_forward, replaces
from liger_ext.models.training.embedding import embedding, is_one_op

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, create_causal_mask, sdpa_mask  # 4.53 on
except ImportError:
    create_causal_mask = None


_MODEL = inspect.signature(modeling_llama.LlamaModel.forward)
_MODEL_NAMES = tuple(_MODEL.parameters)[1:]


@replaces(modeling_llama)
class LlamaModel(modeling_llama.LlamaModel):
    """Passes no mask to attention if only future tokens are masked: sdpa masks these by itself. In a graph of
    torch.compile, a training step embeds the tokens by one op (`training.embedding`).

    transformers (4.53 on) reads the values of position_ids and attention_mask to detect packed or padded rows, and
    waits for the GPU to do so. A graph of torch.compile cannot read values: it builds a mask of [batch, 1, seq, seq],
    with which sdpa cannot use its fast kernels. Arguments that were not passed need no such check.
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

# transformers (4.54 on) looks up by class name which values output_hidden_states and output_attentions record.
if hasattr(modeling_utils, "_CAN_RECORD_REGISTRY"):
    dict.__setitem__(modeling_utils._CAN_RECORD_REGISTRY, str(LlamaModel), LlamaModel._can_record_outputs)


def _needs_no_mask(config, arguments: dict[str, object]) -> bool:
    """Returns whether no argument of a call of LlamaModel requires a mask, and attention is sdpa, which needs none."""
    return (
        config._attn_implementation == "sdpa"
        and modeling_llama.create_causal_mask is create_causal_mask  # not replaced by other code
        and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
        and all(arguments.get(name) is None for name in _MASK_ARGUMENTS)
    )


_MASK_ARGUMENTS = ("attention_mask", "position_ids", "past_key_values", "cache", "cache_position")


def knows_model(cls: type[nn.Module]) -> bool:
    """Returns whether `cls.forward` uses the token ids and builds the mask as the `LlamaModel` of this file assumes."""
    definition = parse_function(cls.forward)
    if definition is None:
        return False
    text, names = ast.unparse(definition), (node.id for node in ast.walk(definition) if isinstance(node, ast.Name))
    masks = find_calls(definition, "create_causal_mask")
    given = {keyword.arg: ast.unparse(keyword.value) for call in masks for keyword in call.keywords}
    known = {name: name for name in _MASK_ARGUMENTS} | {"config": "self.config"}
    known |= dict.fromkeys(("input_embeds", "inputs_embeds"), "inputs_embeds")
    only_embeds = all(use in text for use in _TOKEN_ID_USES) and list(names).count("input_ids") == len(_TOKEN_ID_USES)
    return only_embeds and len(masks) == 1 and not masks[0].args and given.items() <= known.items()


_TOKEN_ID_USES = (
    "(input_ids is None) ^ (inputs_embeds is not None)",
    "if inputs_embeds is None:\n        inputs_embeds = self.embed_tokens(input_ids)\n",
)


@replaces(modeling_llama)
class LlamaRMSNorm(RMSNorm, modeling_llama.LlamaRMSNorm):
    forward = RMSNorm.forward


@replaces(modeling_llama)
class LlamaMLP(MLP, modeling_llama.LlamaMLP):
    forward = MLP.forward


@replaces(modeling_llama, apply_rotary_pos_emb=rope_for(stock_function(modeling_llama.apply_rotary_pos_emb)))
class LlamaAttention(Attention, modeling_llama.LlamaAttention):
    pass


@replaces(modeling_llama)
class LlamaDecoderLayer(DecoderLayer, modeling_llama.LlamaDecoderLayer):
    pass


@replaces(modeling_llama, (loss_utils, "fixed_cross_entropy"))
class LlamaForCausalLM(CausalLM, modeling_llama.LlamaForCausalLM):
    pass
