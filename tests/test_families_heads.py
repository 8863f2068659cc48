"""Tests of patched heads whose inner model has another name than Llama's, or that change their logits or loss."""

import copy
import inspect
import pickle

import pytest
import torch
from family_models import (
    INDEXED,
    LATENT,
    LAYERS,
    OPTIONS,
    ROUTED,
    all_experts,
    assert_same,
    freeze_few,
    patch_named,
    patched,
    set_experts,
)
from family_models import build as build_family
from llama_models import (
    TRANSFORMERS,
    assert_as_good,
    make_batch,
    one_thread,  # noqa: F401
    randomised,
    step,
    steps,
    tokens,
)
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import liger_ext
from liger_ext.models.model_types import FUNCTION_TYPES
from liger_ext.models.modules import causal_lm

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code")
SIZES = dict(vocab_size=1000, initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2_SIZES = dict(n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
GPT_NEOX_SIZES = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=64,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
MAMBA_SIZES = dict(hidden_size=64, num_hidden_layers=2, state_size=8, rescale_prenorm_residual=False)
# Options by config.model_type, of models that only this file tests.
BUILT = {
    "beam": LATENT
    | ROUTED
    | dict(num_experts=6, final_logit_softcapping=5.0, sliding_window=6, head_dim=16, num_attention_heads=4)
    | dict(hidden_size=64, intermediate_size=96, max_position_embeddings=64, num_key_value_heads=2),
    "bloom": dict(hidden_size=64, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    "codegen": GPT2_SIZES | dict(rotary_dim=8, n_ctx=64),
    "ctrl": GPT2_SIZES | dict(dff=96),
    "dbrx": dict(
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2, moe_loss_weight=0.5),
        output_router_logits=True,
    ),
    "falcon": GPT_NEOX_SIZES | dict(num_kv_heads=2, new_decoder_architecture=True),
    "falcon_mamba": MAMBA_SIZES,
    "gpt2": GPT2_SIZES,
    "gpt_bigcode": GPT2_SIZES,
    "gpt_neo": GPT_NEOX_SIZES
    | dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6),
    "gpt_neox": GPT_NEOX_SIZES,
    "gptj": GPT2_SIZES | dict(rotary_dim=8),
    "hy_v3": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        intermediate_size=96,
        hidden_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=64,
    ),
    "hy_v4": LATENT
    | ROUTED
    | INDEXED
    | dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, max_position_embeddings=64, hc_mult=2),
    "mamba": MAMBA_SIZES,
    "mamba2": MAMBA_SIZES | dict(head_dim=16, num_heads=8, n_groups=2, chunk_size=8),
    "mpt": dict(d_model=64, n_layers=2, n_heads=4, max_seq_len=64, expansion_ratio=2),
    "openai-gpt": GPT2_SIZES | dict(afn="gelu"),
    "opt": GPT_NEOX_SIZES | dict(ffn_dim=96, word_embed_proj_dim=64, dropout=0.0),
    "recurrent_gemma": dict(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=192,
        lru_width=64,
        attention_window_size=16,
        logits_soft_cap=5.0,
    ),
}
LAYER_FAMILIES = "afmoe", "bamba", "granitemoe", "hyperclovax", "jetmoe", "minicpm3"  # options: `family_models.LAYERS`
MODELS = (*BUILT, *LAYER_FAMILIES)
WITHOUT_CACHE = "ctrl", "openai-gpt"
IN_FLOAT = "bamba", "falcon_mamba", "mamba", "mamba2"  # a float64 copy still computes in fp32, so it is no reference
SMALL_PARAMETERS = ("hy_v4",)  # has parameters of at most 24 numbers: see `steps`


