"""Tests of decoder layers that do more than Llama's, such as norms after attention and after the MLP, or parallel
blocks: which ops the patched layers call, and that they compute stock transformers' results also when they are
compiled, checkpointed or have norms in another dtype."""

import copy
import importlib
import warnings

import pytest
import torch
from cases import RecordCalls
from family_models import (  # noqa: F401
    LAYERS,
    all_experts,
    assert_same,
    build,
    clear_recognition,
    freeze_few,
    patch_named,
    patched,
    set_experts,
)
from llama_models import (  # noqa: F401
    SIZES,
    TRANSFORMERS,
    assert_as_good,
    checkpoint_layers,
    make_batch,
    one_thread,
    randomised,
    step,
    steps,
    tokens,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import liger_ext
from liger_ext.models import patches
from liger_ext.models.modules import decoder, layers
from liger_ext.models.recognise import known

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code")
EXPERTS = dict(enable_moe_block=True, num_experts=4, top_k_experts=4, moe_intermediate_size=32)
MODELS = {
    "gemma4 with experts": ("gemma4_text", EXPERTS),
    "gemma4 without inputs of layers": ("gemma4_text", dict(hidden_size_per_layer_input=0)),
    "gemma4 of another activation": ("gemma4_text", dict(hidden_activation="relu")),
    "gemma4 that shares keys": (
        "gemma4_text",
        dict(num_kv_shared_layers=2, num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "llama4 without experts": ("llama4_text", dict(moe_layers=[])),
    "llama4 of experts": ("llama4_text", dict(moe_layers=[0, 1], num_experts_per_tok=4)),
    "falcon_h1 with factors": ("falcon_h1", dict(attention_out_multiplier=0.6, ssm_out_multiplier=1.4)),
}
RECURRENT = "bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "olmo_hybrid"
MODELS |= {family: (family, {}) for family in LAYERS} | {
    "granitemoehybrid without experts": ("granitemoehybrid", dict(num_local_experts=0, num_experts_per_tok=0)),
    "granitemoeshared without an MLP": ("granitemoeshared", dict(shared_intermediate_size=0)),
    "hyperclovax without norms of results": ("hyperclovax", dict(use_post_norm=False)),
    "lfm3 without norms of results": ("lfm3", dict(use_sandwich_norm=False)),
}
WITHOUT_SUM = {"olmo_hybrid": 1}  # number of layers that normalise the summand, not the sum
# A float64 copy of these still computes in fp32, so it is no reference.
IN_FLOAT = [name for name, (family, _) in MODELS.items() if family in ("falcon_h1", *RECURRENT)]
SCALAR_PARAMETERS = ("apertus",)  # has parameters of one number: see `steps`
each = pytest.mark.parametrize("name", MODELS)


def build_model(name, device, dtype=torch.float32):
    family, options = MODELS[name]
    if family in LAYERS and dtype is torch.bfloat16:
        options = {**all_experts(family), **options}
    model = build(family, device, dtype, **options)
    if dtype is torch.bfloat16:
        freeze_few(model)
    for layer in model.model.layers:
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar.fill_(0.75)
    return model


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_stock(device, name, dtype):
    model = build_model(name, device, dtype)
    batches = [make_batch(device, seed=seed) for seed in range(1, 9 if name in SCALAR_PARAMETERS else 2)]
    ours, reference = patched(model), copy.deepcopy(model).double()
    for m in (model, ours):
        set_experts(m, "grouped_mm")
    with RecordCalls() as record:
        found = steps(ours, batches)
    assert record.names.count("add_rms_norm") == len(batches) * (len(model.model.layers) - WITHOUT_SUM.get(name, 0))
    if name in IN_FLOAT and dtype is torch.float32:  # without an exact reference
        assert_same(found, steps(model, batches))
    else:
        assert_as_good(found, steps(model, batches), steps(reference, batches))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma4")])
def test_norms_in_another_dtype(device, name):
    model, batch = build_model(name, device, torch.bfloat16), make_batch(device)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    assert_as_good(step(patched(model), batch), step(model, batch), step(copy.deepcopy(model).double(), batch))


def test_llama4_runs_in_nodes(device):
    """Llama 4's norms form one autograd node with the projections that read them, as in Llama."""
    model, batch = build_model("llama4 without experts", device), make_batch(device)
    ours = patched(model)
    loss = ours(**batch).loss
    names, waiting = [], [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(type(node).__name__)
            waiting += [following for following, _ in node.next_functions]
    layers = len(model.model.layers)
    assert names.count("_NormMLPBackward") == names.count("_NormLinearsBackward") == layers


def _without_experts(self, x, residual):
    return layers.SandwichLayer._mlp_summand(self, x, residual)


WRONG = [
    ("gemma4 with experts", layers.Gemma4Layer, "_mlp_summand", _without_experts),
    ("gemma4 without inputs of layers", layers.Gemma4Layer, "_results", lambda self, x, *_: x),
    ("gemma4 of another activation", "gemma4.Gemma4TextDecoderLayer", "NORM", "post_attention_layernorm"),
    ("llama4 of experts", decoder.DecoderLayer, "_mlp_summand", lambda self, x, residual: x[0].view_as(residual) * 0.9),
    ("falcon_h1 with factors", layers.FalconH1Layer, "_attention_summand", lambda self, x: 0.9 * x),
    ("afmoe", "afmoe.AfmoeDecoderLayer", "NORM", "post_attention_layernorm"),
    ("afmoe", "afmoe.AfmoeDecoderLayer", "AFTER_FEED_FORWARD", "pre_mlp_layernorm"),
    ("apertus", "apertus.ApertusDecoderLayer", "INPUT_NORM", "feedforward_layernorm"),
    ("apertus", "apertus.ApertusDecoderLayer", "NORM", "attention_layernorm"),
    ("bailing_hybrid", layers.HybridLayer, "_recur", lambda self, x, _: 0.9 * self.self_attn(hidden_states=x)),
    ("bamba", layers.BambaLayer, "_recur", lambda self, x, _: 0.9 * self.mamba(hidden_states=x)),
    ("bamba", "bamba.BambaDecoderLayer", "NORM", "input_layernorm"),
    ("glm_moe_dsa", layers.IndexedLayer, "_results", lambda self, x, *_: (0.9 * x, None)),
    ("granitemoe", layers.ScaledLayer, "_mlp_summand", decoder.DecoderLayer._mlp_summand),
    ("granitemoe_swa", layers.GraniteMoeSharedLayer, "_feed_forward", decoder.DecoderLayer._feed_forward),
    ("granitemoeshared", layers.GraniteMoeSharedLayer, "_feed_forward", decoder.DecoderLayer._feed_forward),
    ("granitemoehybrid", layers.GraniteMoeHybridLayer, "_feed_forward", decoder.DecoderLayer._feed_forward),
    ("granitemoehybrid", layers.GraniteMoeHybridLayer, "_attention_summand", decoder.DecoderLayer._attention_summand),
    ("hyperclovax", layers.HyperCLOVAXLayer, "_attention_summand", layers.ScaledLayer._attention_summand),
    ("hyperclovax", layers.HyperCLOVAXLayer, "_mlp_summand", layers.ScaledLayer._mlp_summand),
    ("jamba", "jamba.JambaAttentionDecoderLayer", "NORM", "input_layernorm"),
    ("jamba", layers.OnlyRecurrentLayer, "_recur", lambda self, x, _: 0.9 * self.mamba(hidden_states=x)),
    ("jetmoe", "jetmoe.JetMoeDecoderLayer", "INPUT_NORM", "post_attention_layernorm"),
    ("kimi_linear", layers.HybridLayer, "_recur", lambda self, x, _: 0.9 * self.self_attn(hidden_states=x)),
    ("lfm2", layers.Lfm2Layer, "_recur", lambda self, x, _: 0.9 * self.conv(hidden_states=x)),
    ("lfm2", "lfm2.Lfm2DecoderLayer", "INPUT_NORM", "ffn_norm"),
    ("lfm3", "lfm3.Lfm3DecoderLayer", "AFTER_FEED_FORWARD", "ffn_norm"),
    ("minicpm3", layers.ScaledLayer, "_attention_summand", decoder.DecoderLayer._attention_summand),
    ("olmo_hybrid", layers.OnlyRecurrentLayer, "_recur", lambda self, x, _: 0.9 * self.linear_attn(x)),
    ("vaultgemma", "vaultgemma.VaultGemmaDecoderLayer", "NORM", "input_layernorm"),
]


@pytest.mark.parametrize("family", LAYERS)
def test_the_rest_of_a_layer(device, family):
    """The other results of a layer equal stock: the cache, hidden states, attentions, and inputs of the next layer."""
    model = build(family, device).eval()
    model.set_attn_implementation("eager")
    ours, ids = patched(model), tokens(2, 9, device=device)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(ours.generate(ids, **options), model.generate(ids, **options))
    found, expected = (m(ids, output_hidden_states=True, output_attentions=True) for m in (ours, model))
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name]) > 0
        for a, b in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [family for family in LAYERS if family != "jetmoe"])  # jetmoe cannot
@pytest.mark.parametrize("memory", ["auto", "low"])
def test_checkpointed(device, family, memory):
    model, batch = build(family, device), make_batch(device)
    ours = patched(model, memory=memory)
    for m in (model, ours):
        set_experts(m, "grouped_mm")
        checkpoint_layers(m, use_reentrant=False)
    assert_same(step(ours, batch), step(model, batch))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["afmoe", "granitemoeshared", "lfm2", "minicpm3", "vaultgemma"])
