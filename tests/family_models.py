"""Small language models of the families in the table of docs/families.md, for the tests of patching."""

import copy
import functools
import warnings

import pytest
import torch
from llama_models import SIZES, randomised
from mutations import find_class
from transformers import AutoConfig, AutoModelForCausalLM

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.models import families, patches
from liger_ext.models.recognise import reading

SMALL = SIZES | dict(intermediate_size=96, num_hidden_layers=4, head_dim=18)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e4)
LONG = dict(type="longrope", short_factor=[1.5] * 4, long_factor=[2.0, 3.0, 4.0, 5.0])
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8)
LATENT = dict(
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    num_key_value_heads=4,
    head_dim=8,
    num_hidden_layers=2,
)
ROUTED = dict(
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
INDEXED = (
    LATENT
    | ROUTED
    | dict(first_k_dense_replace=1, index_topk=4, index_head_dim=16, index_n_heads=2, num_hidden_layers=3)
)
GRANITE_MOE = dict(
    num_local_experts=6,
    num_experts_per_tok=2,
    logits_scaling=3.0,
    residual_multiplier=0.7,
    router_aux_loss_coef=0.5,
    num_hidden_layers=2,
    head_dim=16,
)
# Options by config.model_type, of the families whose decoder layers are tested.
LAYERS = {
    "afmoe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1, head_dim=16)
    | dict(sliding_window=6, num_hidden_layers=2, global_attn_every_n_layers=2),
    "apertus": dict(head_dim=16),
    "bailing_hybrid": LATENT
    | ROUTED
    | dict(num_local_experts=6, layer_types=["linear_attention", "full_attention"], first_k_dense_replace=1)
    | dict(linear_head_dim=8, linear_num_heads=4, head_dim=16),
    "bamba": MAMBA | dict(attn_layer_indices=[1], num_hidden_layers=2, head_dim=16),
    "glm_moe_dsa": LATENT | ROUTED | INDEXED,
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": GRANITE_MOE | dict(shared_intermediate_size=48, sliding_window=6),
    "granitemoehybrid": GRANITE_MOE
    | MAMBA
    | dict(shared_intermediate_size=48, layer_types=["linear_attention", "full_attention"]),
    "granitemoeshared": GRANITE_MOE | dict(shared_intermediate_size=48),
    "hyperclovax": dict(residual_multiplier=0.7, logits_scaling=0.3, use_post_norm=True, head_dim=16),
    "jamba": dict(
        num_experts=6,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
        num_hidden_layers=2,
        head_dim=16,
    ),
    "jetmoe": dict(num_local_experts=4, num_experts_per_tok=2, kv_channels=16, num_hidden_layers=2, head_dim=16),
    "kimi_linear": LATENT
    | ROUTED
    | dict(num_local_experts=6, layer_types=["linear_attention", "full_attention"], q_lora_rank=None)
    | dict(linear_head_dim=8, linear_num_heads=4),
    "lfm2": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2, head_dim=16),
    "lfm3": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2, head_dim=16),
    "minicpm3": LATENT,
    "olmo_hybrid": LINEAR | dict(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, head_dim=16),
    "vaultgemma": dict(sliding_window=6, head_dim=16),
}
# Options by config.model_type, of the other families.
OPTIONS = {
    "cohere2": dict(logit_scale=0.3, sliding_window=6, head_dim=16),
    "deepseek_v3": dict(
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        head_dim=8,
        num_hidden_layers=2,
    ),
    "ernie4_5": dict(use_bias=True, head_dim=16),
    "exaone4": dict(sliding_window=6, sliding_window_pattern=2),
    "falcon_h1": dict(
        mlp_multipliers=[0.7, 1.3],
        lm_head_multiplier=0.5,
        embedding_multiplier=1.5,
        key_multiplier=0.8,
        attention_in_multiplier=0.9,
        mlp_bias=True,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_rms_norm=True,
        num_hidden_layers=2,
        head_dim=16,
    ),
    "gemma": dict(hidden_act="gelu_pytorch_tanh"),
    "gemma2": dict(final_logit_softcapping=5.0, attn_logit_softcapping=8.0, sliding_window=6),
    "gemma3_text": dict(
        final_logit_softcapping=5.0, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=16, head_dim=16
    ),
    "gemma4_text": dict(
        final_logit_softcapping=5.0,
        sliding_window=6,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=1000,
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
    ),
    "glm4": dict(attention_bias=True, head_dim=16),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=6, head_dim=16, num_hidden_layers=2),
    "granite": dict(logits_scaling=3.0, residual_multiplier=0.7, head_dim=16),
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": dict(num_experts=6, moe_topk=2, head_dim=16, num_hidden_layers=2),
    "llama": {},
    "llama4_text": dict(
        num_local_experts=4,
        intermediate_size_mlp=96,
        head_dim=16,
        attention_chunk_size=6,
        interleave_moe_layer_step=2,
        num_hidden_layers=2,
    ),
    "ministral": dict(sliding_window=6),
    "ministral3": {},
    "mistral": dict(sliding_window=6),
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=2, router_aux_loss_coef=0.5, output_router_logits=True),
    "nemotron": dict(mlp_bias=True, partial_rotary_factor=0.5, head_dim=16),
    "olmo2": dict(head_dim=16),
    "olmo3": dict(head_dim=16, sliding_window=6),
    "phi3": dict(partial_rotary_factor=0.5, head_dim=16, rope_scaling=LONG, original_max_position_embeddings=8),
    "qwen2": dict(use_sliding_window=True, sliding_window=6, max_window_layers=2, head_dim=16),
    "qwen2_moe": dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
        head_dim=16,
        num_hidden_layers=2,
    ),
    "qwen3": dict(attention_bias=True, rope_scaling=YARN),
    "qwen3_5_text": LINEAR | dict(head_dim=16, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2),
    "qwen3_moe": dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]),
    "qwen3_next": LINEAR
    | dict(
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        output_router_logits=True,
        layer_types=["linear_attention", "full_attention"],
        num_hidden_layers=2,
        head_dim=16,
    ),
    "seed_oss": dict(residual_dropout=0.0, attention_dropout=0.0, mlp_bias=True),
    "smollm3": dict(head_dim=16, mlp_bias=True),
}


