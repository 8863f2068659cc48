"""Recognition of transformers' code: source that differs by one token is not recognised, also in Llama's classes.

With LIGER_EXT_MODELS=full (`make test-models`) every mutation is tested, and otherwise every seventh.
"""

import contextlib
import functools
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from cases import python
from family_models import clear_recognition  # noqa: F401
from llama_models import TRANSFORMERS, build, make_batch, patched
from mutations import find_class, mutants, texts
from torch import nn
from transformers import activations
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

import liger_ext
from liger_ext.models import llama, patches
from liger_ext.models.modules import mlp
from liger_ext.models.modules.decoder import Attention
from liger_ext.models.patching import classes
from liger_ext.models.patching.forwards import functions_read
from liger_ext.models.recognise import known, reading

# Together these classes cover every digest of the tables for transformers 5.24.
_NAMES = """
    afmoe.AfmoeDecoderLayer afmoe.AfmoeForCausalLM apertus.ApertusDecoderLayer bamba.BambaDecoderLayer
    bamba.BambaForCausalLM beam.BeamAttention beam.BeamExperts beam.BeamForCausalLM beam.BeamMLP beam.BeamRMSNorm
    bitnet.BitNetMLP blt.BltSelfAttention blt.BltTransformerLayer cohere.CohereAttention cohere.CohereForCausalLM
    cohere.CohereLayerNorm cpmant.CpmAntLayerNorm deepseek_v2.DeepseekV2Attention deepseek_v4.DeepseekV4Experts
    deepseek_v4.DeepseekV4HCACompressor deepseek_v4.DeepseekV4MLP dots3_note.Dots3NoteAudioAttention
    dots3_note.Dots3NoteAudioLayer edgetam_video.EdgeTamVideoRoPESelfAttention ernie4_5.Ernie4_5Attention
    ernie4_5_vl_moe.Ernie4_5_VLMoeForConditionalGeneration ernie4_5_vl_moe.Ernie4_5_VLMoeTextAttention
    evolla.EvollaForProteinText2Text falcon_h1.FalconH1DecoderLayer falcon_h1.FalconH1ForCausalLM
    falcon_h1.FalconH1MLP falcon_h1.FalconH1RMSNormGated fuyu.FuyuForCausalLM gemma3n.Gemma3nForCausalLM
    gemma3n.Gemma3nTextMLP
    gemma4.Gemma4ForCausalLM gemma4.Gemma4ForConditionalGeneration gemma4.Gemma4RMSNorm gemma4.Gemma4TextAttention
    gemma4.Gemma4TextDecoderLayer gemma4.Gemma4VisionEncoderLayer gemma4_unified.Gemma4UnifiedTextDecoderLayer
    glm.GlmAttention glm4v.Glm4VisionMlp glm4v.Glm4vTextAttention glm4v.Glm4vTextDecoderLayer glm4v.Glm4vTextMLP
    glm4v_moe.Glm4vMoeForConditionalGeneration glm5_next.Glm5NextTextExperts glm5_next.Glm5NextTextMLP
    glm5_next.Glm5NextTextRMSNormGated glm5_next.Glm5NextTextUnweightedRMSNorm glm5_next.Glm5NextVisionMLP
    glmasr.GlmAsrAttention gpt_oss.GptOssAttention gpt_oss.GptOssDecoderLayer gpt_oss.GptOssExperts gptj.GPTJAttention
    granite.GraniteDecoderLayer granite.GraniteForCausalLM granitemoe.GraniteMoeDecoderLayer
    granitemoe_swa.GraniteMoeSWADecoderLayer granitemoe_swa.GraniteMoeSWAForCausalLM granitemoe_swa.GraniteMoeSWAMLP
    granitemoehybrid.GraniteMoeHybridDecoderLayer gte.GteMLP helium.HeliumAttention
    hunyuan_vl.HunYuanVLDenseV1Attention hy_v3.HYV3ForCausalLM hy_v4.HYV4ForCausalLM
    hyperclovax.HyperCLOVAXDecoderLayer hyperclovax.HyperCLOVAXForCausalLM
    hyperclovax_vision_v2.HyperCLOVAXVisionV2ForConditionalGeneration idefics.IdeficsMLP inkling.InklingMLP
    inkling2.Inkling2VisionAttention jamba.JambaAttentionDecoderLayer jamba.JambaMambaDecoderLayer
    jetmoe.JetMoeDecoderLayer jetmoe.JetMoeForCausalLM kimi_linear.KimiLinearDecoderLayer lfm2.Lfm2DecoderLayer
    lfm3.Lfm3DecoderLayer lfm3.Lfm3MLP llama.LlamaAttention llama.LlamaDecoderLayer llama.LlamaForCausalLM
    llama.LlamaMLP llama.LlamaRMSNorm llama4.Llama4ForConditionalGeneration llama4.Llama4TextAttention
    llama4.Llama4TextDecoderLayer llama4.Llama4TextExperts llama4.Llama4TextL2Norm llama4.Llama4TextMLP
    llama4.Llama4TextRMSNorm mamba.MambaForCausalLM minicpm3.MiniCPM3DecoderLayer minicpm3.MiniCPM3ForCausalLM
    minimax_m3_vl.MiniMaxM3VLDenseMLP minimax_m3_vl.MiniMaxM3VLExperts minimax_m3_vl.MiniMaxM3VLVisionAttention
    mistral_large4.MistralLarge4ForConditionalGeneration mistral_large4.MistralLarge4TextDecoderLayer
    modernbert.ModernBertAttention modernbert.ModernBertMLP moshi.MoshiForCausalLM moshi.MoshiRMSNorm
    muse_glimmer.MuseGlimmerForConditionalGeneration muse_spark.MuseSparkTextCenteredRMSNorm
    muse_spark.MuseSparkTextInputScaledRMSNorm emu3.Emu3DecoderLayer
    nanochat.NanoChatAttention nemotron.NemotronLayerNorm1P nemotron_h.NemotronHForCausalLM nemotron_h.NemotronHMLP
    nemotron_h.NemotronHRMSNorm nemotron_h.NemotronHRMSNormGated olmo.OlmoLayerNorm
    olmo_hybrid.OlmoHybridLinearAttentionDecoderLayer openai_privacy_filter.OpenAIPrivacyFilterAttention
    openai_privacy_filter.OpenAIPrivacyFilterExperts opt.OPTForCausalLM paligemma.PaliGemmaForConditionalGeneration
    pe_video.PeVideoEncoderAttention phi3.Phi3Attention qwen3_5.Qwen3_5DecoderLayer qwen3_5_moe.Qwen3_5MoeAttention
    qwen3_5_moe.Qwen3_5MoeDecoderLayer qwen3_5_moe.Qwen3_5MoeExperts qwen3_5_moe.Qwen3_5MoeForCausalLM
    qwen3_5_moe.Qwen3_5MoeForConditionalGeneration qwen3_5_moe.Qwen3_5MoeRMSNorm qwen3_5_moe.Qwen3_5MoeRMSNormGated
    qwen3_5_moe.Qwen3_5MoeVisionAttention qwen4_exp.Qwen4ExpTextRMSNorm recurrent_gemma.RecurrentGemmaForCausalLM
    sam3.Sam3ViTRoPEAttention sapiens2.Sapiens2Attention seed_oss.SeedOssMLP step3p7.Step3p7Experts step3p7.Step3p7MLP
    vaultgemma.VaultGemmaDecoderLayer video_llava.VideoLlavaForConditionalGeneration
    vipllava.VipLlavaForConditionalGeneration codegen.CodeGenForCausalLM deepseek_v3.DeepseekV3Attention dory.DoryMLP
    inkling2.Inkling2UnweightedRMSNorm mistral_large4.MistralLarge4TextAttention
    qwen2_5_omni.Qwen2_5OmniThinkerForConditionalGeneration qwen3_omni_moe.Qwen3OmniMoeThinkerForConditionalGeneration
    qwen4_exp.Qwen4ExpTextAttention
"""
CLASSES = [name for name in _NAMES.split() if TRANSFORMERS == (5, 24) or name.startswith("llama.")]
STEP = 1 if os.environ.get("LIGER_EXT_MODELS") == "full" else 7
# Mutations that need no detection, because a patch follows the class or ignores the text. A patch reads the defaults of
# arguments and the name of a head's model; it ignores a function's name and names of unread variables. Our loss needs
# no vocab_size. Warnings and defaults that the model repeats are not read, and we build our own tuple for
# return_dict=False. The image methods of Llama 4 run unchanged, and the names that they read are numbers.
SAME = re.compile(
    r"line 1: .*(None -> 0|False -> True|True -> False)$|line 1: 'def (\w+)\(.*, \2 -> |, _ -> \w+$"
    r"|line \d+: '\w+ = self\.[\w.]+\(input_ids.*, (model|backbone|decoder|transformer) -> "
    r"|return self\.vision_model\("
    r"|if not return_dict|vocab_size|logger\.warning_once"
    r"|self\.config\.(output_attentions|output_hidden_states|return_dict)"
)

