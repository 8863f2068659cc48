"""Layers that Hugging Face's package `kernels` loads from the folder liger_ext/hub_kernels: through transformers'
KernelConfig they replace the forwards of a model, which then trains as before.

transformers registers its classes with `kernels` on import, but only where the version of `kernels` that it requires is
installed. With another version, the fixture `registered` registers them.
"""

import copy
import importlib
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from cases import RecordCalls
from family_models import assert_same, build, clear_recognition  # noqa: F401
from llama_models import assert_as_good, lora, make_batch, one_thread, step  # noqa: F401
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.utils import import_utils, kernel_config

from liger_ext import apply_liger_kernel_to_instance, hub_kernels
from liger_ext.hub_kernels import layers

kernels = pytest.importorskip("kernels")
LAYERS = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryPosEmb", "SwiGLUMLP": "MLP"}
OURS = {"rms_norm", "glu", "rope"}


@pytest.fixture(autouse=True)
def cpu_is_a_device(monkeypatch):
    """A KernelConfig of transformers accepts GPUs only; `kernels` accepts a CPU as well."""
    monkeypatch.setattr(
        kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", [*kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES, "cpu"]
    )


@pytest.fixture
def registered(monkeypatch):
    """A function that registers the norms, MLPs and rotary embeddings of a model, as transformers' decorators do."""
    functions = []

    def register(model, mlp="SwiGLUMLP", norm="RMSNorm"):
        for cls in set(map(type, model.modules())):
            name = next((name for end, name in (("RMSNorm", norm), ("MLP", mlp)) if cls.__name__.endswith(end)), None)
            if name and not hasattr(cls, "kernel_layer_name"):
                monkeypatch.setattr(cls, "kernel_layer_name", name, raising=False)
        for attention in (m for m in model.modules() if type(m).__name__.endswith("Attention")):
            modeling = sys.modules[type(attention).__module__]
            rope = modeling.apply_rotary_pos_emb
            if isinstance(rope, types.FunctionType):
                rope = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(rope)
                monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rope)
            vars(attention).setdefault("_kernel_funcs", {})["rotary_pos_emb"] = rope
            functions.append(rope)
        return model

    yield register
    for function in functions:
        vars(function).pop("forward", None)


def kernelized(model, mapping=None):
    config = kernel_config.KernelConfig(mapping or hub_kernels.mapping(model), use_local_kernel=True)
    if import_utils.is_kernels_available():
        model.set_use_kernels(True, config)
        return model
    config.sanitize_kernel_mapping(model)  # as `set_use_kernels` does
    config.create_compatible_mapping(model)
    mode = kernels.Mode.TRAINING if model.training else kernels.Mode.INFERENCE
    with kernels.use_kernel_mapping(config.kernel_mapping, inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device=model.device.type)


def step_results(model, batch):
    """Loss and gradients of a step, and the names of our ops in it."""
    with RecordCalls() as record:
        results = step(model, batch)
    return results, set(record.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "olmo2", "gemma", "qwen2"])
def test_trains_as_stock(device, registered, family, dtype):
    model, batch = registered(build(family, device, dtype)), make_batch(device)
    stock, reference = step(model, batch), step(copy.deepcopy(model).double(), batch)
    ours, called = step_results(kernelized(model), batch)
    assert called == {op + end for op in OURS for end in ("", "_backward")}
    assert_as_good(ours, stock, reference)


def test_eval_and_train_again(device, registered):
    """transformers kernelizes a model again when it changes between training and evaluation."""
    model, batch = registered(build("llama", device)), make_batch(device)
    stock = model.eval()(**batch).logits
    trained = step(kernelized(model.train()), batch)
    with torch.no_grad(), RecordCalls() as record:
        torch.testing.assert_close(model.eval()(**batch).logits, stock)
    assert set(record.names) == OURS
    again, called = step_results(model.train(), batch)
    assert called > OURS
    assert all(torch.equal(again[name], trained[name]) for name in trained)


def test_mapping_names_what_a_model_registers(registered):
    model = registered(build("llama"))
    assert {name: where.rpartition(":")[2] for name, where in hub_kernels.mapping(model).items()} == LAYERS
    with pytest.raises(ValueError, match="Linear registers no layer of RMSNorm"):
        hub_kernels.mapping(nn.Linear(2, 2))


def test_one_layer_alone(registered):
    model = registered(build("llama"))
    where = hub_kernels.mapping(model)["RMSNorm"]
    assert step_results(kernelized(model, {"RMSNorm": where}), make_batch("cpu"))[1] == {
        "rms_norm",
        "rms_norm_backward",
    }


def test_layers_are_what_kernels_takes(registered):
    """`kernels` refuses a layer that has other arguments, or members besides `forward`."""
    model = registered(build("llama"))
    mapping = hub_kernels.mapping(model)
    for name, where in mapping.items():
        path, _, layer = where.rpartition(":")
        found = kernels.LocalLayerRepository(Path(path), layer_name=layer).load()
        assert found is getattr(layers, LAYERS[name])
        assert found.can_torch_compile


