"""Tests of causal language models of transformers that build in a small size and run known code: patched, they compute
the same loss and gradients within a tolerance.

With LIGER_EXT_MODELS=full (`make test-models`) also models that are not in the list here."""

import contextlib
import copy
import os
import warnings

import llama_models
import pytest
import torch
from family_models import assert_same
from llama_models import TRANSFORMERS, one_thread, randomised, step, tokens  # noqa: F401
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.models import families

# The models of transformers 5.23 that build with the sizes below and run known code.
_NAMES = """
    afmoe apertus arcee aria_text beam bitnet bloom cohere cohere2 cohere2_moe cpmant ctrl cwm deepseek_v4
    diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma gemma2
    gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
    gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2 jetmoe kimi_linear
    kolibri1 laguna lfm2 lfm3 llama llama4_text mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral modernbert-decoder moshi mpt nanochat nemotron olmo olmo2 olmo3
    olmo_hybrid olmoe openai-gpt opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma zaya
"""
KNOWN = _NAMES.split()
SIZES = llama_models.SIZES | dict(
    vocab_size=300,
    intermediate_size=96,
    head_dim=16,
    max_position_embeddings=64,
    moe_intermediate_size=32,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
)
ALL_MODELS = os.environ.get("LIGER_EXT_MODELS") == "full"
MODELS = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if ALL_MODELS or name in KNOWN)


def build(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type)
    for name, value in SIZES.items():
        if hasattr(config, name):
            with contextlib.suppress(AttributeError):  # a property computed from other values
                setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = (list(dict.fromkeys(config.layer_types)) * 2)[:2]
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 30_000_000:
        raise ValueError("the configuration has sizes under other names")
    return randomised(AutoModelForCausalLM.from_config(config)).train()


@pytest.mark.slow
@pytest.mark.skipif(TRANSFORMERS < (5, 17), reason="older transformers have other code")
@pytest.mark.parametrize("model_type", MODELS)
def test_equals_stock(model_type):
    ids = tokens(2, 9) % 297 + 3
    batch = dict(input_ids=ids, labels=ids)

    def run(model):
        torch.manual_seed(1)  # for dropout
        return step(model, batch)

    try:
        model = build(model_type)
        expected = run(model)
    except Exception as error:  # raised by transformers: the sizes do not fit together
        if model_type in KNOWN:
            raise
        pytest.skip(f"not built, or not run: {error!r:.200}")
    if model_type not in KNOWN and not families.holds_known_code(model):
        pytest.skip("runs no known code")
    ours = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        handle = apply_liger_kernel_to_instance(ours)
    assert any(type(module).__module__.startswith("liger_ext") for module in ours.modules())
    found = run(ours)
    assert_same(found, expected)
    handle.revert()
    assert [type(module) for module in ours.modules()] == [type(module) for module in model.modules()]
