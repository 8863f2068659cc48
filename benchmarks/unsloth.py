"""Unsloth's kernels (https://github.com/unslothai/unsloth) as a peer for steps that train only LoRA adapters.

A PEFT Llama keeps its structure; its norms, its linear layers with adapters, its rotary embedding and its loss call
Unsloth's functions. Unsloth's own loader, which replaces whole models, does not run: neither package's `__init__` is
executed, so a folder with the unpacked wheels `unsloth` and `unsloth_zoo` (2026.10.9) in PYTHONPATH is enough.
"""

from __future__ import annotations

import importlib.util
import sys
from types import MethodType, SimpleNamespace

import torch
from transformers.models.llama import modeling_llama as llama

PACKAGES = ("unsloth", "unsloth.kernels", "unsloth_zoo", "unsloth_zoo.temporary_patches")


def prepare(model: llama.LlamaForCausalLM):
    """Replaces the forward of the model's parts. Returns a function with the model's arguments ``input_ids`` and
    ``labels``."""
    if any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name):
        raise ValueError("Unsloth's kernels compute gradients of adapters only, but other parameters require gradients")
    for name in PACKAGES:
        if name not in sys.modules:
            sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    from unsloth.kernels.fast_lora import apply_lora_mlp_swiglu, apply_lora_o, apply_lora_qkv
    from unsloth.kernels.rms_layernorm import fast_rms_layernorm
    from unsloth.kernels.rope_embedding import fast_rope_embedding
    from unsloth_zoo.fused_losses.cross_entropy_loss import unsloth_fused_ce_loss

    def attention(self, hidden_states, position_embeddings, attention_mask=None, **unused):
        batch, seq, _ = hidden_states.shape
        parts = apply_lora_qkv(self, hidden_states)
        q, k, v = (part.view(batch, seq, -1, self.head_dim).transpose(1, 2) for part in parts)
        cos, sin = (table[0] for table in position_embeddings)
        q, k = fast_rope_embedding(q, k, cos, sin)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return apply_lora_o(self, out.transpose(1, 2).reshape(batch, seq, -1)), None

    forwards = {
        llama.LlamaRMSNorm: fast_rms_layernorm,
        llama.LlamaMLP: apply_lora_mlp_swiglu,
        llama.LlamaAttention: attention,
    }
    for module in model.modules():
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)

    def loss(input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return SimpleNamespace(loss=unsloth_fused_ce_loss(None, hidden, model.lm_head.weight, None, labels))

    return loss
