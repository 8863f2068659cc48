"""Tests of models of text with images or sounds against stock transformers: their language models, vision towers, and
the loss of their heads."""

import copy
import importlib

import pytest
import torch
from cases import RecordCalls
from family_models import INDEXED, LATENT, ROUTED, assert_same, patch_named, patched, set_experts
from llama_models import SIZES, TRANSFORMERS, assert_as_good, one_thread, randomised, step, tokens  # noqa: F401
from mutations import find_class
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.mllama import modeling_mllama

from liger_ext import apply_liger_kernel_to_instance, compat
from liger_ext.models.modules import causal_lm, decoder

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="older transformers have other code")
newest = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code")
if TRANSFORMERS == (5, 24):  # its Llama 4 with images reads a field that its language model's output lacks
    MoeCausalLMOutputWithPast.image_outputs = None
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    image_size=16,
    patch_size=8,
    depth=1,
    num_heads=4,
    embed_dim=32,
    out_hidden_size=64,
    projection_dim=64,
    fullatt_block_indexes=[0],
    deepstack_visual_indexes=[0],
)
AUDIO = dict(
    num_mel_bins=16,
    encoder_layers=1,
    encoder_attention_heads=4,
    encoder_ffn_dim=48,
    d_model=32,
    output_dim=64,
    downsample_hidden_size=8,
    patch_sizes=(4, 2, 1, 1),
    hidden_sizes=(16, 16, 16, 32),
    depths=(1, 1, 1, 1),
    out_hidden_size=64,
)
PROTEINS = dict(
    aligner_num_add_layers=1,
    aligner_attention_probs_dropout_prob=0.0,
    resampler_depth=1,
    resampler_dim_head=8,
    resampler_heads=2,
    resampler_num_latents=4,
)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
TEXT = SIZES | dict(
    head_dim=16,
    rope_parameters=ROPE,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    moe_hidden_size=64,
    logits_scaling=0.3,
    output_multiplier=0.5,
)
# Configurations of language models that are passed at construction, because other values are derived from them or they
# cannot change later.
PASSED_CONFIGS = {}
PASSED_CONFIGS["ernie4_5_vl_moe"] = SIZES | dict(
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=[32, 24],
    output_router_logits=True,
    router_aux_loss_coef=0.5,
    rope_parameters=ROPE | dict(mrope_section=[3, 3, 2]),
)
PASSED_CONFIGS["gemma4"] = SIZES | dict(
    head_dim=16,
    global_head_dim=16,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=1000,
    final_logit_softcapping=5.0,
    sliding_window=6,
    layer_types=["sliding_attention", "full_attention"],
)
_GLM5 = dict(qk_rope_head_dim=0, index_kpool=2, hc_mult=2, linear_head_dim=8, linear_num_heads=4, num_hidden_layers=2)
_GLM5 |= dict(layer_types=["linear_attention", "indexed_attention"], mlp_layer_types=["dense", "sparse"])
PASSED_CONFIGS["glm5_next"] = SIZES | INDEXED | _GLM5 | dict(output_router_logits=True, router_aux_loss_coef=0.5)
PASSED_CONFIGS["llama4"] = SIZES | dict(
    head_dim=16, num_local_experts=4, intermediate_size_mlp=96, interleave_moe_layer_step=2, attention_chunk_size=32
)
PASSED_CONFIGS["mistral_large4"] = SIZES | LATENT | ROUTED | INDEXED | dict(final_logit_softcapping=5.0, head_dim=24)
_NAMES = """
    ernie4_5_vl_moe evolla fuyu gemma3 gemma4 glm4v glm4v_moe glm5_next hunyuan_vl hyperclovax_vision_v2 idefics3
    internvl llama4 llava llava_next mistral3 mistral_large4 mllama muse_glimmer muse_spark paligemma
    qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe smolvlm video_llava
    vipllava
"""
MODELS = [name for name in _NAMES.split() if name in CONFIG_MAPPING]


def fill(config, values):
    for name, value in values.items():
        if hasattr(config, name):
            of_two = isinstance(getattr(config, name), list | tuple) and name in ("image_size", "patch_size")
            setattr(config, name, [value, value] if of_two else value)
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[-config.num_hidden_layers :]
    return config


