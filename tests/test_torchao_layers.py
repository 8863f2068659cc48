"""A patched Llama whose linear layers have weights that torchao has quantised, bare or with LoRA: a training step runs
our nodes in place of torchao's code, and is as close to float64 of the dequantised weights as a stock step."""

import pytest
import torch
from llama_models import assert_as_good, checkpoint_layers, exact, lora, make_batch, one_thread, patched, step  # noqa: F401
from test_adapter_nodes import calls_in_step
from test_quantized import ALL, build, torchao
from torch import nn

quantization = pytest.importorskip("torchao.quantization")
FP32, BF16 = torch.float32, torch.bfloat16
WEIGHT_ONLY = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")


def model_with(config: str, dtype: torch.dtype, with_lora: bool, device: torch.device, **options) -> nn.Module:
    if not hasattr(quantization, config):
        pytest.skip(f"this torchao has no {config}")
    model = torchao(config)(build(dtype=dtype, device=device, tie_word_embeddings=False, **options), ALL)
    model = lora(model, target_modules=list(ALL)) if with_lora else model
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def quantised(model: nn.Module) -> dict[str, nn.Module]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: layer for name, layer in layers.items() if type(layer.weight).__module__.startswith("torchao")}


@pytest.mark.parametrize("with_lora", [False, True], ids=["bare", "LoRA"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("config", WEIGHT_ONLY)
@pytest.mark.parametrize("checkpoints", [None, True, False], ids=["", "reentrant", "not reentrant"])
def test_a_step_runs_our_nodes(device, config, dtype, with_lora, checkpoints):
    stock, reference = (model_with(config, dtype, with_lora, device, attention_bias=True) for _ in range(2))
    for layer in quantised(reference).values():
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    model, batch = patched(stock), make_batch(device)
    if checkpoints is not None:
        for each in (stock, model):
            checkpoint_layers(each, checkpoints)
    found = calls_in_step(model, quantised)
    # A reentrant checkpoint's first run has no gradients. `o_proj` without LoRA is called by its module.
    assert checkpoints or {name for name in found if with_lora or "o_proj" not in name} == set()
    assert_as_good(step(model, batch), step(stock, batch), step(exact(reference), batch))


# torchao's result has the dtype of the input, also under autocast.
OTHERS = [("Int8DynamicActivationInt8WeightConfig", BF16, False), *((config, FP32, True) for config in WEIGHT_ONLY)]


@pytest.mark.parametrize("config, dtype, autocast", OTHERS)
def test_layers_that_also_quantise_the_input_or_under_autocast_run_torchaos_code(device, config, dtype, autocast):
    model = patched(model_with(config, dtype, True, device))
    with torch.autocast(device.type, BF16, enabled=autocast):
        assert calls_in_step(model, quantised) == set(quantised(model)) != set()