_source = functools.cache(inspect.getsource)


@contextlib.contextmanager
def replaced_source(changed: dict) -> None:
    """Replaces the source of some functions: `changed` maps a function to its text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getsource", lambda function: changed.get(function) or _source(function))
        reading.form_by_code.cache_clear()
        yield
    reading.form_by_code.cache_clear()


def undetected(functions: list, is_known, step: int = STEP) -> tuple[int, list[str]]:
    """How many mutations of `functions` were tested, and those with which the code is still recognised."""
    written = texts(functions)
    with replaced_source(written):
        assert is_known()
    tried, found = 0, []
    for function, text in written.items():
        for what, changed in list(mutants(text))[::step]:
            tried += 1
            with replaced_source({function: changed}):
                if is_known() and not SAME.search(what):
                    found.append(f"{function.__name__}, {what}")
    return tried, found


def is_same(found, other) -> bool:
    """Returns whether a class is recognised as before: the same mixin, and the same roles of its attributes."""
    return other is not None and (found.kind, found.attributes) == (other.kind, other.attributes)


def recognitions(cls: type) -> list[tuple[list, object]]:
    """The functions by which `cls` is recognised, with a predicate; for an attention, one pair per rotary embedding."""
    found = patches.recognise(cls)
    if found.kind is Attention:
        functions = {name: vars(sys.modules[cls.__module__])[name] for name in found.functions}
        return [
            (functions_read(function, None), lambda name=name: name in known.ropes_in(cls))
            for name, function in functions.items()
        ]
    gate = getattr(cls, "_apply_gate", None)
    read = cls.forward if gate is None or found.kind.__dict__.get("forward") else gate
    read_of = None if read is gate else cls
    called = [f for f in functions_read(read, read_of) if f.__name__ not in reading.CALLED_BY_PATCHES]
    return [(called, lambda: is_same(found, patches.recognise(cls)))]


@pytest.mark.parametrize("path", CLASSES)
def test_one_token_more_or_less(path):
    for functions, is_known in recognitions(find_class(path)):
        tried, found = undetected(functions, is_known)
        assert tried and not found


def test_the_table():
    """Each entry is one line, in the order of the file, and names existing classes and options."""
    text = Path(known.__file__).with_name("known.json").read_text()
    lines, entries = text.splitlines(), known.entries()
    assert len(lines) == len(entries) + 2 and len(known.by_digest()) == len(entries)
    parts = list(dict.fromkeys(entry.part for entry in entries))
    order = [(parts.index(e.part), e.replacement is None, e.replacement or "", e.example, e.digest) for e in entries]
    assert order == sorted(order)
    for entry in entries:
        if entry.part in ("module", "experts", "layer", "head") and entry.replacement is not None:
            kind = patches._replacement_class(entry)
            words = [word for word in (*entry.attributes, *entry.options) if word.isupper()]
            assert all(hasattr(kind, word) for word in words), entry


def test_the_loss_is_read():
    tried, found = undetected([loss_utils.ForCausalLMLoss, loss_utils.fixed_cross_entropy], known.knows_loss, 1)
    assert tried > 50 and not found


@pytest.mark.parametrize("name", ["SiLUActivation", "GELUActivation", "NewGELUActivation", "ReLUSquaredActivation"])
def test_activations_are_read(name):
    cls = getattr(activations, name, None)
    if cls is None:
        pytest.skip("this version has torch's own")
    own = [vars(cls)[part] for part in ("__init__", "forward") if part in vars(cls)]
    tried, found = undetected(own, lambda: mlp._known_as(cls) is not None, 1)
    assert tried and not found


@pytest.mark.skipif(llama.create_causal_mask is None, reason="this version's model is not patched")
def test_the_model_is_read():
    """The patch is skipped if the model uses its tokens differently or builds its mask differently."""
    model = modeling_llama.LlamaModel
    text = texts([model.forward])[inspect.unwrap(model.forward)]
    read = re.compile(r"line ([2-9]|\d\d+): '(?!raise).*(input_ids|create_causal_mask).*', (?!causal_mask)\w+ -> ")
    tried = 0
    for what, changed in filter(lambda mutant: read.match(mutant[0]), mutants(text)):
        tried += 1
        with replaced_source({inspect.unwrap(model.forward): changed}):
            assert not llama.knows_model(model), what
    assert tried > 10


CHANGED_LLAMA = """
import linecache, sys, warnings, torch
from importlib.machinery import SourceFileLoader