def build(model_type, device="cpu"):
    config = AutoConfig.for_model(
        model_type, **({"text_config": PASSED_CONFIGS[model_type]} if model_type in PASSED_CONFIGS else {})
    )
    text = config.get_text_config()
    if model_type not in PASSED_CONFIGS:
        keeps_rope = model_type == "fuyu" or "full_attention" in (text.rope_parameters or {})
        fill(text, {k: v for k, v in TEXT.items() if k != "rope_parameters" or not keeps_rope})
    if text.pad_token_id is None:
        text.pad_token_id = 0
    if hasattr(text, "cross_attention_layers"):
        text.cross_attention_layers = []
    fill(config, PROTEINS | dict(projector_hidden_size=64, out_hidden_size=64))
    towers = {"vision_config": VISION, "audio_config": AUDIO, "protein_encoder_config": VISION}
    for name, sizes in towers.items():
        if hasattr(config, name):
            fill(getattr(config, name), sizes)
    if hasattr(config, "audio_config"):
        config.vision_start_token_id = 1
    torch.manual_seed(0)
    if model_type == "evolla":  # which no class of transformers' auto classes builds
        model = find_class("evolla.EvollaForProteinText2Text")(config)
    else:
        model = AutoModelForImageTextToText.from_config(config)
    model = randomised(model).to(device).train()
    set_experts(model, "eager")  # the other implementations reject float64
    return model


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("model_type", MODELS)
def test_text_as_stock(device, model_type, train):
    model = build(model_type, device).train(train)
    ours = patched(model)
    assert type(ours).__module__ == "liger_ext.models.families"
    ids = tokens(2, 9, device=device) % 900 + 3
    batch = dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
    if model_type == "paligemma":
        batch["token_type_ids"] = torch.zeros_like(ids)
    found = step(ours, batch)
    assert_as_good(found, step(model, batch), step(copy.deepcopy(model).double(), batch))
    assert ("logits" in found) is not train
    output, stock = ours(**batch), {name: value for name, value in model(**batch).items() if value is not None}
    assert stock.keys() - set(output) <= {"logits", "past_key_values", "cache"}
    if "aux_loss" in stock:
        torch.testing.assert_close(output.aux_loss, stock["aux_loss"])


