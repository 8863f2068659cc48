"""Tests of the families of family_models.py: which modules a patch replaces, and, of those in OPTIONS, that losses and
gradients equal those of stock transformers within a tolerance."""

import copy
import functools
import inspect
import pickle
import warnings
from pathlib import Path

import family_table
import pytest
import torch
import transformers
from cases import slow_if
from family_models import (  # noqa: F401
    LAYERS,
    OPTIONS,
    all_experts,
    assert_same,
    build,
    clear_recognition,
    patch_named,
    patched,
    perturbed,
    set_experts,
)
from llama_models import TRANSFORMERS, assert_as_good, checkpoint_layers, make_batch, one_thread, step, tokens  # noqa: F401
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import liger_ext
import liger_ext.functional as LF
from liger_ext.models import families
from liger_ext.models.model_types import FUNCTION_TYPES
from liger_ext.models.modules import causal_lm, decoder, experts, layers, mlp, norms
from liger_ext.models.patching.forwards import source_text
from liger_ext.models.patching.source import definition_in
from liger_ext.models.recognise import normal_form

# Classes of a family that stay unpatched with the newest transformers: known code without anything to fuse.
UNPATCHED = {
    "bailing_hybrid": {"BailingHybridDeltaAttention"},
    "apertus": {"ApertusMLP"},  # its activation is unknown
    "cohere2": {"Cohere2DecoderLayer"},
    "exaone4": {"Exaone4DecoderLayer"},
    "glm_moe_dsa": {"LayerNorm"},  # torch's class
    "gpt_oss": {"GptOssMLP"},
    "jamba": {"JambaAttention"},
    "jetmoe": {"JetMoeParallelExperts"},
    "kimi_linear": {"KimiLinearAttention", "KimiLinearDeltaAttention"},
    "nemotron": {"NemotronDecoderLayer"},
    "olmo2": {"Olmo2DecoderLayer"},
    "olmo3": {"Olmo3DecoderLayer"},
    "olmo_hybrid": {"OlmoHybridAttentionDecoderLayer"},
}
RECURRENT = "falcon_h1", "qwen3_5_text", "qwen3_next"  # a float64 copy still computes in fp32, so it is no reference
NEWEST_ONLY = "deepseek_v3", "llama4_text"  # older transformers reject float64, or calls without a mask
PRESENT = [f for f in OPTIONS if f in CONFIG_MAPPING and (TRANSFORMERS >= (5, 17) or f not in NEWEST_ONLY)]
newest = pytest.mark.skipif(TRANSFORMERS < (5, 17), reason="older transformers have other code")
each = pytest.mark.parametrize("family", PRESENT)
ENDS = (
    "RMSNorm",
    "LayerNorm",
    "LayerNorm1P",
    "RMSNormGated",
    "L2Norm",
    "MLP",
    "Experts",
    "DecoderLayer",
    "Attention",
    "ForCausalLM",
)


@pytest.mark.parametrize("family", [*PRESENT, *LAYERS])
@newest
def test_what_is_patched(family):
    """The patch replaces every class of a model except those in UNPATCHED."""
    families._unknown.clear()
    model = build(family)
    classes = {type(m).__name__ for m in model.modules()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        liger_ext.apply_liger_kernel_to_instance(model)
    assert not [str(w.message) for w in caught if "does not know this code" in str(w.message)]
    ours = {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("liger_ext")}
    expected = {name for name in classes if name.endswith(ENDS)}
    expected -= UNPATCHED.get(family, set())
    assert expected == ours - {"LlamaModel"}


@pytest.mark.parametrize("family", [*PRESENT, *LAYERS])
@pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="the table describes the newest transformers")
def test_what_the_documentation_says(family):
    assert family_table.row(family) in (Path(__file__).parent.parent / "docs/families.md").read_text().splitlines()


MODES = [("train", torch.float32), ("checkpointed", torch.float32), ("padded", torch.float32), ("eval", torch.float32)]
MODES += [("train", torch.bfloat16), ("eval", torch.bfloat16)]


@each
@pytest.mark.parametrize("mode, dtype", MODES, ids=lambda value: str(value).rpartition(".")[2])
def test_equals_stock(device, family, mode, dtype):
    model = build(family, device, dtype, **(all_experts(family) if dtype is torch.bfloat16 else {}))
    batch = make_batch(device)
    if mode == "padded":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 7:] = 0
        batch["labels"][1, 7:] = -100
    ours, reference = patched(model), copy.deepcopy(model).double()  # its norms and loss stay in fp32
    for m in (model, ours):
        set_experts(m, "grouped_mm")
    for m in (model, ours, reference):
        if mode == "checkpointed":
            checkpoint_layers(m, use_reentrant=False)
        m.train(mode != "eval")
    if family in RECURRENT and dtype is torch.float32:
        # The gradients of the decay (A_log, dt_bias) amplify changes in the last bits of weights.
        neighbours = [step(perturbed(model, seed), batch) for seed in range(8)]
        assert_same(step(ours, batch), step(model, batch), neighbours)
    else:
        assert_as_good(step(ours, batch), step(model, batch), step(reference, batch))


