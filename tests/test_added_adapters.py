"""LoRA adapters around base layers that the nodes do not compute, or of another dtype than the input: the base layer's
own call runs, and a node adds the adapters. Results are as close to float64 of the base's weight as PEFT's."""

import copy
import importlib
import warnings
from typing import NamedTuple

import pytest
import torch
from dropout_mask import mask, scale
from llama_models import LEVELS, assert_as_good, checkpoint_layers, distance, exact, make_batch, one_thread, step  # noqa: F401
from test_adapter_nodes import adapters, calls_in_step
from test_adapter_options import drawn, patched  # noqa: F401
from test_quantized import ALL, KINDS, Int8Linear, build
from torch import nn

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.training.nodes import adapted

peft = pytest.importorskip("peft")


class Case(NamedTuple):
    base: str | None  # the kind of the base layers: of test_quantized.KINDS; None: nn.Linear with a hook
    adapter: str  # PEFT's class for it
    dtype: torch.dtype = torch.bfloat16
    adapters: torch.dtype = torch.bfloat16
    autocast: bool = False


FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "LLM.int8, fp32": Case("bitsandbytes 8 bit", "bnb.Linear8bitLt", FP32, FP32),
    "LLM.int8": Case("bitsandbytes 8 bit", "bnb.Linear8bitLt"),
    "LLM.int8, fp32 adapters": Case("bitsandbytes 8 bit", "bnb.Linear8bitLt", adapters=FP32),
    "LLM.int8, autocast": Case("bitsandbytes 8 bit", "bnb.Linear8bitLt", adapters=FP32, autocast=True),
    "torchao": Case("torchao int8", "torchao.TorchaoLoraLinear"),
    "torchao, autocast": Case("torchao int8", "torchao.TorchaoLoraLinear", adapters=FP32, autocast=True),
    "GPTQ": Case("module", "gptq.GPTQLoraLinear"),
    "GPTQ, fp32 adapters": Case("module", "gptq.GPTQLoraLinear", adapters=FP32),
    "GPTQ, fp32, autocast": Case("module", "gptq.GPTQLoraLinear", FP32, FP32, autocast=True),
    "AWQ, fp32 adapters": Case("module", "awq.AwqLoraLinear", adapters=FP32),
    "AQLM": Case("module", "aqlm.AqlmLoraLinear"),
    "Transformer Engine": Case("module", "te.TeLinear"),
    "subclass, bf16 adapters": Case("subclass", "layer.Linear", FP32, BF16),
    "hooked": Case(None, "layer.Linear", FP32, FP32),
    "4 bit, fp32 adapters": Case("bitsandbytes 4 bit", "bnb.Linear4bit", adapters=FP32),
    "fp32 adapters": Case(None, "layer.Linear", adapters=FP32),
}
cases = pytest.mark.parametrize("case", CASES)


def stock_model(case: Case, device: torch.device, **options) -> nn.Module:
    model = build(dtype=case.dtype, device=device, tie_word_embeddings=False)
    if case.base is not None:
        model = KINDS[case.base](model, ALL)
    bits = case.base and case.base.partition(" ")[2][:1]
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = bits == "8", bits == "4"
    config = peft.LoraConfig(r=8, lora_alpha=24, task_type="CAUSAL_LM", target_modules=list(ALL), **options)
    folder, name = case.adapter.split(".")
    if case.base == "module":  # PEFT would create its class for the layers of a library
        found = pytest.importorskip(f"peft.tuners.lora.{folder}")
        config._register_custom_module({Int8Linear: getattr(found, name)})
    torch.manual_seed(5)
    model = peft.get_peft_model(model, config)
    for key, parameter in model.named_parameters():
        if "lora" in key:
            parameter.data = torch.randn_like(parameter, dtype=case.adapters) * 0.1
    found = {type(module) for module in adapters(model).values()}
    assert found == {getattr(importlib.import_module(f"peft.tuners.lora.{folder}"), name)}
    return model.train()


