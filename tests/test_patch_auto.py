"""Patching by model type, and the auto class that patches the models that it builds."""

import warnings
from types import SimpleNamespace

import family_models
import pytest
import torch
from family_models import clear_recognition  # noqa: F401
from llama_models import build, config, make_batch, one_thread  # noqa: F401
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from liger_ext import (
    AutoLigerKernelForCausalLM,
    apply_liger_kernel,
    apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
)
from liger_ext.models import llama
from liger_ext.models.recognise import known


def bert():
    sizes = dict(vocab_size=50, max_position_embeddings=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return BertConfig(**sizes, intermediate_size=16, is_decoder=True)


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def test_from_pretrained(tmp_path, no_warnings):
    stock = build().train()
    stock.save_pretrained(tmp_path)
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path).train()
    assert type(model) is llama.LlamaForCausalLM
    torch.testing.assert_close(model(**make_batch("cpu")).loss, stock(**make_batch("cpu")).loss)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is modeling_llama.LlamaForCausalLM
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False, swiglu=False, torch_dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    layer = model.model.layers[0]
    assert type(layer.self_attn) is modeling_llama.LlamaAttention
    assert type(layer.mlp) is modeling_llama.LlamaMLP
    assert type(layer.input_layernorm) is llama.LlamaRMSNorm


def test_placed_by_a_map(tmp_path, device):
    """transformers places the model with accelerate, which loads weights from disk when a module is called."""
    pytest.importorskip("accelerate")
    stock = build(device=device, tie_word_embeddings=False)
    stock.save_pretrained(tmp_path)
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.layers.0"), device.type)
    places |= dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), "disk")
    options = dict(device_map=places, offload_folder=tmp_path / "disk")
    model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, **options)
    assert model.lm_head.weight.is_meta
    for trains in (True, False):
        with torch.no_grad():
            expected, found = (m.train(trains)(**make_batch(device)) for m in (stock, model))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        assert ("logits" in found) is not trains


def test_from_config(no_warnings):
    model = AutoLigerKernelForCausalLM.from_config(config(), fused_linear_cross_entropy=False, cross_entropy=True)
    assert type(model) is modeling_llama.LlamaForCausalLM
    assert type(model.model.norm) is llama.LlamaRMSNorm
    assert type(LlamaForCausalLM(config()).model.norm) is modeling_llama.LlamaRMSNorm


def test_unknown_models_pass_through(no_warnings):
    model = AutoLigerKernelForCausalLM.from_config(bert())
    assert type(model).__module__.startswith("transformers")


def test_options_of_unknown_models_are_named():
    with pytest.warns(UserWarning, match="model type 'bert' are ignored: rope, swiglu") as record:
        AutoLigerKernelForCausalLM.from_config(bert(), rope=False, swiglu=True)
    assert len(record) == 1


def test_by_type():
    with apply_liger_kernel("llama", rope=False):
        model = LlamaForCausalLM(config())
    assert type(model) is llama.LlamaForCausalLM
    assert type(model.model.layers[0].self_attn) is modeling_llama.LlamaAttention


def test_unknown_options_are_dropped_with_one_warning():
    model = build()
    with pytest.warns(UserWarning, match="model type 'llama' are ignored: geglu, layer_norm") as record:
        handle = apply_liger_kernel_to_instance(model, geglu=True, layer_norm=False, rope=False)
    assert len(record) == 1
    assert type(model) is llama.LlamaForCausalLM
    assert type(model.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    handle.revert()


T5 = dict(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
WHISPER = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
OTHERS = {  # models of types that no patch knows
    "bert": lambda: AutoModelForCausalLM.from_config(bert()),
    "t5": lambda: T5ForConditionalGeneration(T5Config(vocab_size=50, feed_forward_proj="gated-gelu", **T5)),
    "vit": lambda: ViTModel(
        ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ),
    "whisper": lambda: WhisperForConditionalGeneration(
        WhisperConfig(encoder_ffn_dim=16, decoder_ffn_dim=16, **WHISPER)
    ),
}


@pytest.mark.parametrize("model_type", OTHERS)
def test_unknown_type_is_left_alone(model_type):
    model = OTHERS[model_type]()
    before = [type(module) for module in model.modules()]
    with pytest.warns(UserWarning, match="runs no code that liger_ext knows, and stays") as record:
        handle = apply_liger_kernel_to_instance(model, rope=True)
    assert len(record) == 1 and [type(module) for module in model.modules()] == before
    handle.revert()
    with pytest.raises(ValueError, match=r"holds no llama model to patch$"):  # nor would another function help
        apply_liger_kernel_to_llama(model=model)


def test_a_misspelt_type_gets_the_nearest_name():
    with pytest.warns(UserWarning, match="'lama' is not known to liger_ext.*did you mean 'llama'") as record:
        apply_liger_kernel("lama")
    assert len(str(record[0].message)) < 150


@pytest.mark.parametrize("config", ["missing", None, {"model_type": "llama"}, SimpleNamespace(hidden_size=4)], ids=repr)
def test_a_model_without_a_type_is_left_alone(config):
    model = nn.Linear(4, 4)
    if config != "missing":
        model.config = config
    before = dict(model.__dict__)
    with pytest.warns(UserWarning, match=r"Linear has no config\.model_type, and stays as it is$") as record:
        handle = apply_liger_kernel_to_instance(model, rope=True)
    assert len(record) == 1
    handle.revert()
    assert type(model) is nn.Linear and model.__dict__ == before


@pytest.mark.usefixtures("clear_recognition")
def test_warnings_name_the_line_that_led_to_them(monkeypatch):
    rest = {key: entry for key, entry in known.by_digest().items() if entry.replacement != "experts.BatchedExperts"}
    monkeypatch.setattr(known, "by_digest", lambda: rest)
    with pytest.warns(UserWarning, match="has no config.model_type") as direct:
        apply_liger_kernel_to_instance(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="Llama4TextExperts") as deeper, apply_liger_kernel("llama4_text"):
        family_models.build("llama4_text")
    assert direct[0].filename == __file__
    files = [warning.filename for warning in deeper if "Llama4TextExperts" in str(warning.message)]
    assert files == [family_models.__file__]
