"""Small models of the families that have functions of their own, for the tests of patching."""

import copy
import warnings

import torch
from llama_models import SIZES, randomised
from transformers import AutoConfig, AutoModelForCausalLM

from liger_ext import apply_liger_kernel_to_instance

SMALL = SIZES | dict(intermediate_size=96, num_hidden_layers=4, head_dim=18)
OPTIONS = {
    "cohere2": dict(logit_scale=0.3, sliding_window=6, head_dim=16),
    "ernie4_5": dict(use_bias=True, head_dim=16),
    "exaone4": dict(sliding_window=6, sliding_window_pattern=2),
    "gemma": dict(hidden_act="gelu_pytorch_tanh"),
    "gemma2": dict(final_logit_softcapping=5.0, attn_logit_softcapping=8.0, sliding_window=6),
    "glm4": dict(attention_bias=True, head_dim=16),
    "granite": dict(logits_scaling=3.0, residual_multiplier=0.7, head_dim=16),
    "ministral": dict(sliding_window=6),
    "mistral": dict(sliding_window=6),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5, output_router_logits=True),
    "olmo2": dict(head_dim=16),
    "olmo3": dict(head_dim=16, sliding_window=6),
    "phi3": dict(partial_rotary_factor=0.5, head_dim=16),
    "qwen2": dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, head_dim=16),
    "qwen3": dict(attention_bias=True),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]),
    "seed_oss": dict(residual_dropout=0.0, attention_dropout=0.0),
    "smollm3": dict(head_dim=16, mlp_bias=True),
}


def build(family, device="cpu", dtype=torch.float32, seed=0, **overrides):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **OPTIONS.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others do not take float64
    return randomised(model).to(device, dtype).train()


def patched(model, **options):
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        apply_liger_kernel_to_instance(model, **options)
    return model