@pytest.mark.parametrize("model_type", MODELS)
def test_generates_the_same(device, model_type):
    model = build(model_type, device).eval()
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    ids = tokens(2, 9, device=device) % 900 + 3
    assert torch.equal(patched(model).generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_a_tower_as_stock(device, model_type, dtype):
    """The result and gradients of a tower with a patched rotary embedding, for two images of 8 x 4 and 4 x 4
    patches."""
    model = build(model_type, device).to(dtype)
    towers = [m.model.visual for m in (patched(model), model, copy.deepcopy(model).double())]
    grid = torch.tensor([[1, 8, 4], [1, 4, 4]], device=device)
    config = model.config.vision_config
    columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(48, columns, generator=torch.Generator().manual_seed(3)).to(device)

    def run(tower):
        tower.zero_grad()
        with RecordCalls() as record:
            out = tower(patches.to(next(tower.parameters()).dtype), grid_thw=grid).pooler_output
            out = torch.cat(list(out)) if isinstance(out, list | tuple) else out
            out.double().square().sum().backward()
        results = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
        return record.names, {"out": out.detach(), **results}

    (ours, found), (_, stock), (_, reference) = map(run, towers)
    assert ours.count("rope") == ours.count("rope_backward") == len(model.model.visual.blocks)
    assert_as_good(found, stock, reference)


OTHERS = {  # {model type: an argument by its former name, which transformers' forward renames}
    "fuyu": "image_patches",
    "video_llava": "pixel_values_images",
}


@newest
@pytest.mark.parametrize("model_type", OTHERS)
def test_an_argument_by_its_former_name(device, model_type):
    """transformers' forward runs: it alone renames the argument."""
    model = build(model_type, device)
    image = torch.randn(1, 1, 30 * 30 * 3) if model_type == "fuyu" else torch.randn(1, 3, 16, 16)
    ids = tokens(1, 12, device=device) % 900 + 3
    ids[0, 2 : 3 if model_type == "fuyu" else 6] = model.config.image_token_id = 999
    for part in (model.model, model.model.language_model):
        part.config.image_token_id = 999
    batch = dict(input_ids=ids, labels=ids.clone())
    ours, expected = patched(model), step(model, batch | {OTHERS[model_type]: image.to(device)})
    found = step(ours, batch | {OTHERS[model_type]: image.to(device)})
    assert "logits" in found and "logits" not in step(ours, batch | dict(pixel_values=image.to(device)))
    assert_same(found, expected)
    with pytest.raises(ValueError, match=f"may rename {OTHERS[model_type]}"):
        ours(**batch, **{OTHERS[model_type]: image}, return_log_probs=True)


@newest
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_moshis_text_model(device, train):
    config = AutoConfig.for_model("moshi", **SIZES, head_dim=16, ffn_dim=96, audio_vocab_size=100)
    torch.manual_seed(0)
    model = randomised(find_class("moshi.MoshiForCausalLM")(config)).to(device).train(train)
    ours, ids = patched(model), tokens(2, 9, device=device)
    batch = dict(input_ids=ids, labels=ids.clone())
    found = step(ours, batch)
    assert isinstance(ours, causal_lm.MoshiCausalLM) and ("logits" in found) is not train
    assert_as_good(found, step(model, batch), step(copy.deepcopy(model).double(), batch))
    # The whole Moshi calls its text model with embeddings.
    embedded = dict(inputs_embeds=model.model.embed_tokens(ids).detach(), labels=ids)
    for call in (batch, embedded):
        output, stock = ours(**call), model(**call)
        torch.testing.assert_close(output.last_hidden_state, stock.last_hidden_state)
        torch.testing.assert_close(output.loss, stock.loss)
    torch.testing.assert_close(output.logits, stock.logits)


@pytest.mark.parametrize(
    "model_type, option",
    [("hyperclovax_vision_v2", "MULTIPLIED_BY"), ("muse_glimmer", "MULTIPLIED_BY"), ("muse_spark", "SOFTCAP")],
)
def test_a_wrong_entry_of_a_head_would_be_found(monkeypatch, model_type, option):
    head = type(build(model_type))
    monkeypatch.setattr(patch_named(f"{model_type}.{head.__name__}"), option, None)
    with pytest.raises(AssertionError):
        test_text_as_stock(torch.device("cpu"), model_type, True)


def test_options_of_the_loss(device):
    """Options of the loss work if the head belongs to the language model and the loss to the whole model, with logits
    and without."""
    model = build("llama4", device)
    ours, ids = patched(model), tokens(2, 9, device=device) % 900 + 3
    batch = dict(input_ids=ids, labels=ids, num_items_in_batch=7)
    torch.testing.assert_close(ours(**batch).loss, model(**batch).loss)
    logits = model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    batch = dict(input_ids=ids, label_smoothing=0.1)
    for labels in (dict(labels=ids), dict(shift_labels=torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:])):
        for skip in (True, False):
            torch.testing.assert_close(ours(**batch, **labels, skip_logits=skip).loss, expected)
    found = ours(**batch, labels=ids, return_token_accuracy=True)
    torch.testing.assert_close(found.token_accuracy, (logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean())
    torch.testing.assert_close(found.logits, logits)
    ours.loss_function = lambda logits, labels, vocab_size, **_: logits.mean()  # a loss of the user
    torch.testing.assert_close(ours(input_ids=ids, labels=ids).loss, logits.mean())
    with compat.install():
        importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama4(model=model)
        assert model(input_ids=ids, labels=ids).logits is None


@pytest.mark.parametrize("model_type", ["ernie4_5_vl_moe", "qwen3_vl_moe", "glm4v_moe", "qwen3_omni_moe_thinker"])
def test_the_experts_balance(device, model_type):
    """The added balance loss matters: with another factor `test_text_as_stock` fails."""
    cls = causal_lm.OmniMoeCausalLM if "omni" in model_type else causal_lm.TextMoeCausalLM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "_balance", lambda self: (4, 2, 0.1))
        with pytest.raises(AssertionError):
            test_text_as_stock(device, model_type, True)


