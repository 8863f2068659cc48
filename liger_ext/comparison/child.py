"""One side of a comparison: builds a model, patches it if the request has a level of memory, and trains it.

``sides.Side`` starts ``python -m liger_ext.comparison.child``. The first line of standard input is the request, as
JSON, and its answer describes the model. Each further line asks for a training step. All answers are lines of JSON.
A step's peak memory includes weights, gradients, optimizer state and activations. On a GPU it comes from the
allocator's statistics, on a CPU from the resident set of the process, whose high-water mark Linux lets a process reset.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from liger_ext._meter import Meter
from liger_ext._timing import timed_call
from liger_ext.inspection import build, read_config
from liger_ext.models import apply_liger_kernel_to_instance

from .sides import DTYPES, WARM_UP

DIFFERENT = 4  # random batches, used in turn: the model learns them, so that a wrong gradient changes the losses


def optimizer_for(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.01, fused=True)


def warm_up(optimizer: torch.optim.Optimizer, learning_rate: float, step: int) -> None:
    """Sets the learning rate of a step, counted from 0: five steps of linear warm-up."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (step + 1) / 5)


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Casts weights to `dtype`. Buffers (rotary frequencies) stay in fp32, as in a model that is loaded in that
    dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def cut_layers(config: Any, depth: int) -> None:
    """Reduces the number of layers of a configuration, and its lists with a value for each layer."""
    text = config.get_text_config()
    every = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth


class FixedHidden(torch.nn.Module):
    """Replaces the layers of a model."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


class Trainee:
    """A model with its optimizer and batches."""

    def __init__(self, request: dict[str, Any]):
        self.device, self.learning_rate = torch.device(request["device"]), request["learning_rate"]
        on_gpu = self.device.type == "cuda"
        self._meter = Meter(self.device) if on_gpu or os.access("/proc/self/clear_refs", os.W_OK) else None
        with self.device:
            torch.ones(8, 8).matmul(torch.ones(8, 8))
        self._empty = self._meter.reset() if self._meter and not on_gpu else 0
        torch.manual_seed(0)
        model = self._build(request).to(self.device).train()
        model.config.get_text_config().use_cache = False
        self.trained: torch.nn.Module = model
        if rank := request["lora"]:
            import peft

            adapters = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
            self.trained = peft.get_peft_model(model, adapters).train()
        if request["level"] is not None:
            apply_liger_kernel_to_instance(self.trained, memory=request["level"])
        if request["batches"] is not None:
            self._batches = torch.load(request["batches"]).to(self.device)
        else:
            vocab, shape = model.get_input_embeddings().num_embeddings, (DIFFERENT, request["batch"], request["seq"])
            generator = torch.Generator().manual_seed(1)
            self._batches = torch.randint(vocab, shape, generator=generator).to(self.device)
        self.facts = {"model": type(model).__name__, "device": request["device_name"]}
        if request["loss"]:
            self.facts["loss_bytes"] = self._loss_bytes(model)
        self._optimizer, self._steps = optimizer_for(self.trained, self.learning_rate), 0

    def _build(self, request: dict[str, Any]) -> PreTrainedModel:
        dtype = DTYPES[request["dtype"]]
        if request["weights"] is not None:
            return cast_parameters(AutoModelForCausalLM.from_pretrained(request["source"], **request["weights"]), dtype)
        config = read_config(request["source"], request["trust_remote_code"])
        cut_layers(config, request["depth"])
        config.dtype = dtype
        logits = request["batch"] * request["seq"] * getattr(config.get_text_config(), "vocab_size", 0)
        if request["level"] is None and 2 * dtype.itemsize * logits > free_bytes(self.device):
            raise MemoryError("the logits and their gradient do not fit")
        return build(config, self.device, request["trust_remote_code"])

    def _loss_bytes(self, model: PreTrainedModel) -> int | None:
        """Returns the peak memory of head and cross entropy, forward and backward, above weights and hidden states."""
        if self._meter is None:
            return None
        tokens, layers, peak = self._batches[0], model.model, 0
        weight = model.lm_head.weight
        hidden = torch.randn(*tokens.shape, weight.shape[1], dtype=weight.dtype, device=self.device)
        for columns in (8, tokens.shape[1]):  # in the first run libraries initialise
            few = tokens[:, :columns]
            model.model = FixedHidden(hidden[:, :columns].detach().requires_grad_())
            before = self._meter.reset()
            model(input_ids=few, labels=few).loss.backward()
            peak = self._meter.peak() - before
            model.zero_grad(set_to_none=True)
        model.model = layers
        return peak

    def step(self) -> dict[str, Any]:
        """Trains a step. The peak memory is that of all steps after the warm-up, or else of this step."""
        tokens = self._batches[self._steps % len(self._batches)]
        warm_up(self._optimizer, self.learning_rate, self._steps)
        if self._meter and self._steps <= WARM_UP:
            self._meter.reset()
        self._steps += 1

        def train() -> torch.Tensor:
            self._optimizer.zero_grad(set_to_none=True)
            loss = self.trained(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self._optimizer.step()
            return loss.detach()

        loss, seconds = timed_call(train, self.device)
        peak = self._meter.peak() - self._empty if self._meter else None
        return {"loss": loss.item(), "seconds": seconds, "peak_bytes": peak, "free_bytes": free_bytes(self.device)}


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of memory that other processes can allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers

    def answer(facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=answers, flush=True)

    answer({})  # the imports are done
    request = sys.stdin.readline()
    if not request:  # the parent has ended
        return
    trainee = Trainee(json.loads(request))
    answer(trainee.facts)
    for _ in sys.stdin:
        answer(trainee.step())


if __name__ == "__main__":
    main()