@pytest.mark.parametrize("family", [f for f in PRESENT if f not in ("cohere2", "nemotron")])  # without RMSNorm
def test_norms_in_another_dtype(device, family):
    """With fp32 norm weights in a bf16 model, the output dtype of a norm differs between families."""
    model = build(family, device, torch.bfloat16)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    norm = next(m for m in model.modules() if type(m).__name__.endswith("RMSNorm"))
    x = torch.randn(3, 5, norm.weight.shape[0], device=device, dtype=torch.bfloat16)
    expected = norm(x)
    found = next(m for m in patched(model).modules() if type(m).__name__.endswith("RMSNorm"))(x)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@newest
@pytest.mark.parametrize("family", ["cohere2", "falcon_h1", "gemma2", "gemma4_text", "granite", "qwen3"])
def test_logits_beside_the_loss(device, family):
    """A family's changes of its logits (softcap, factors) apply to the loss with options, with logits and without."""
    model = build(family, device)
    ours, batch, reference = patched(model), make_batch(device), copy.deepcopy(model).double()
    options = dict(label_smoothing=0.1, return_token_accuracy=True)
    stock, exact = (m(**batch).logits for m in (model, reference))
    shifted = nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    expected = nn.functional.cross_entropy(stock.flatten(0, 1), shifted, label_smoothing=0.1)
    with_logits, without = (ours(**batch, **options, skip_logits=skip) for skip in (False, True))
    alone = ours(input_ids=batch["input_ids"])
    for output in (with_logits, alone):
        assert_as_good({"logits": output.logits}, {"logits": stock}, {"logits": exact})
    torch.testing.assert_close(with_logits.loss, expected)
    torch.testing.assert_close(without.loss, expected)
    torch.testing.assert_close(without.token_accuracy, with_logits.token_accuracy)
    assert "logits" not in without


@pytest.mark.skipif(TRANSFORMERS >= (5, 0), reason="transformers 5 has one module for all experts")
def test_experts_that_are_modules():
    model = patched(build("mixtral"))
    ours = {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("liger_ext")}
    assert {"MixtralBlockSparseTop2MLP", "MixtralForCausalLM"} <= ours


@newest
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("output_router_logits", [None, True, False])
def test_the_experts_balance(device, family, output_router_logits):
    model = build(family, device)
    ours, batch = patched(model), make_batch(device)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][2, 8:] = 0
    stock = model(**batch, output_router_logits=output_router_logits)
    for skip in (True, False):
        found = ours(**batch, output_router_logits=output_router_logits, skip_logits=skip)
        torch.testing.assert_close(found.loss, stock.loss)
        torch.testing.assert_close(found.aux_loss, stock.aux_loss)
        assert (found.aux_loss is None) is (
            output_router_logits is False or (output_router_logits is None and family == "qwen3_moe")
        )
        torch.testing.assert_close(found.router_logits, stock.router_logits)
        assert ("logits" not in found) is skip


@newest
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_class_of_the_users(device, family):
    """A class derived from the patch, as FSDP2 creates them, works and its outputs can be pickled."""
    ours, batch = patched(build(family, device)), make_batch(device)
    expected = ours(**batch, output_router_logits=True)
    ours.__class__ = type("Derived", (type(ours),), {})
    torch.testing.assert_close(ours(**batch, output_router_logits=True).loss, expected.loss, rtol=0, atol=0)
    loaded = pickle.loads(pickle.dumps(expected))
    assert type(loaded) is type(expected) and torch.equal(loaded.aux_loss, expected.aux_loss)


def _without_mean(x, weight, bias, eps):
    return LF.rms_norm(x, weight, eps)


def _without_up(self, gate_up):
    return nn.functional.silu(gate_up.chunk(2, -1)[0])


def _halved_linear_attention(self, hidden_states, arguments):
    stream, attention, weights = _ATTEND(self, hidden_states, arguments)
    return stream, 0.5 * attention if weights is None else attention, weights