def build_model(model_type, device="cpu", dtype=torch.float32, **options):
    if model_type in LAYER_FAMILIES:
        experts = all_experts(model_type) if dtype is torch.bfloat16 else {}
        return build_family(model_type, device, dtype, **experts, **options)
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **BUILT[model_type], **options})
    model = AutoModelForCausalLM.from_config(config)
    set_experts(model, "eager")  # the other implementations reject float64
    return randomised(model).to(device, dtype).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_equals_stock(device, model_type, dtype):
    model = build_model(model_type, device, dtype)
    batches = [make_batch(device, seed=seed) for seed in range(1, 9 if model_type in SMALL_PARAMETERS else 2)]
    if dtype is torch.bfloat16:
        freeze_few(model)
    ours, reference = patched(model), copy.deepcopy(model).double()
    assert isinstance(ours, causal_lm.CausalLM)
    found, expected = steps(ours, batches), steps(model, batches)
    assert "logits" in expected and "logits" not in found
    if model_type in IN_FLOAT and dtype is torch.float32:
        assert_same(found, expected)
    else:
        assert_as_good(found, expected, steps(reference, batches))


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max()))


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_and_what_else_is_returned(device, model_type):
    """Logits and all other outputs equal transformers', dtypes included: with and without labels, and as a tuple."""
    model = build_model(model_type, device)
    ours, batch = patched(model), make_batch(device)
    options = dict(output_hidden_states=True, use_cache=True)
    for given in (batch, {"input_ids": batch["input_ids"]}):
        found, expected = ours(**given, **options, skip_logits=False), model(**given, **options)
        assert found.keys() == expected.keys() and isinstance(found, type(expected))
        assert found.logits.dtype == expected.logits.dtype
        assert_close(found.logits, expected.logits)
        for a, b in zip(found.hidden_states, expected.hidden_states, strict=True):
            assert_close(a, b)
    with_options = ours(**batch, label_smoothing=0.0, skip_logits=False)
    assert_close(with_options.logits, model(**batch).logits)
    torch.testing.assert_close(with_options.loss, model(**batch).loss)
    found, expected = (m(**batch, return_dict=False, use_cache=False) for m in (ours, model))
    assert isinstance(found, tuple)
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("model_type", ["bloom", "gptj", "mamba"])
def test_arguments_by_their_place(device, model_type):
    """Positional arguments reach their parameters. return_dict is one of them, except for GPT-J from transformers 5.24
    on."""
    model, batch = build_model(model_type, device), make_batch(device)
    parameters = inspect.signature(model.forward).parameters
    given = {name: batch.get(name, p.default) for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    options = dict(return_dict=False, use_cache=False)
    given |= {name: value for name, value in options.items() if name in given}
    others = {name: value for name, value in options.items() if name not in given}
    found, expected = (m(*given.values(), **others) for m in (patched(model), model))
    assert isinstance(found, tuple) and isinstance(expected, tuple)
    torch.testing.assert_close(found[0], expected[0])


@pytest.mark.parametrize("output_router_logits", [None, True, False])
@pytest.mark.parametrize("model_type", ["afmoe", "dbrx", "granitemoe", "jetmoe"])
def test_what_the_routers_say(device, model_type, output_router_logits):
    """All models but the first add the loss that balances the experts' load."""
    model, batch = build_model(model_type, device), make_batch(device)
    for name in ("router_aux_loss_coef", "aux_loss_coef"):
        if hasattr(model, name):
            setattr(model, name, 0.5)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2, 8:] = 0
    expected = model(**batch, output_router_logits=output_router_logits)
    for skip in (True, False):
        found = patched(model)(**batch, output_router_logits=output_router_logits, skip_logits=skip)
        torch.testing.assert_close(found.loss, expected.loss)
        for a, b in zip(found.router_logits or (), expected.router_logits or (), strict=True):
            assert_close(a, b)
        assert (found.get("aux_loss") is None) is (expected.get("aux_loss") is None)
        if expected.get("aux_loss") is not None:
            torch.testing.assert_close(found.aux_loss, expected.aux_loss)


@pytest.mark.parametrize("model_type", ["granitemoe", "jetmoe"])
def test_another_factor_of_the_routers_would_be_found(monkeypatch, model_type):
    monkeypatch.setattr(
        causal_lm.MoeCausalLM, "_balance", lambda self: (self.num_experts, self.num_experts_per_tok, 0.1)
    )
    with pytest.raises(AssertionError):
        test_what_the_routers_say(torch.device("cpu"), model_type, True)


@pytest.mark.parametrize("model_type", MODELS)
def test_generates_the_same(device, model_type):
    model, ids = build_model(model_type, device).eval(), tokens(2, 9, device=device)
    model.config.output_router_logits = False
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, use_cache=model_type not in WITHOUT_CACHE)
    assert torch.equal(patched(model).generate(ids, **options), model.generate(ids, **options))


