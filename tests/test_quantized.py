"""Quantised linear layers in patched models, most with LoRA on top: loss and gradients equal those of a stock model."""

import functools

import pytest
import torch
from llama_models import (  # noqa: F401
    LEVELS,
    VOCAB,
    build,
    checkpoint_layers,
    distance,
    make_batch,
    one_thread,
    ops,
    step,
)
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.ops._loss_plan import SMALLEST

orders = pytest.mark.parametrize("order", ["patch, quantise", "quantise, patch"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Int8Linear(nn.Module):
    """A weight in int8 with one scale per row, as in many libraries."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale.to(weight.dtype))
        self.weight = nn.Parameter((weight.float() / scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


class Int8LinearSubclass(nn.Linear):
    """The same layer as a subclass of nn.Linear, although its weight is not a plain tensor."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        inner = Int8Linear(linear)
        self.weight, self.scale = inner.weight, nn.Buffer(inner.scale)

    forward = Int8Linear.forward


def quantise_with(cls):
    def quantise(model: nn.Module, names) -> nn.Module:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and path.rpartition(".")[2] in names:
                model.set_submodule(path, cls(module))
        return model

    return quantise


def bnb_4bit(model: nn.Module, names) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")

    def make(linear):
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=linear.weight.dtype, quant_type="nf4"
        )
        made.load_state_dict(linear.state_dict())
        return made.to(linear.weight.device)

    return quantise_with(make)(model, names)


def bnb_8bit(model: nn.Module, names) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")

    def make(linear):
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
        made.load_state_dict(linear.state_dict())
        return made.to(linear.weight.device)

    return quantise_with(make)(model, names)


def torchao(config):
    def quantise(model: nn.Module, names) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        made = getattr(quantization, config)()
        quantization.quantize_(model, made, lambda module, path: path.rpartition(".")[2] in names)
        return model

    return quantise


def float8(model: nn.Module, names) -> nn.Module:
    training = pytest.importorskip("torchao.float8")
    config = training.Float8LinearConfig(emulate=model.device.type == "cpu")
    return training.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, path: path.rpartition(".")[2] in names
    )


KINDS = {
    "module": quantise_with(Int8Linear),
    "subclass": quantise_with(Int8LinearSubclass),
    "bitsandbytes 4 bit": bnb_4bit,
    "bitsandbytes 8 bit": bnb_8bit,
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "float8": float8,
}
kinds = pytest.mark.parametrize("quantise", KINDS.values(), ids=KINDS)