CHANGES = {
    "return self.weight * ": "return (1 + self.weight) * ",  # the norm
    "rsqrt(variance + self.variance_epsilon)": "rsqrt(variance) + self.variance_epsilon",
    "torch.cat((-x2, x1), dim=-1)": "torch.cat((x2, x1), dim=-1)",  # rope
    "self.act_fn(self.gate_proj(x)) * self.up_proj(x)": "self.act_fn(self.gate_proj(x)) + self.up_proj(x)",
    "hidden_states = residual + hidden_states\\n\\n": "hidden_states = residual - hidden_states\\n\\n",  # the layer
    "logits = self.lm_head(": "logits = 2 * self.lm_head(",
    "labels[..., 1:]": "labels[..., :-1]",  # the loss
}
wanted = [new for index, new in enumerate(CHANGES.values()) if len(sys.argv) < 2 or str(index) in sys.argv]
made = []

def get_code(loader, name):
    if name not in ("transformers.models.llama.modeling_llama", "transformers.loss.loss_utils"):
        return original(loader, name)
    source = open(loader.path).read()
    for old, new in CHANGES.items():
        if new in wanted and old in source:
            made.append(new)
            source = source.replace(old, new)
    linecache.cache[loader.path] = len(source), None, source.splitlines(keepends=True), loader.path
    return compile(source, loader.path, "exec")

