"""The models that whole training steps are timed with, random weights, and who trains them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo.models import cast_parameters
from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.loss import MEMORY_LEVELS

from .installed import has

_LLAMA = dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0,
              max_position_embeddings=131072)  # fmt: skip
_1B = dict(_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True)
_8B = dict(_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, tie_word_embeddings=False)
_SMALL = dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
              num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)  # fmt: skip
# name: (configuration, batch, tokens of a sequence)
MODELS_CUDA = {
    "Llama-1B 8x2048": (_1B, 8, 2048),
    "Llama-1B 4x8192": (_1B, 4, 8192),
    "Llama-8B 1x4096": (_8B, 1, 4096),
}
MODELS_CPU = {"SmolLM2-135M, 6 layers": (_SMALL, 1, 256)}
# The first is the default.
CONTEXT_CUDA, CONTEXT_CPU = {"Llama-8B": _8B, "Llama-1B": _1B}, {"SmolLM2-135M, 6 layers": _SMALL}

STOCK, OURS, COMPILED = "Hugging Face", "liger_ext", "torch.compile"


def _stock(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _patched(model: torch.nn.Module, **options: object) -> torch.nn.Module:
    apply_liger_kernel_to_llama(model=model, **options)
    return model


def _liger(model: torch.nn.Module) -> torch.nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama as apply

    apply(model=model)
    return model


def providers(device: str) -> dict[str, Callable[[torch.nn.Module], torch.nn.Module]]:
    """What each makes of a model. The first is what the others' losses are compared with."""
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
    """All providers, also those that run only where --providers names them: the patch's other levels of memory."""
    others = [level for level in MEMORY_LEVELS if level != "auto"]
    return providers(device) | {f"{OURS} memory={level}": partial(_patched, memory=level) for level in others}


def build(config: dict, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """The same random weights in every process. The cache of keys and values stays on, as a user gets the model."""
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**config))
    return cast_parameters(model, dtype).to(device).train()