# On a GPU, float8 matmuls need sizes that are multiples of 16, also the number of tokens of a batch.
FLOAT8_VOCAB = -(-VOCAB // 16) * 16


def both(order, quantise, dtype, device, names, change=None, **options) -> list[nn.Module]:
    """A stock model and a patched one with the same quantised weights."""
    models = []
    for is_patched in (False, True):
        model = build(dtype=dtype, device=device, tie_word_embeddings=False, vocab_size=FLOAT8_VOCAB)
        if is_patched and order == "patch, quantise":
            apply_liger_kernel_to_llama(model=model, **options)
        model = (change or (lambda m: m))(quantise(model, names))
        if is_patched and order == "quantise, patch":
            apply_liger_kernel_to_llama(model=model, **options)
        models.append(model.to(device).train())
    return models


def adapted(model: nn.Module, names=("q_proj", "down_proj", "up_proj"), prepare=False, **options) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    if prepare:
        model.is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(model, **options)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=list(names)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def distances(stock, model, batch, **options) -> dict[str, float]:
    """Distances of the loss and of all gradients to the stock model's."""
    expected, found = step(stock, batch), step(model, dict(batch, **options))
    assert expected.keys() - found.keys() == {"logits"}
    assert any(result.any() for name, result in found.items() if name != "loss")
    for name, result in found.items():
        assert result.dtype == expected[name].dtype, name
    return {name: distance(result, expected[name]) for name, result in found.items()}


def assert_same_step(stock, model, batch, dtype, **options):
    """In bf16, torchao's int8 layers round the product before its scale, our nodes the weight (test_torchao_layers.py
    compares both with float64)."""
    for name, found in distances(stock, model, batch, **options).items():
        assert found <= (2e-4 if dtype == torch.float32 else 2e-3 if name == "loss" else 0.06), (name, found)


def assert_same_float8_steps(stock, model, rows, seq, dtype, **options):
    """float8 layers round their operands to 3 mantissa bits: a difference in the last bit of an operand may become one
    of a whole unit. Of stock models in fp32 whose weights differ in the last bit, one in four has such a value in a
    batch, and then gradients 0.06 apart; the others agree. So some batches may differ here, but not all. In bf16 every
    batch does.
    """
    batches = [make_batch(model.device, rows, seq, seed) for seed in range(1, 5)]
    found = [distances(stock, model, batch, **options) for batch in batches]
    # Each chunk of tokens has its own scale.
    in_one_batch = 0.3 if dtype == torch.bfloat16 else 0.05 if options.get("memory") == SMALLEST else 2e-4
    for name in found[0]:
        least, most = (choose(one[name] for one in found) for choose in (min, max))
        assert least <= (min(in_one_batch, 3e-3) if name == "loss" else in_one_batch), (name, least)
        assert most <= (1e-2 if name == "loss" else 0.3), (name, most)


@dtypes
@orders
@kinds
def test_quantised_layers(device, quantise, order, dtype):
    """Norms, embeddings and the head are trained; the quantised layers only pass gradients through."""
    stock, model = both(order, quantise, dtype, device, ALL)
    down = model.model.layers[1].mlp.down_proj
    assert type(down) is not nn.Linear or type(down.weight) is not nn.Parameter
    batch = make_batch(device, 4, 16)
    assert "fused_linear_cross_entropy" in ops(model, **batch)
    if quantise is float8:
        assert_same_float8_steps(stock, model, 4, 16, dtype)
    else:
        assert_same_step(stock, model, batch, dtype)


@dtypes
@orders
@pytest.mark.parametrize("memory", ["auto", SMALLEST], ids=["whole", "chunks"])
@kinds
def test_quantised_heads(device, quantise, memory, order, dtype):
    stock, model = both(order, quantise, dtype, device, ("lm_head", "k_proj"))
    if quantise is float8:
        assert_same_float8_steps(stock, model, 6, 48, dtype, memory=memory)
    else:
        assert_same_step(stock, model, make_batch(device, 6, 48), dtype, memory=memory)


@pytest.mark.parametrize("saved", [False, True], ids=["while loading", "saved"])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_heads_of_models_built_later(tmp_path, device, bits, saved):
    """The quantiser replaces layers that are exactly nn.Linear, after the model is built."""
    pytest.importorskip("bitsandbytes")
    options = {f"load_in_{bits}bit": True, "llm_int8_skip_modules": [], "bnb_4bit_compute_dtype": torch.float32}
    load = functools.partial(LlamaForCausalLM.from_pretrained, tmp_path, device_map=str(device))
    build(tie_word_embeddings=False).save_pretrained(tmp_path)
    config = dict(quantization_config=BitsAndBytesConfig(**options))
    if saved:
        load(**config).save_pretrained(tmp_path)
        config = {}
    stock = load(**config).train()
    with apply_liger_kernel_to_llama():
        model = load(**config).train()
    assert [type(m) for m in model.modules() if isinstance(m, nn.Linear)] == [
        type(m) for m in stock.modules() if isinstance(m, nn.Linear)
    ]
    assert model.lm_head.weight.dtype == stock.lm_head.weight.dtype != torch.float32
    assert_same_step(stock, model, make_batch(device), torch.float32)


@orders
@pytest.mark.parametrize("head", [False, True], ids=["", "head"])
@pytest.mark.parametrize(
    "quantise", [k for k in KINDS.values() if k is not float8], ids=[k for k in KINDS if k != "float8"]
)
def test_adapters_on_quantised_layers(device, quantise, head, order):
    names = (*ALL, "lm_head") if head else ALL
    targets = ["q_proj", "down_proj", *["lm_head"] * head]
    change = None if quantise is KINDS["module"] else lambda m: adapted(m, targets)
    stock, model = both(order, quantise, torch.bfloat16, device, names, change)
    assert_same_step(stock, model, make_batch(device), torch.bfloat16)


@orders
@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["subclass", "bitsandbytes 4 bit"])
def test_prepared_for_training(device, name, use_reentrant, memory, order):
    """QLoRA as PEFT prepares it: norms and the head in fp32, layers checkpointed."""
    options = dict(prepare=True, gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    change = lambda m: adapted(m, **options)  # noqa: E731
    stock, model = both(order, KINDS[name], torch.bfloat16, device, ALL, change, memory=memory)
    assert model.base_model.model.model.norm.weight.dtype == torch.float32
    assert model.base_model.model.model.layers[0].gradient_checkpointing
    assert_same_step(stock, model, make_batch(device), torch.bfloat16)