original, SourceFileLoader.get_code = SourceFileLoader.get_code, get_code
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

assert sorted(made) == sorted(wanted), made
from liger_ext import apply_liger_kernel_to_llama
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=2)
torch.manual_seed(0)
model = modeling_llama.LlamaForCausalLM(LlamaConfig(**sizes)).train()
ids = torch.arange(24).view(2, 12)
expected = model(input_ids=ids, labels=ids).loss
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    apply_liger_kernel_to_llama(model=model)
ours = {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("liger_ext")}
print(f"{float(expected):.6f} {float(model(input_ids=ids, labels=ids).loss):.6f}", *sorted(ours))
print(*(str(w.message) for w in caught), sep="\\n")
"""


def test_a_llama_that_means_something_else():
    """With a later or edited transformers, the model's loss stays the same."""
    losses, *warned = python("-c", CHANGED_LLAMA, OMP_NUM_THREADS="1").splitlines()
    expected, found, *ours = losses.split()
    assert found == expected and set(ours) <= {"LlamaModel"}, losses  # the only class that was not changed
    names = ["LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM", "ForCausalLMLoss"]
    assert all(name in "".join(warned) for name in names), warned


EDITS = ["rotate_half", "rotate_half's code", "the norm's code", "slice_logits_to_keep", "fixed_cross_entropy's code"]