_ATTEND = layers.HybridLayer._attend
WRONG = {
    "norm's offset": ("gemma", norms.ZeroCenteredRMSNorm, "OFFSET", 0.0),
    "norm's eps": ("olmo2", norms.RMSNormInFloat, "liger_arguments", lambda self: (self.weight, 0.1, 0.0, "gemma")),
    "norm without an offset": ("gemma4_text", norms.Gemma4RMSNorm, "OFFSET", 1.0),
    "norm's eps by its name": ("llama4_text", norms.RMSNorm, "_eps", lambda self: 0.1),
    "norm without a weight": ("llama4_text", norms.WeightlessRMSNorm, "_eps", lambda self: 0.1),
    "gated norm": ("qwen3_next", norms.GatedRMSNorm, "liger_arguments", lambda m: (m.weight, 0.1, 0.0, "llama")),
    "norm's mean": ("cohere2", norms.UnbiasedLayerNorm, "_normalise", staticmethod(_without_mean)),
    "layer norm's offset": ("nemotron", norms.LayerNorm1P, "OFFSET", 0),
    "activation": ("gemma", mlp.MLP, "ACTIVATION_OPS", dict.fromkeys(mlp.MLP.ACTIVATION_OPS, (LF.swiglu, 1.0, 1.0))),
    "halves": (
        "phi3",
        mlp.PackedMLP,
        "ACTIVATION_OPS",
        dict.fromkeys(mlp.PackedMLP.ACTIVATION_OPS, (LF.geglu_packed, "tanh")),
    ),
    "square": (
        "nemotron",
        mlp.UngatedMLP,
        "ACTIVATION_OPS",
        dict.fromkeys(mlp.UngatedMLP.ACTIVATION_OPS, (torch.relu,)),
    ),
    "gate's factor": ("falcon_h1", mlp.ScaledMLP, "activation_op", mlp.MLP.activation_op),
    "result's factor": ("falcon_h1", mlp.ScaledMLP, "_run", mlp.MLP._run),
    "MLP's dropout": ("seed_oss", mlp.DropoutMLP, "_run", lambda self, x: 0.9 * mlp.MLP._run(self, x)),
    "experts": ("qwen2_moe", experts.Experts, "_apply_gate", _without_up),
    "softcap": ("gemma2", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    "divisor": ("granite", causal_lm.CausalLM, "liger_logits", lambda self: (3.0, None)),
    "aux loss": ("mixtral", causal_lm.MoeCausalLM, "_results", lambda self, results, _: results),
    "layer's factor": ("granite", layers.ScaledLayer, "_mlp_summand", decoder.DecoderLayer._mlp_summand),
    "layer's norms": ("gemma2", "gemma2.Gemma2DecoderLayer", "NORM", "post_attention_layernorm"),
    "layer's dropout": ("phi3", layers.SandwichLayer, "_attention_summand", lambda self, x: 0.9 * x),
    "layer's own inputs": ("gemma4_text", layers.Gemma4Layer, "_results", lambda self, x, *_: x * self.layer_scalar),
    "layer's MLP": ("llama4_text", decoder.DecoderLayer, "_mlp_summand", lambda self, x, residual: residual),
    "recurrent layer": ("falcon_h1", layers.FalconH1Layer, "_attend", decoder.DecoderLayer._attend),
    "linear attention": ("qwen3_5_text", layers.HybridLayer, "_attend", _halved_linear_attention),
    "activation by its name": ("llama4_text", mlp.MLP, "_run_down", lambda self, gate, up: self.down_proj(up)),
    "softcap of Gemma 4": ("gemma4_text", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    "result's norm": ("glm4", layers.SandwichLayer, "_attention_summand", decoder.DecoderLayer._attention_summand),
    "factor": ("cohere2", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
    "model's factor": ("falcon_h1", causal_lm.CausalLM, "liger_logits", lambda self: (1.0, None)),
}


@newest
@pytest.mark.parametrize("family, owner, name, value", WRONG.values(), ids=WRONG)
def test_a_wrong_entry_would_be_found(family, owner, name, value):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patch_named(owner), name, value)
        with pytest.raises(AssertionError):
            test_equals_stock(torch.device("cpu"), family, "train", torch.float32)


@each
def test_generates_the_same(device, family):
    model = build(family, device).eval()
    model.config.output_router_logits = False  # older transformers do not generate with them
    # In transformers 5.17 the gated norm of Falcon-H1 mixes the rows of a batch during generation.
    ids = tokens(1 if family == "falcon_h1" and TRANSFORMERS < (5, 23) else 2, 9, device=device)
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(patched(model).generate(ids, **options), model.generate(ids, **options))


@each
def test_is_undone(family):
    model = build(family)
    before = [type(m) for m in model.modules()]
    with liger_ext.apply_liger_kernel_to_instance(model):
        assert [type(m) for m in model.modules()] != before
        assert [type(m).__name__ for m in model.modules()] == [cls.__name__ for cls in before]
    assert [type(m) for m in model.modules()] == before


@pytest.mark.parametrize("family", [*PRESENT, *(LAYERS if TRANSFORMERS >= (5, 23) else ())])
def test_saved_and_copied(family, tmp_path):
    model = patched(build(family))
    classes = [type(m) for m in model.modules()]
    assert [type(m) for m in pickle.loads(pickle.dumps(model)).modules()] == classes
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    batch = make_batch("cpu")
    torch.testing.assert_close(loaded(**batch).loss, model(**batch).loss, rtol=0, atol=0)
    model.save_pretrained(tmp_path / "folder")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").train()
    assert type(stock).__module__.startswith("transformers") and type(stock).__name__ == type(model).__name__
    torch.testing.assert_close(stock(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("family", [family for family in PRESENT if family in FUNCTION_TYPES])
def test_models_that_are_built_later(family):
    apply = getattr(liger_ext, f"apply_liger_kernel_to_{FUNCTION_TYPES[family]}")
    stock = build(family)
    with apply():
        model = build(family)
    ours, theirs, later = (
        {type(m).__module__.partition(".")[0] for m in m.modules()} for m in (model, stock, build(family))
    )
    assert "liger_ext" in ours and "liger_ext" not in theirs | later
    batch = make_batch("cpu")
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)
    with pytest.raises(TypeError, match=r"rms_norm is 3, of .* expected Python's True or False"):
        apply(rms_norm=3)


COMPILED = ("gemma", "mistral", "qwen3", "gemma2", "glm4", "granite", "llama4_text", "olmo2", "phi3")
COMPILED_FOR_ANY_SIZE = ("qwen3", "gemma2", "llama4_text", "phi3")  # three times as slow to compile
COMPILATIONS = [*((f, None) for f in COMPILED), *((f, True) for f in COMPILED_FOR_ANY_SIZE)]


@pytest.mark.parametrize("family, dynamic", [slow_if(case != ("qwen3", None), *case) for case in COMPILATIONS])
def test_compiled(device, family, dynamic):
    if TRANSFORMERS < (5, 17) and (dynamic or family not in ("gemma", "mistral", "qwen3")):
        pytest.skip("older transformers do not compile all of it")
    torch._dynamo.reset()
    windows = {} if family == "gemma2" else dict(use_sliding_window=False, sliding_window=None)
    if family == "phi3":
        windows["rope_scaling"] = None  # transformers' longrope does not compile
    layers = 2 if family in ("gemma2", "llama4_text") else 1  # two kinds of layers
    model = build(family, device, num_hidden_layers=layers, layer_types=None, **windows)
    ours, batch = patched(model), make_batch(device)
    compiled = torch.compile(lambda m, **b: m(**b), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with sdpa_kernel(SDPBackend.MATH):  # else graph and eager code select different attention kernels
        assert_as_good(step(ours, batch, compiled), step(model, batch), step(copy.deepcopy(model).double(), batch))


class Callable:
    """A forward that is a callable object, as decorators return it."""

    def __init__(self, forward):
        self.forward = forward

    def __get__(self, module, cls=None):
        return self if module is None else functools.partial(self, module)

    def __call__(self, module, *args):
        return self.forward(module, *args)


@pytest.mark.usefixtures("clear_recognition")
@pytest.mark.parametrize("kind", ["function", "object"])
def test_code_that_is_not_known(device, kind, monkeypatch):
    """A norm with changed code stays unpatched, with a warning."""
    model = build("qwen2", device)
    cls = type(model.model.norm)

    def forward(self, hidden_states):
        return 3 * self.weight * hidden_states

    monkeypatch.setattr(cls, "forward", forward if kind == "function" else Callable(forward))
    with pytest.warns(UserWarning, match="Qwen2RMSNorm: liger_ext does not know this code"):
        liger_ext.apply_liger_kernel_to_instance(model)
    assert type(model.model.norm) is cls


@newest
@pytest.mark.parametrize(
    "old, new",
    [(", **kwargs)\n\n", ")\n\n"), ("labels=labels", "labels=labels[:, 1:]"), ("outputs = self", "x = self")],
)
def test_heads_that_differ_a_little(old, new):
    """The normal form of a head changes if its loss receives fewer or other arguments."""

    def form(source):
        found = normal_form.reduce_head(definition_in(source))
        return None if found is None else normal_form.dump_tree(found)

    source = source_text(transformers.LlamaForCausalLM.forward)
    calls = source.replace("**kwargs)\n    return", "**kwargs)\n\n    return")
    assert old in calls
    assert form(calls) is not None and form(calls.replace(old, new)) != form(calls)


@pytest.mark.usefixtures("clear_recognition")
def test_code_that_cannot_be_read(monkeypatch):
    """Without source code no class is recognised, not even Llama's."""

    def getsource(function):
        raise OSError("source code not available")

    monkeypatch.setattr(inspect, "getsource", getsource)
    assert not families.holds_known_code(build("qwen2"))
    llama = build("llama")
    with pytest.warns(UserWarning, match="LlamaRMSNorm.*does not know this code"):
        liger_ext.apply_liger_kernel_to_llama(model=llama)
    assert not any(type(module).__module__.startswith("liger_ext") for module in llama.modules())