OTHERS = [f for f in (*OPTIONS, *LAYERS) if f in CONFIG_MAPPING and f not in MODELS]


@pytest.mark.parametrize("model_type", [*MODELS, *OTHERS])
def test_torchs_classes_stay_and_others_come_back(model_type):
    """Other libraries replace modules that are exactly of torch's class. Only nn.LayerNorm is patched."""
    make = build_model if model_type in MODELS else build_family
    model, batch = make(model_type), make_batch("cpu")
    before = [type(m) for m in model.modules()]

    def check(patched_model):
        assert type(patched_model) is not before[0]
        for (name, module), cls in zip(patched_model.named_modules(), before, strict=True):
            if cls.__module__.startswith("torch.") and cls is not nn.LayerNorm:
                assert type(module) is cls, name

    with liger_ext.apply_liger_kernel_to_instance(model):
        check(model)
        step(model, batch)
        check(model)
    assert [type(m) for m in model.modules()] == before
    if model_type in FUNCTION_TYPES:
        with liger_ext.apply_liger_kernel(model_type):
            model = make(model_type)
        check(model)
        step(model, batch)
        check(model)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bloom", "gpt_neox", "mamba", "opt"])
def test_compiled(device, model_type):
    torch._dynamo.reset()
    model, batch = build_model(model_type, device), make_batch(device)
    compiled = torch.compile(lambda m, **b: m(**b), backend="aot_eager", fullgraph=True)
    with sdpa_kernel(SDPBackend.MATH):  # else graph and eager code select different attention kernels
        assert_same(step(patched(model), batch, compiled), step(model, batch))


@pytest.mark.parametrize("model_type", MODELS)
def test_pickled(model_type):
    model = patched(build_model(model_type))
    loaded, batch = pickle.loads(pickle.dumps(model)), make_batch("cpu")
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    found, expected = (m(**batch) for m in (loaded, model))
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=0)
    assert type(pickle.loads(pickle.dumps(expected))) is type(expected)


def test_a_loss_of_all_logits(device):
    """Bamba's loss with a z-loss coefficient has a term of all logits, so the head computes logits."""
    model = build_model("bamba", device, z_loss_coefficient=0.5)
    ours, batch = patched(model), make_batch(device)
    found, expected = step(ours, batch), step(model, batch)
    assert "logits" in found and expected["loss"] > step(build_model("bamba", device), batch)["loss"] + 1
    assert_same(found, expected)


def test_what_a_model_does_not_take_it_does_not_get(device):
    """Arguments that the model does not accept reach only the loss, as in transformers' head of BLOOM."""
    model = build_model("bloom", device)
    batch = make_batch(device) | dict(num_items_in_batch=7, of_the_users_own=None)
    torch.testing.assert_close(patched(model)(**batch).loss, model(**batch).loss)


def _as_it_is(self, x):
    return x


WRONG = [
    ("beam", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    ("hy_v4", causal_lm.CausalLM, "_for_head", lambda self, x: 0.9 * x),
    ("afmoe", causal_lm.RoutedCausalLM, "liger_logits", lambda self: (0.9, None)),
    ("bamba", causal_lm.BambaCausalLM, "liger_logits", lambda self: (0.9, None)),
    ("dbrx", causal_lm.MoeCausalLM, "_results", lambda self, results, _: results),
    ("jetmoe", causal_lm.MoeCausalLM, "liger_logits", lambda self: (0.9, None)),
    ("falcon_mamba", causal_lm.CausalLM, "_for_head", lambda self, x: 0.9 * x),
    ("granitemoe", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    ("hyperclovax", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    ("minicpm3", causal_lm.CausalLM, "_for_head", _as_it_is),
    ("recurrent_gemma", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    ("opt", causal_lm.CausalLM, "_for_head", lambda self, x: 0.9 * x),
]


@pytest.mark.parametrize("model_type, cls, attribute, value", WRONG)
def test_a_wrong_entry_would_be_found(monkeypatch, model_type, cls, attribute, value):
    monkeypatch.setattr(patch_named(cls), attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), model_type, torch.float32)
