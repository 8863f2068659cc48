"""A patched Llama whose linear layers have weights that torchao has quantised, bare or with LoRA: a training step runs
our nodes in place of torchao's code, and is as close to float64 of the dequantised weights as a stock step."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from llama_models import assert_as_good, checkpoint_layers, exact, lora, make_batch, one_thread, patched, step  # noqa: F401
from test_quantized import ALL, build, torchao
from torch import nn

quantization = pytest.importorskip("torchao.quantization")
FP32, BF16 = torch.float32, torch.bfloat16
WEIGHT_ONLY = ("Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig")


def model_of(config: str, dtype: torch.dtype, with_lora: bool, device: torch.device, **options) -> nn.Module:
    if not hasattr(quantization, config):
        pytest.skip(f"this torchao has no {config}")
    model = torchao(config)(build(dtype=dtype, device=device, tie_word_embeddings=False, **options), ALL)
    model = lora(model, target_modules=list(ALL)) if with_lora else model
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(dtype)
    return model.train()


def dequantised(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module.weight) not in (torch.Tensor, nn.Parameter):
            module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return model


@contextmanager
def calls_of_torchao(model: nn.Module) -> Iterator[list[str]]:
    """Records the names of the layers with quantised weights that are called."""
    found = []
    names = {
        id(m): n
        for n, m in model.named_modules()
        if isinstance(m, nn.Linear) and type(m.weight).__module__.startswith("torchao")
    }

    def profile(frame, event, _):
        if event == "call" and frame.f_code is nn.Linear.forward.__code__ and id(frame.f_locals["self"]) in names:
            found.append(names[id(frame.f_locals["self"])])

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)
    assert names


@pytest.mark.parametrize("with_lora", [False, True], ids=["bare", "LoRA"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("config", WEIGHT_ONLY)
@pytest.mark.parametrize("checkpoints", [None, True, False], ids=["", "reentrant", "not reentrant"])
def test_a_step_runs_our_nodes(device, config, dtype, with_lora, checkpoints):
    stock, reference = (model_of(config, dtype, with_lora, device, attention_bias=True) for _ in range(2))
    model, batch = patched(stock), make_batch(device)
    if checkpoints is not None:
        for each in (stock, model):
            checkpoint_layers(each, checkpoints)
    expected = step(stock, batch)
    with calls_of_torchao(model) as found:
        results = step(model, batch)
    # A reentrant checkpoint's first run has no gradients. `o_proj` without LoRA is called by its module.
    assert checkpoints or {name for name in found if with_lora or "o_proj" not in name} == set()
    assert_as_good(results, expected, step(exact(dequantised(reference)), batch))


@pytest.mark.parametrize("config", ["Int8DynamicActivationInt8WeightConfig"])
def test_layers_that_also_quantise_the_input_run_torchaos_code(device, config):
    model = patched(model_of(config, BF16, True, device))
    with calls_of_torchao(model) as found:
        step(model, make_batch(device))
    assert len(found) == 14


@pytest.mark.parametrize("config", WEIGHT_ONLY)
def test_under_autocast_results_keep_the_dtype_of_the_input(device, config):
    """torchao's result then has the input's dtype, fp32, and not autocast's."""
    model = patched(model_of(config, FP32, True, device))
    with torch.autocast(device.type, BF16), calls_of_torchao(model) as found:
        step(model, make_batch(device))
    assert len(found) == 14
