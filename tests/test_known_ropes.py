"""The rotary embeddings of transformers that we recognise: each function compared with ours on arbitrary tables, and
the attention of models that call another function than Llama's."""

import copy
import importlib
import inspect

import pytest
import torch
from cases import RecordCalls, normal
from family_models import assert_same, build, freeze_few, patched
from llama_models import TRANSFORMERS, assert_as_good, make_batch, one_thread, step  # noqa: F401

from liger_ext.models.modules import decoder
from liger_ext.models.modules.rope import known_rope
from liger_ext.models.patching.forwards import stock_function
from liger_ext.models.recognise import known

newest = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code, and fewer models")
HALF_WIDTH = ("codegen", "deepseek_v2", "gpt_oss", "gptj", "llama4", "openai_privacy_filter")
_NAMES = """
    blt codegen cohere2 deepseek_v2 deepseek_v3 deepseek_v4 dinov3_vit edgetam_video ernie4_5 ernie4_5_vl_moe gemma4
    glm4 glm4v glmasr gpt_oss gptj helium hunyuan_vl inkling2 llama llama4 minimax_m3_vl mistral_large4 modernbert
    nanochat nemotron olmo2 openai_privacy_filter pe_audio phi3 qwen2_vl qwen3_next qwen4_exp sam3
"""
MODELS = [name for name in _NAMES.split() if importlib.util.find_spec(f"transformers.models.{name}")]


def known_ropes(model_type):
    """{name: (transformers' function, ours)} of a module's rotary functions that we recognise."""
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    functions = {name: stock_function(f) for name, f in vars(module).items() if name.startswith("apply_rotary_")}
    return {name: (f, known_rope(f)) for name, f in functions.items() if known_rope(f) is not None}


def differences(model_type, dtype=torch.float32):
    """The largest difference of each result. The tables hold arbitrary numbers, and no two columns are equal."""
    last = model_type == "deepseek_v4"  # the last 6 columns are rotated
    width = 3 if last else 8 if model_type in (*HALF_WIDTH, "minimax_m3_vl") else 16
    q, k = (normal(2, heads, 5, 16, dtype=dtype, seed=heads) for heads in (3, 1))
    cos, sin = whole = [normal(2, 5, width, dtype=dtype, seed=seed) for seed in (5, 6)]
    for theirs, ours in known_ropes(model_type).values():
        arguments = inspect.signature(theirs).parameters
        if model_type == "qwen4_exp":  # for images the tables have more columns
            cos, sin = (t[..., : 8 if "unsqueeze_dim" in arguments else 16] for t in whole)
        heads = (q,) if {"x", "tensor"} & set(arguments) else (q, k)
        calls = [([t.transpose(1, dim) for t in heads], (cos, sin), {"unsqueeze_dim": dim}) for dim in (1, 2)]
        within = [t.transpose(1, 2) for t in heads]
        if "freqs_cis" in arguments:
            within = heads if model_type == "deepseek_v2" else within
            calls = [(within, (torch.complex(cos.float(), sin.float()),), {})]
        elif "tensor" in arguments:
            calls = [(within, (sin, cos), {})]
        elif "kwargs" in arguments:  # image tokens behind other tokens
            calls = [(heads, (cos[1, rows:], sin[1, rows:]), {}) for rows in (0, 2)]
        elif model_type in ("edgetam_video", "sam3"):  # images
            calls = [(heads, (cos[1], sin[1]), {})]
        elif "unsqueeze_dim" not in arguments:
            batch = [] if model_type == "minimax_m3_vl" else [(within, (cos, sin), {})]
            calls = [*batch, ([t[1] for t in within], (cos[1], sin[1]), {})]
        elif model_type == "mistral_large4":
            calls.append(((heads[0], None), (cos, sin), {}))
        elif "k" in arguments and arguments["k"].default is None:
            calls.append((heads[:1], (), dict(cos=cos, sin=sin)))
        for given, tables, options in calls:
            expected, found = (f(*given, *tables, **options) for f in (theirs, ours))
            pairs = [(expected, found)] if torch.is_tensor(expected) else zip(expected, found, strict=True)
            for a, b in ((a, b) for a, b in pairs if a is not b):  # both are None
                assert a.shape == b.shape and a.dtype == b.dtype
                yield float((a - b).abs().max())


@pytest.mark.parametrize("model_type", MODELS)
def test_does_what_transformers_does(model_type):
    found = list(differences(model_type))
    assert found and max(found) < 1e-5
    assert max(differences(model_type, torch.bfloat16)) < 0.2  # the summands are up to 16