def test_compiled(device, family):
    torch._dynamo.reset()
    model, batch = build(family, device, num_hidden_layers=2), make_batch(device)
    ours = patched(model)
    for m in (model, ours):
        set_experts(m, "grouped_mm")
    compiled = torch.compile(lambda m, **b: m(**b), backend="aot_eager", fullgraph=True)
    with sdpa_kernel(SDPBackend.MATH):  # else graph and eager code select different attention kernels
        assert_same(step(ours, batch, compiled), step(model, batch))


@pytest.mark.parametrize(
    "name",
    ["minimax.MiniMax", "deepseek_v4.DeepseekV4", "glm5_next.Glm5NextText", "hy_v4.HYV4", "qwen4_exp.Qwen4ExpText"],
)
def test_nothing_is_said_of_layers_in_which_nothing_can_be_fused(name):
    folder, _, prefix = name.partition(".")
    cls = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), f"{prefix}DecoderLayer")
    assert patches.find_patch(cls) is None and patches.is_left_alone(cls)


@pytest.mark.usefixtures("clear_recognition")
def test_of_mlps_only_gated_ones_of_unknown_code_are_named(monkeypatch):
    monkeypatch.setattr(known, "by_digest", dict)
    for name, is_silent in (("siglip.Siglip", True), ("clip.CLIP", True), ("llama.Llama", False), ("phi3.Phi3", False)):
        folder, _, prefix = name.partition(".")
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        assert patches.is_left_alone(getattr(module, f"{prefix}MLP")) == is_silent, name