@pytest.mark.parametrize("name", ["qwen3_5.Qwen3_5RMSNorm", "gemma.GemmaRMSNorm", "llama.LlamaRMSNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms(device, registered, name, dtype):
    """In the first two models the factor is 1 + weight. In Llama's, a weight in fp32 raises the dtype of a 16-bit
    result."""
    folder, _, cls = name.partition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), cls)(48, eps=1e-3)
    nn.init.uniform_(norm.to(device).weight, 0.5, 1.5)
    x = torch.randn(5, 48, device=device, dtype=dtype, requires_grad=True)
    expected = norm(x)
    of_stock = torch.autograd.grad(expected.square().sum(), (x, norm.weight))
    norm.forward = layers.RMSNorm.forward.__get__(norm)
    with RecordCalls() as record:
        found = norm(x)
    assert record.names == ["rms_norm"]
    close = dict(rtol=2e-2, atol=2e-2) if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **close)
    grads = torch.autograd.grad(found.square().sum(), (x, norm.weight))
    for grad, stock in zip(grads, of_stock, strict=True):
        torch.testing.assert_close(grad, stock, **({} if not close else dict(rtol=5e-2, atol=0.2)))


@pytest.mark.parametrize("edit", ["forward", "activation", "hook of the activation", "weight"])
def test_what_is_not_known_runs_as_it_is(registered, monkeypatch, clear_recognition, edit):  # noqa: F811
    """A norm with other code, another activation, an activation with a hook, and a weight of a tensor subclass."""
    model, batch = build("llama"), make_batch("cpu")
    if edit == "forward":

        class OtherRMSNorm(modeling_llama.LlamaRMSNorm):
            def forward(self, hidden_states):
                return super().forward(hidden_states) * 2

        for layer in model.model.layers:
            layer.input_layernorm.__class__ = OtherRMSNorm
    for layer in model.model.layers:
        if edit == "activation":
            layer.mlp.act_fn = nn.Tanh()
        elif edit == "hook of the activation":
            layer.mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)
        elif edit == "weight":
            layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.data.as_subclass(OtherTensor))
    stock = step(registered(model), batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, called = step_results(kernelized(model), batch)
    assert_same(ours, stock)
    assert ("glu" in called) == (edit not in ("activation", "hook of the activation"))
    messages = [str(w.message) for w in caught if "OtherRMSNorm" in str(w.message)]
    assert messages == (
        ["OtherRMSNorm: liger_ext has no layer for this code, so the class's own forward runs"] * (edit == "forward")
    )


class OtherTensor(torch.Tensor):
    """A subclass whose operations may differ from a plain tensor's."""


def test_projections_with_lora_are_called(registered):
    stock = lora(build("llama"), target_modules=["gate_proj", "down_proj"], lora_dropout=0.0)
    model, batch = registered(stock), make_batch("cpu")
    expected = step(model, batch)
    kernelized(model.get_base_model())
    ours, called = step_results(model, batch)
    assert called > OURS
    assert_same(ours, expected)


def test_the_function_is_the_familys(registered):
    """transformers has one apply_rotary_pos_emb for all models of a family: other models of the family stay right."""
    model, other, batch = registered(build("llama")), build("llama", seed=1), make_batch("cpu")
    stock = step(other, batch)
    kernelized(model)
    ours, called = step_results(other, batch)
    assert called == {"rope", "rope_backward"}
    assert_same(ours, stock)


def test_patched_and_kernelized(registered):
    """In either order the results are right. The second patch warns about the layers that it skips."""
    stock, batch = registered(build("qwen3")), make_batch("cpu")
    expected, fused = step(stock, batch), {"fused_linear_cross_entropy", *OURS}

    first = kernelized(copy.deepcopy(stock))
    with pytest.warns(UserWarning, match="Qwen3RMSNorm has a forward of its own and is not patched"):
        handle = apply_liger_kernel_to_instance(first)
    ours, called = step_results(first, batch)
    assert called >= fused
    assert_same(ours, expected)
    handle.revert()
    assert_same(step(first, batch), expected)

    second = copy.deepcopy(stock)
    handle = apply_liger_kernel_to_instance(second)
    ours, called = step_results(kernelized(second), batch)
    assert called >= fused
    assert_same(ours, expected)
    with pytest.warns(UserWarning, match="Qwen3RMSNorm was wrapped after patching"):
        handle.revert()
    assert_same(step(second, batch), expected)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_rope_of_a_patch_where_kernels_has_made_a_module_of_it(registered, clear_recognition, family):  # noqa: F811
    model, batch = registered(build(family)), make_batch("cpu")
    expected = step(model, batch)
    apply_liger_kernel_to_instance(model)
    ours, called = step_results(model, batch)
    assert "rope" in called
    assert_same(ours, expected)


@pytest.mark.slow
def test_compiled(device, registered):
    model, batch = registered(build("llama", device)), make_batch(device)
    stock = step(model, batch)
    compiled = torch.compile(kernelized(model), fullgraph=True)
    ours = step(model, batch, lambda _, **b: compiled(**b))
    assert_same(ours, stock)
