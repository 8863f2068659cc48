"""Export to ONNX, which excludes our ops: the graph of a patched model equals the unpatched model's."""

import copy
import io

import family_models
import pytest
import torch
from llama_models import build, one_thread, ops, tokens  # noqa: F401
from torch import nn

from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

pytest.importorskip("onnxscript", reason="torch.onnx needs it")
onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")


QUICK = "falcon_h1", "gemma4_text", "llama", "mixtral", "nemotron", "olmo", "starcoder2"
ALL = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in sorted({*QUICK, *family_models.LAYERS, *family_models.OPTIONS})
]
FAMILIES = "llama", "cohere2", "gemma2", "glm4", "granite", "mixtral", "phi3", "qwen3", "qwen3_moe"


def exported(model, *args, dynamo=True, **kwargs):
    """The exported model, loaded by `onnx`."""
    file = io.BytesIO()
    torch.onnx.export(model, args, file, kwargs=kwargs, dynamo=dynamo, verbose=False)
    return onnx.load_from_string(file.getvalue())


def assert_same_graph(found, expected):
    """Compares nodes, edges and weights. Names of values may differ."""
    graphs = []
    for model in (found, expected):
        numbers = {}
        graphs.append(
            [
                (n.op_type, [numbers.setdefault(v, len(numbers)) for v in (*n.input, *n.output)])
                for n in model.graph.node
            ]
        )
    assert graphs[0] == graphs[1] and len(graphs[0]) > 3
    tensors = [sorted(tensor.raw_data for tensor in model.graph.initializer) for model in (found, expected)]
    assert tensors[0] == tensors[1]


@pytest.mark.parametrize("dynamo", [True, False])
def test_layers(dynamo):
    """With both exporters: the older one traces, and cannot export a whole Llama."""
    model = build(num_hidden_layers=1).eval()
    layer = model.model.layers[0]
    x, layers = torch.randn(2, 3, 64), nn.Sequential(layer.input_layernorm, layer.mlp)
    expected = exported(layers, x, dynamo=dynamo)
    with apply_liger_kernel_to_llama(model=model):
        found = exported(layers, x, dynamo=dynamo)
        assert {"rms_norm", "glu"} <= ops(layers, input=x)  # after the export our ops run again
        assert_same_graph(found, expected)
        (y,) = reference.ReferenceEvaluator(found).run(None, {found.graph.input[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), layers(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ALL)
def test_no_op_of_ours_runs(family, monkeypatch):
    """For every family, with torch's flags of an ONNX export set."""
    stock = family_models.build(family, num_hidden_layers=2, output_router_logits=False).eval()
    family_models.set_experts(stock, "batched_mm")
    model = family_models.patched(stock, layer_norm=True) if family == "starcoder2" else family_models.patched(stock)
    ids = dict(input_ids=tokens(1, 8), use_cache=False)
    assert ops(model, **ids)
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    for batch in (ids, ids | dict(labels=ids["input_ids"])):
        with torch.no_grad():
            found, expected = model.train("labels" in batch)(**batch), stock.train("labels" in batch)(**batch)
        assert not ops(model, **batch) and torch.equal(found.logits, expected.logits)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models(family):
    stock = (build() if family == "llama" else family_models.build(family)).eval()
    if family in ("mixtral", "qwen3_moe"):
        stock.set_experts_implementation("batched_mm")  # the only implementation that transformers exports
    model = copy.deepcopy(stock)
    apply_liger_kernel_to_instance(model)
    ids = tokens(2, 7)
    found, expected = (exported(m, input_ids=ids, use_cache=False) for m in (model, stock))
    assert_same_graph(found, expected)
    expected = stock(ids).logits.detach()
    results = reference.ReferenceEvaluator(found).run(None, {"input_ids": ids.numpy()})
    (logits,) = (torch.from_numpy(result) for result in results if result.shape == expected.shape)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert "fused_linear_cross_entropy" in ops(model.train(), input_ids=ids, labels=ids)