@newest
@pytest.mark.parametrize(
    "model_type, wrong",
    [
        ("cohere2", {"layout": "halves"}),
        ("glm4", {"layout": "interleaved"}),
        ("ernie4_5", {"tables": "first half"}),
        ("gpt_oss", {"layout": "interleaved", "tables": "half"}),
        ("deepseek_v3", {"layout": "interleaved", "tables": "first half"}),
        ("helium", {"layout": "interleaved_to_halves", "tables": "first half"}),
        ("deepseek_v2", {"layout": "halves", "tables": "half", "heads": 1}),
        ("deepseek_v4", {"layout": "interleaved", "tables": "half"}),
        ("gptj", {"layout": "halves", "tables": "half"}),
        ("nanochat", {}),
        ("dinov3_vit", {"layout": "interleaved"}),
        ("edgetam_video", {"heads": 1}),
        ("inkling2", {}),
        ("minimax_m3_vl", {"layout": "interleaved"}),
        ("mistral_large4", {"layout": "interleaved", "tables": "first half"}),
        ("pe_audio", {"layout": "interleaved"}),
        ("qwen4_exp", {"layout": "interleaved"}),
        ("sam3", {"heads": 1}),
    ],
)
def test_a_wrong_entry_would_be_found(monkeypatch, model_type, wrong):
    digests = {known.find_rope(theirs).digest for theirs, _ in known_ropes(model_type).values()}
    entries = known.by_digest().items()
    changed = {key: e._replace(options=wrong) if e.digest in digests else e for key, e in entries}
    monkeypatch.setattr(known, "by_digest", lambda: changed)
    assert max(differences(model_type)) > 0.1


ATTENTION = {
    "cohere": ("Cohere", dict(head_dim=16)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, q_lora_rank=16, kv_lora_rank=16)
        | dict(num_key_value_heads=4, first_k_dense_replace=4, n_routed_experts=4, n_group=1, topk_group=1),
    ),
    "deepseek_v2": (
        "DeepseekV2",
        dict(head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, q_lora_rank=16, kv_lora_rank=16)
        | dict(num_key_value_heads=4, first_k_dense_replace=4, n_routed_experts=4, n_group=1, topk_group=1),
    ),
    "deepseek_v4": (
        "DeepseekV4",
        dict(head_dim=16, qk_rope_head_dim=6, q_lora_rank=16, o_lora_rank=16, o_groups=2, n_routed_experts=2)
        | dict(num_experts_per_tok=2, moe_intermediate_size=32, layer_types=["sliding_attention"] * 4)
        | dict(mlp_layer_types=["moe"] * 4),
    ),
    "gemma4_text": (
        "Gemma4Text",
        dict(head_dim=16, global_head_dim=32, hidden_size_per_layer_input=8, vocab_size_per_layer_input=1000)
        | dict(num_kv_shared_layers=0, sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "gpt_oss": (  # no biases: the gradient of k's bias cancels to rounding noise in bf16
        "GptOss",
        dict(head_dim=16, attention_bias=False, num_local_experts=1, num_experts_per_tok=1, sliding_window=6),
    ),
    "gptj": ("GPTJ", dict(rotary_dim=8)),
    "helium": ("Helium", dict(head_dim=16)),
    "llama4_text": ("Llama4Text", dict(head_dim=16, moe_layers=[], intermediate_size_mlp=96, attention_chunk_size=8)),
    "nanochat": ("NanoChat", dict(head_dim=16)),
}


@newest
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ATTENTION)
def test_attention_equals_stock(device, model_type, dtype):
    prefix, options = ATTENTION[model_type]
    model = build(model_type, device, dtype, num_hidden_layers=4, **options)
    if dtype is torch.bfloat16:
        freeze_few(model)
    ours, batch = patched(model), make_batch(device)
    attention = [type(m) for m in ours.modules() if type(m).__name__ == f"{prefix}Attention"]
    assert len(attention) == 4 and all(issubclass(cls, decoder.Attention) for cls in attention)
    with RecordCalls() as record:
        found = step(ours, batch)
    of_one = dict.fromkeys(("deepseek_v4", "gemma4_text", "gptj"), 2 * 4)
    of_one["deepseek_v4"] = 3 * 4  # it also rotates its output back
    calls = {"llama4_text": 3, **of_one}.get(model_type, 4)  # the fourth layer of Llama 4 has no rope
    assert record.names.count("rope") == record.names.count("rope_backward") == calls
    if model_type == "deepseek_v4" and dtype is torch.float32:  # the float64 reference computes in fp32, too
        assert_same(found, step(model, batch))
    else:
        assert_as_good(found, step(model, batch), step(copy.deepcopy(model).double(), batch))