def test_nothing_is_said_of_what_transformers_runs_without_a_gradient():
    """GLM's indexer calls Llama's rope under a decorator of transformers that disables gradients; the decorator does
    not count as a replacement, so there is no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        liger_ext.apply_liger_kernel_to_instance(build("glm_moe_dsa"))


@pytest.mark.parametrize("family", LAYERS)
def test_is_undone(family):
    model = build(family)
    before = [type(m) for m in model.modules()]
    with liger_ext.apply_liger_kernel_to_instance(model):
        assert [type(m) for m in model.modules()] != before
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize("name, cls, attribute, value", WRONG)
def test_a_wrong_entry_would_be_found(monkeypatch, name, cls, attribute, value):
    monkeypatch.setattr(patch_named(cls), attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), name, torch.float32)


def test_one_dropout_for_both_results(device):
    """Emu 3's layers apply one dropout module to the results of attention and of the MLP."""
    module = importlib.import_module("transformers.models.emu3.modeling_emu3")
    torch.manual_seed(0)
    config = module.Emu3TextConfig(**SIZES, attention_dropout=0.0)
    stock = randomised(module.Emu3ForCausalLM(config)).to(device).train()
    for layer in stock.model.layers:
        layer.dropout.p = 0.3
    ours, batch = patched(stock), make_batch(device)
    assert all(type(layer).__bases__[0] is layers.SandwichLayer for layer in ours.model.layers)
    found = []
    for model in (ours, stock):
        torch.manual_seed(1)
        found.append(step(model, batch))
    assert_same(*found)
