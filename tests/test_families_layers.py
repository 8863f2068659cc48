"""Decoder layers that do more than Llama's: which ops they call, and that all of their forms give the same."""

import copy

import pytest
import torch
from cases import RecordCalls
from family_models import assert_same, build, patched, set_experts
from llama_models import TRANSFORMERS, assert_as_good, batch_of, one_thread, step  # noqa: F401

from liger_ext.models import decoder

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
each = pytest.mark.parametrize("name", MODELS)


def made(name, device, dtype=torch.float32):
    family, options = MODELS[name]
    model = build(family, device, dtype, **options)
    for layer in model.model.layers:
        if hasattr(layer, "layer_scalar"):
            layer.layer_scalar.fill_(0.75)
    return model


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_equals_stock(device, name, dtype):
    model, batch = made(name, device, dtype), batch_of(device)
    ours, reference = patched(model), copy.deepcopy(model).double()
    for m in (model, ours):
        set_experts(m, "grouped_mm")
    with RecordCalls() as record:
        found = step(ours, batch)
    assert record.names.count("add_rms_norm") == len(model.model.layers)
    if name.startswith("falcon") and dtype is torch.float32:  # computes in fp32 what should be its reference
        assert_same(found, step(model, batch))
    else:
        assert_as_good(found, step(model, batch), step(reference, batch))


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("gemma4")])
def test_norms_in_another_dtype(device, name):
    model, batch = made(name, device, torch.bfloat16), batch_of(device)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.float()
    assert_as_good(step(patched(model), batch), step(model, batch), step(copy.deepcopy(model).double(), batch))


def test_llama4_runs_in_nodes(device):
    """Its norms with the projections that read them, as Llama's."""
    model, batch = made("llama4 without experts", device), batch_of(device)
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
    return decoder.SandwichLayer._of_mlp(self, x, residual)


WRONG = [
    ("gemma4 with experts", decoder.Gemma4Layer, "_of_mlp", _without_experts),
    ("gemma4 without inputs of layers", decoder.Gemma4Layer, "_results", lambda self, x, _: x),
    ("gemma4 of another activation", decoder.Gemma4Layer, "NORM", "post_attention_layernorm"),
    ("llama4 of experts", decoder.Llama4Layer, "_of_mlp", lambda self, x, residual: x[0].view_as(residual) * 0.9),
    ("falcon_h1 with factors", decoder.FalconH1Layer, "_of_attention", lambda self, x: 0.9 * x),
]


@pytest.mark.parametrize("name, cls, attribute, value", WRONG)
def test_a_wrong_entry_would_be_found(monkeypatch, name, cls, attribute, value):
    monkeypatch.setattr(cls, attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), name, torch.float32)