def with_plain_bases(model: nn.Module) -> nn.Module:
    """Replaces the base layers by plain ones with the weights by which they multiply."""
    eyes = {n: torch.eye(n, dtype=model.dtype, device=model.device) for n in (64, 128)}
    for layer in adapters(model).values():
        with torch.no_grad():
            weight = layer.base_layer(eyes[layer.in_features]).t()
        plain = nn.Linear(*weight.shape[::-1], bias=False)
        plain.weight = nn.Parameter(weight.float())
        layer.base_layer = plain.requires_grad_(False)
        if hasattr(layer, "quant_linear_module"):
            layer.quant_linear_module = plain
    return model


def hook(model: nn.Module) -> nn.Module:
    for layer in adapters(model).values():
        layer.base_layer.register_forward_hook(lambda *_: None)
    return model


@cases
def test_a_step_runs_a_node_for_the_adapters(device, case):
    case = CASES[case]
    stock, reference = (stock_model(case, device) for _ in range(2))
    model = patched(stock)
    if case.dtype == case.adapters:
        stock, model = hook(stock), hook(model)
    batch = make_batch(device)
    with torch.autocast(device.type, BF16, enabled=case.autocast):
        assert calls_in_step(stock) == set(adapters(stock)) and calls_in_step(model) == set()
        expected, found = step(stock, batch), step(model, batch)
    assert_as_good(found, expected, step(exact(with_plain_bases(reference)), batch))