@pytest.mark.parametrize("wrong", [False, True])
def test_mlps_of_towers(device, wrong):
    mlp = build("qwen2_5_vl", device).model.visual.blocks[0].mlp
    x = torch.randn(5, 32, device=device)
    expected = mlp(hidden_state=x)
    with (
        apply_liger_kernel_to_instance(mlp_model := build("qwen2_5_vl", device)),
        pytest.MonkeyPatch.context() as patch,
    ):
        ours = mlp_model.model.visual.blocks[0].mlp
        if wrong:
            patch.setattr(type(ours), "GATE", "up_proj")
        assert torch.allclose(ours(hidden_state=x), expected, atol=1e-5) is not wrong


def test_an_image(device):
    model = build("llava", device)
    ours, config = patched(model), model.config
    ids = tokens(1, 12, device=device) % 900 + 3
    ids[0, 2:6] = config.image_token_id = model.model.config.image_token_id = ours.model.config.image_token_id = 999
    batch = dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
    batch["pixel_values"] = torch.randn(1, 3, 16, 16, device=device)
    exact = copy.deepcopy(model).double()
    reference = step(exact, batch | dict(pixel_values=batch["pixel_values"].double()))
    found = step(ours, batch)
    assert any("vision" in name for name in found)
    assert_as_good(found, step(model, batch), reference)
    torch.testing.assert_close(ours(**batch).image_hidden_states, model(**batch).image_hidden_states)


@newest
@pytest.mark.parametrize("model_type, sounds", [("qwen2_5_omni_thinker", 4), ("qwen3_omni_moe_thinker", 2)])
def test_a_thinker_sees_and_hears(device, model_type, sounds):
    """A thinker accepts and ignores `logits_to_keep`, as in transformers."""
    model = build(model_type, device)
    text, config = model.config.get_text_config(), model.config.vision_config
    ids = tokens(1, 16, device=device) % 900 + 3
    ids[0, 1], ids[0, 2:6], ids[0, 8 : 8 + sounds] = model.config.vision_start_token_id, 999, 998
    model.config.image_token_id = model.model.config.image_token_id = 999
    model.config.audio_token_id = model.model.config.audio_token_id = 998
    columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
    batch = dict(
        input_ids=ids,
        labels=ids.clone(),
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.randn(16, columns, device=device),
        image_grid_thw=torch.tensor([[1, 4, 4]], device=device),
        input_features=torch.randn(1, 16, 16, device=device),
        feature_attention_mask=torch.ones(1, 16, dtype=torch.long, device=device),
    )
    doubled = {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}
    for more in ({}, {"logits_to_keep": 3}):
        ours, reference = patched(model), step(copy.deepcopy(model).double(), doubled | more)
        found = step(ours, batch | more)
        assert any("visual" in name for name in found) and any("audio_tower" in name for name in found)
        assert_as_good(found, step(model, batch | more), reference)
        assert "logits" not in found and text.vocab_size == model(**batch, **more).logits.shape[-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mllama_without_images(device, dtype):
    """Mllama's language model returns logits in fp32."""
    config = fill(AutoConfig.for_model("mllama").text_config, TEXT | dict(cross_attention_layers=[1]))
    torch.manual_seed(0)
    model = randomised(modeling_mllama.MllamaForCausalLM(config)).to(device, dtype).train()
    ours = patched(model)
    ids = tokens(2, 9, device=device) % 900 + 3
    batch = dict(input_ids=ids, labels=ids.clone())
    reference = step(copy.deepcopy(model).double(), batch)
    with RecordCalls() as record:
        found = step(ours, batch)
    assert "fused_linear_cross_entropy" in " ".join(record.names) and record.names.count("add_rms_norm") == 1
    assert_as_good(found, step(model, batch), reference)
    for options in (dict(skip_logits=False), dict(skip_logits=False, label_smoothing=0.1), {}):
        logits = ours(**(batch if options else dict(input_ids=ids)), **options).logits
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, model(input_ids=ids).logits, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "cls, name, value",
    [
        ("mllama.MllamaForCausalLM", "LOGITS", None),
        (causal_lm.CausalLM, "liger_logits", lambda self: (0.5, None)),
        (decoder.DecoderLayer, "_attention_summand", lambda self, x: 0.5 * x),
    ],
)
def test_a_wrong_entry_of_mllama_would_be_found(monkeypatch, cls, name, value):
    monkeypatch.setattr(patch_named(cls), name, value)
    with pytest.raises(AssertionError):
        test_mllama_without_images(torch.device("cpu"), torch.bfloat16)
