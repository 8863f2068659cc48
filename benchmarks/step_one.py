"""Trains one model, or its LoRA adapters, with one provider in a separate process: time of a step, peak memory,
loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from examples.demo.data import batches, hashed_words
from liger_ext._meter import Meter
from liger_ext._timing import Timing, timed_call
from liger_ext.comparison.child import optimizer_for

from . import models, suite

RANK, LEARNING_RATE = 16, 1e-4
WARM_UP, STEPS = 3, 11


@dataclass(frozen=True)
class SetUp:
    """How LoRA adapters train."""

    fp32: bool = False  # the adapters, as PEFT creates them for 16-bit weights; otherwise in the model's dtype
    autocast: bool = False
    four_bit: bool = False  # bitsandbytes' nf4, with compressed statistics, in all linear layers but the head
    dropout: float = 0.0
    prepared: bool = False  # by PEFT's prepare_model_for_kbit_training: norms, embedding and head in fp32
    checkpoints: bool = False  # of every layer, not reentrant


@dataclass
class Measured:
    step: Timing
    peak: int  # bytes
    loss: float  # of the last step


def measure(
    config: dict, batch: int, seq: int, provider: str, device: str, dtype: str, say: Callable, lora: dict | None = None
) -> Measured:
    """lora: the fields of a `SetUp`; only adapters train. None: all weights train."""
    place, kind = torch.device(device), suite.DTYPES[dtype]
    meter = Meter(place)
    empty = 0 if place.type == "cuda" else meter.reset()
    say("building model and data")
    model = models.build(config, place, kind)
    adapted = model if lora is None else _with_adapters(model, kind, SetUp(**lora))
    trained = models.on_request(device)[provider](model)
    if trained is not model:  # a compiled base model, or a function of its parts, which PEFT's wrapper does not call
        adapted = trained
    optimizer = optimizer_for(model, LEARNING_RATE)
    tokens = batches(hashed_words(config["vocab_size"]), 1, batch, seq, None)[0].to(place)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(place.type, torch.bfloat16, enabled=bool(lora) and lora["autocast"]):
            loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    samples = []
    for number in range(WARM_UP + STEPS):
        if number in (0, WARM_UP):
            say(f"step {number + 1} of {WARM_UP + STEPS}")
            meter.reset()
        loss, seconds = timed_call(step, place)
        samples.append(seconds * 1e6)
    return Measured(Timing.from_samples(samples[WARM_UP:]), meter.peak() - empty, loss.item())


def _quantise(model: torch.nn.Module, dtype: torch.dtype) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    for path, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and path != "lm_head":
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            quantised = Linear4bit(*sizes, compute_dtype=dtype, quant_type="nf4", device="meta")
            weight = Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4", module=quantised)
            quantised.weight, quantised.bias = weight, layer.bias
            model.set_submodule(path, quantised.to(layer.weight.device))
    model.is_loaded_in_4bit = True  # as from_pretrained sets it: selects PEFT's class for 4-bit layers


def _with_adapters(model: torch.nn.Module, dtype: torch.dtype, set_up: SetUp) -> torch.nn.Module:
    import peft

    if set_up.four_bit:
        _quantise(model, dtype)
    if set_up.prepared:
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if set_up.checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    adapter = peft.LoraConfig(
        r=RANK, lora_alpha=2 * RANK, lora_dropout=set_up.dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, adapter).train()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32 if set_up.fp32 else dtype)
    return adapted