@pytest.mark.parametrize("use_reentrant", [None, True, False], ids=["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("memory", LEVELS)
def test_levels_and_checkpoints(device, memory, use_reentrant):
    """The second run of a checkpoint draws the masks of the first one, so a step with a seed is the same without
    checkpoints."""
    model = patched(stock_model(CASES["fp32 adapters"], device, lora_dropout=0.25), memory=memory)
    other, batch, found = patched(model), make_batch(device), []
    if use_reentrant is not None:
        checkpoint_layers(other, use_reentrant)
    for each in (model, other):
        torch.manual_seed(3)
        assert not calls_in_step(each)
        torch.manual_seed(3)
        found.append(step(each, batch))
    for name, result in found[0].items():
        assert distance(found[1][name], result) < 0.03, name


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_layer_with_two_adapters(device, drawn, dropout, dtype):  # noqa: F811
    """The adapters differ in their scaling, and one has a bias. The only large tensor that is saved is the input."""
    torch.manual_seed(0)
    x = torch.randn(3, 50, 64, dtype=BF16, device=device, requires_grad=True)
    base = Int8Linear(nn.Linear(64, 96, bias=False, device=device, dtype=BF16))
    model = nn.ModuleDict({"layer": base})
    options = dict(target_modules=["layer"], lora_dropout=dropout)
    first, second = (peft.LoraConfig(r=r, lora_bias=r == 8, lora_alpha=24, **options) for r in (8, 4))
    for config in (first, second):
        config._register_custom_module({Int8Linear: peft.tuners.lora.Linear})
    model = peft.get_peft_model(model, first)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    layer = model.base_model.model["layer"]
    for key, parameter in layer.named_parameters():
        if "lora" in key:
            parameter.data = torch.randn_like(parameter, dtype=dtype) * 0.1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = adapted((layer,), x, True)[0]
    large = [t for t in saved if t.numel() >= x.numel()]
    assert large and all(t.data_ptr() == x.data_ptr() and t.dtype == BF16 for t in large)
    dout = torch.randn_like(out)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    found = out, *torch.autograd.grad(out, [x, *parameters], dout)

    def reference(layer, x, dout):
        result = nn.functional.linear(x, (base.weight.to(BF16) * base.scale).to(x.dtype))
        for stream, name in enumerate(("default", "second")):
            y = x.reshape(-1, 64)
            if dropout:
                keep = mask(drawn[0], stream, *y.shape, 0, dropout).to(device)
                y = torch.where(keep, y * scale(dropout), 0)
            y = layer.lora_A[name](y.view(x.shape).to(layer.lora_A[name].weight.dtype))
            result = result + layer.lora_B[name](y) * layer.scaling[name]
        result = result.to(dout.dtype)
        return result, *torch.autograd.grad(result, [x, *(p for p in layer.parameters() if p.requires_grad)], dout)

    names = ["logits", "x", *(str(i) for i in range(len(parameters)))]
    expected = reference(layer, x, dout)
    right = reference(copy.deepcopy(layer).double(), x.detach().double().requires_grad_(), dout.double())
    assert_as_good(*(dict(zip(names, results, strict=True)) for results in (found, expected, right)))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["GPTQ, fp32 adapters", "hooked", "fp32 adapters", "torchao"])
def test_compiled(device, case):
    """In a graph, a layer with torchao's weight is called, and its neighbours are nodes, too, each with its masks."""
    rate = 0.0 if case == "torchao" else 0.25
    model, batch = patched(stock_model(CASES[case], device, lora_dropout=rate)), make_batch(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.manual_seed(1)
    expected = step(model, batch)
    torch.manual_seed(1)
    found = step(model, batch, lambda _, **b: compiled(**b))
    for name, result in found.items():
        assert distance(result, expected[name]) < 0.1, name


# Changes of adapted layers.
HOOKS = {
    "hook of A": lambda layer: layer.lora_A.default.register_forward_hook(lambda *_: None),
    "hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "hook of the base": lambda layer: layer.base_layer.register_forward_hook(lambda *_: None),
    "bias of A": lambda layer: layer.lora_A.default.register_parameter("bias", nn.Parameter(torch.zeros(8))),
}
LORA, LAYERS = "peft.tuners.lora.layer", "base_model.model.model.layers.0"
# The layers with adapters, other options, a change, and the reasons that a patch names, each with the number of layers.
WARNINGS = [
    (ALL, dict(lora_dropout=0.1, lora_bias=True), None, {}),
    (["v_proj"], {}, "hook of the base", {}),
    (ALL, dict(use_dora=True), None, {"with DoRA or another variant of LoRA": 14}),
    (["v_proj"], {}, "hook of A", {"with hooks or replaced functions of lora_A or lora_B": 2}),
    (["v_proj"], {}, "hook", {f"with hooks or replaced functions ({LAYERS}.self_attn.v_proj, ...)": 2}),
    (["v_proj"], {}, "bias of A", {"with a bias of lora_A": 2}),
    ([], dict(target_parameters=["mlp.up_proj.weight"]), None, {f"of class {LORA}.ParamWrapper ({LAYERS}.mlp.up": 2}),
    (["q_proj", "embed_tokens"], {}, None, {f"of class {LORA}.Embedding (base_model.model.model.embed_tokens)": 1}),
    (["q_proj", "lm_head"], {}, None, {"outside of the patched layers (base_model.model.lm_head)": 1}),
]


@pytest.mark.parametrize("targets, options, change, expected", WARNINGS)
def test_a_patch_warns_once_of_layers_that_run_pefts_code(targets, options, change, expected):
    config = peft.LoraConfig(r=8, task_type="CAUSAL_LM", target_modules=list(targets), **options)
    model = peft.get_peft_model(build(tie_word_embeddings=False), config).train()
    for layer in adapters(model).values() if change else ():
        HOOKS[change](layer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_liger_kernel_to_llama(model=model)
    found = [str(warning.message) for warning in caught if warning.filename == __file__]
    assert len(found) == bool(expected)
    assert all(f": {count} {reason}" in found[0] for reason, count in expected.items())
    assert len(calls_in_step(model)) == sum(expected.values())  # the warning is right


def test_adapters_attached_after_the_patch_give_no_warning():
    model = build(tie_word_embeddings=False)
    apply_liger_kernel_to_llama(model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        peft.get_peft_model(model, peft.LoraConfig(use_dora=True, task_type="CAUSAL_LM", target_modules=["q_proj"]))


class Subclass(nn.Linear):
    pass


@pytest.mark.parametrize("base", [nn.Linear, Subclass])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("rate, bias", [(0, False), (0, True), (0.5, True)])
def test_gradcheck(base, trains, rate, bias):
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["0"], lora_dropout=rate, lora_bias=bias)
    layer = peft.get_peft_model(nn.Sequential(base(6, 5)), config).base_model.model[0].double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter.requires_grad_(trains and parameter.requires_grad))

    def run(x, *_):
        torch.manual_seed(0)
        return adapted((layer,), x, True)[0]

    x = torch.randn(3, 6, dtype=torch.double, requires_grad=True)
    assert "_Adapted" in type(run(x).grad_fn).__name__
    inputs = x, *(p for p in layer.parameters() if p.requires_grad)
    assert torch.autograd.gradcheck(run, inputs)