def build(family, device="cpu", dtype=torch.float32, seed=0, **overrides):
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SMALL, **{**LAYERS, **OPTIONS}.get(family, {}), **overrides})
    model = AutoModelForCausalLM.from_config(config)
    set_experts(model, "eager")  # the other implementations reject float64
    return randomised(model).to(device, dtype).train()


def all_experts(family):
    """Returns options with which each token goes to every expert, so that rounding cannot change the choice of
    experts."""
    options = {**LAYERS, **OPTIONS}[family]
    count = next(
        (options[name] for name in options if name in ("num_experts", "num_local_experts", "n_routed_experts")), 0
    )
    return {name: count for name in ("num_experts_per_tok", "moe_topk") if name in options}


def freeze_few(model):
    """Freezes parameters of fewer than 8 numbers: in bf16 chance decides how exact their gradients are."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.numel() >= 8)


def perturbed(model, seed):
    """Returns a copy of the model in which each weight changes by its last bit or not at all."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + torch.randn_like(weight).sign() * torch.finfo(weight.dtype).eps / 2)
    return model


def assert_same(found, expected, neighbours=()):
    """Asserts that two fp32 steps differ only by rounding; for models without a more exact reference. ``neighbours``:
    steps of perturbed models, which show how much of a result is rounding."""
    largest = max(float(result.abs().max()) for name, result in expected.items() if name not in ("loss", "logits"))
    for name, result in found.items():
        # A gradient whose terms cancel consists of the rounding errors of larger ones.
        atol = 1e-4 * float(expected[name].abs().max()) + 1e-7 * largest
        atol += 3 * max((float((other[name] - expected[name]).abs().max()) for other in neighbours), default=0)
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=atol, msg=message)
    assert expected.keys() - found.keys() <= {"logits"}


def set_experts(model, implementation):
    if any(type(module).__name__.endswith("Experts") for module in model.modules()) and family_has_choice(model):
        model.set_experts_implementation(implementation)


def family_has_choice(model):
    return hasattr(model, "set_experts_implementation") and model._can_set_experts_implementation()


def patched(model, **options):
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        apply_liger_kernel_to_instance(model, **options)
    return model


def patch_named(owner):
    """Returns a class unchanged, and for the name of a class of transformers ("gemma2.Gemma2DecoderLayer") its
    patch."""
    return patches.find_patch(find_class(owner)) if isinstance(owner, str) else owner


@pytest.fixture
def clear_recognition():
    """Clears the caches of recognition before and after a test."""
    caches = [
        found for module in (patches, reading) for found in vars(module).values() if hasattr(found, "cache_clear")
    ]

    def forget():
        for cache in caches:
            cache.cache_clear()
        families._unknown.clear()

    forget()
    yield
    forget()