def negated(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((x2, x1), dim=-1)


def doubled(self, hidden_states):
    return 2 * self.weight * hidden_states


def rolled(hidden_states, logits_to_keep):
    return torch.cat([hidden_states[:, 1:], hidden_states[:, :1]], dim=1)


def halved(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    return 0.5 * nn.functional.cross_entropy(source, target, ignore_index=ignore_index)


@pytest.mark.usefixtures("clear_recognition")
@pytest.mark.parametrize("edit", EDITS)
def test_edits_after_the_first_patch(monkeypatch, edit):
    """Recognition caches its result until one of the functions that it read is edited."""
    liger_ext.apply_liger_kernel_to_llama(model=build()).revert()
    if edit == "rotate_half":
        monkeypatch.setattr(modeling_llama, "rotate_half", negated)
    elif edit == "slice_logits_to_keep":
        if not hasattr(modeling_llama, "slice_logits_to_keep"):
            pytest.skip("this version has none")
        monkeypatch.setattr(modeling_llama, "slice_logits_to_keep", rolled)
    elif edit == "rotate_half's code":
        monkeypatch.setattr(modeling_llama.rotate_half, "__code__", negated.__code__)
    elif edit == "the norm's code":
        monkeypatch.setattr(modeling_llama.LlamaRMSNorm.forward, "__code__", doubled.__code__)
    else:
        monkeypatch.setattr(loss_utils.fixed_cross_entropy, "__code__", halved.__code__)
    stock = build().train()
    expected = stock(**make_batch("cpu")).loss
    with pytest.warns(UserWarning, match="does not know this code"):
        ours = patched(stock)
    torch.testing.assert_close(ours(**make_batch("cpu")).loss, expected)


@pytest.mark.usefixtures("clear_recognition")
def test_an_unknown_head_names_the_size_of_its_logits(monkeypatch):
    model = build(vocab_size=128256, dtype=torch.bfloat16)
    monkeypatch.setattr(known, "knows_loss", lambda: False)
    with pytest.warns(UserWarning, match=re.escape("LlamaForCausalLM trains with all logits, 245 MiB for 1,000 tokens "
                                                   "(vocabulary 128,256, bfloat16)")):  # fmt: skip
        patched(model)


class Passing(modeling_llama.LlamaMLP):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_forward_that_passes_on_its_arguments():
    tried, found = undetected([Passing.forward], lambda: classes.passes_on(Passing.forward), 1)
    assert tried > 5 and not found


REPLACED_LOSS = """
import functools, sys, warnings, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss import loss_utils

def halved(*args, **kwargs):
    return 0.5 * original(*args, **kwargs)

original = loss_utils.fixed_cross_entropy
loss_utils.fixed_cross_entropy = functools.partial(halved) if sys.argv[1] == "a partial" else halved
from liger_ext import apply_liger_kernel_to_llama
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
model = LlamaForCausalLM(LlamaConfig(**sizes)).train()
ids = torch.arange(6).view(1, 6)
expected = model(input_ids=ids, labels=ids).loss
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    apply_liger_kernel_to_llama(model=model)
assert any("fixed_cross_entropy" in str(warning.message) for warning in caught), caught
torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a function", "a partial"])
def test_a_loss_that_was_replaced_before_the_import(how):
    python("-c", REPLACED_LOSS, how, OMP_NUM_THREADS="1")


@pytest.mark.skipif(TRANSFORMERS < (5, 17), reason="older transformers have other code")
def test_defaults_of_a_heads_arguments():
    """A head may pass its model other defaults, and the patch passes the same."""
    head = find_class("idefics.IdeficsForVisionText2Text")
    assert patches.find_patch(head).DEFAULTS == {"interpolate_pos_encoding": False}
    assert patches.find_patch(modeling_llama.LlamaForCausalLM).DEFAULTS == {}
