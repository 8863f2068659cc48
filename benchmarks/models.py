"""The models, with random weights, whose training steps are timed, and the providers that train them: Hugging Face's
code, liger_ext at levels of memory, torch.compile, Liger-Kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.comparison.child import cast_parameters
from liger_ext.models.modules.loss import MEMORY_LEVELS

from .installed import has

_LLAMA = dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0,
              max_position_embeddings=131072)  # fmt: skip
_1B = dict(_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True)
_8B = dict(_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, tie_word_embeddings=False)
_SMALL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
              num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)  # fmt: skip
_GEMMA2 = dict(model_type="gemma2", hidden_size=2304, intermediate_size=9216, vocab_size=256000, head_dim=256,
               num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
# name: (configuration, batch, tokens of a sequence)
MODELS_CUDA = {
    "Llama-1B 8x2048": (_1B, 8, 2048),
    "Llama-1B 4x8192": (_1B, 4, 8192),
    "Llama-8B 1x4096": (_8B, 1, 4096),
}
# Steps that train only LoRA adapters; the first is the default.
LORA_CUDA = {
    "Llama-1B 8x2048": (_1B, 8, 2048),
    "Llama-1B 1x512": (_1B, 1, 512),
    "Llama-8B 2x2048": (_8B, 2, 2048),
    "Llama-8B 4x4096": (_8B, 4, 4096),
    "Gemma2-2B 4x2048": (dict(_GEMMA2, num_hidden_layers=26), 4, 2048),
}
MODELS_CPU = {"SmolLM2-135M, 6 layers": (_SMALL, 1, 256)}
# A few layers of each model, with about its width.
_HEADS = dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128)
FAMILIES_CUDA = {
    "Mistral-7B": (dict(_HEADS, model_type="mistral", hidden_size=4096, intermediate_size=14336, vocab_size=32768,
                        num_hidden_layers=4), 4, 2048),
    "Qwen3-4B": (dict(_HEADS, model_type="qwen3", hidden_size=2560, intermediate_size=9728, vocab_size=151936,
                      num_hidden_layers=4, tie_word_embeddings=True), 4, 2048),
    "Gemma2-2B": (dict(_GEMMA2, num_hidden_layers=4), 2, 2048),
    "Gemma3-1B": (dict(model_type="gemma3_text", hidden_size=1152, intermediate_size=6912, vocab_size=262144,
                       head_dim=256, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=6), 4, 2048),
    "Phi3-mini": (dict(model_type="phi3", hidden_size=3072, intermediate_size=8192, vocab_size=32064, pad_token_id=0,
                       num_attention_heads=32, num_hidden_layers=4), 4, 2048),
    "Granite-2B": (dict(model_type="granite", hidden_size=2048, intermediate_size=8192, vocab_size=49152,
                        num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=6, logits_scaling=8.0,
                        embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.015625), 4, 2048),
    "OLMo2-1B": (dict(model_type="olmo2", hidden_size=2048, intermediate_size=8192, vocab_size=100352,
                      num_attention_heads=16, num_hidden_layers=6), 4, 2048),
    "GLM4-9B": (dict(model_type="glm4", hidden_size=4096, intermediate_size=13696, vocab_size=151552, head_dim=128,
                     num_attention_heads=32, num_key_value_heads=2, num_hidden_layers=3, pad_token_id=0), 4, 2048),
    "Qwen3-MoE-30B-A3B": (dict(model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, vocab_size=151936,
                               moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, head_dim=128,
                               num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=2), 4, 2048),
}  # fmt: skip
FAMILIES_CPU = {
    "Qwen3-0.6B": (dict(model_type="qwen3", hidden_size=1024, intermediate_size=3072, vocab_size=32768, head_dim=128,
                        num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=2), 1, 128),
}  # fmt: skip
# The first is the default.
CONTEXT_CUDA, CONTEXT_CPU = {"Llama-8B": _8B, "Llama-1B": _1B}, {"SmolLM2-135M, 6 layers": _SMALL}

STOCK, OURS, COMPILED, UNSLOTH = "Hugging Face", "liger_ext", "torch.compile", "Unsloth's kernels"


def _stock(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _patched(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    apply_liger_kernel_to_instance(model=model, **options)
    return model


def _liger(model: torch.nn.Module) -> torch.nn.Module:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply

    apply(model=model)
    return model


def _unsloth(model: torch.nn.Module) -> Callable:
    from . import unsloth

    return unsloth.prepare(model)


def providers(device: str) -> dict[str, Callable[[torch.nn.Module], torch.nn.Module]]:
    """Functions that prepare a model. The other providers' losses are compared with the first provider's."""
    out = {
        STOCK: _stock,
        OURS: _patched,
        f"{OURS} + {COMPILED}": lambda model: torch.compile(_patched(model)),
        COMPILED: torch.compile,
    }
    if device == "cuda" and has("liger_kernel"):
        out["liger"] = _liger
    return out


def on_request(device: str) -> dict[str, Callable[[torch.nn.Module], torch.nn.Module]]:
    """All providers, also those that run only if --providers names them: other levels of memory. Unsloth's kernels,
    a default of the suite lora, train only adapters."""
    others = [level for level in MEMORY_LEVELS if level != "auto"]
    out = providers(device) | {f"{OURS} memory={level}": partial(_patched, memory=level) for level in others}
    if device == "cuda" and has("unsloth") and has("unsloth_zoo"):
        out[UNSLOTH] = _unsloth
    return out


def build(config: dict, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Equal random weights in every process. The cache of keys and values stays on, as in the model that a user
    loads."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama", **config}))
    return cast_parameters(model, dtype).to(device).train()
