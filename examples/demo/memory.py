"""Peak memory of the loss and of a whole training step; each variant is measured in a separate process.

The loss is the head and the cross entropy, forward and backward, as the model runs them: a module that returns fixed
hidden states replaces the layers. The loss's peak does not include weights and hidden states. A step's peak includes
weights, gradients, optimizer state and activations. On a GPU both come from the allocator's statistics, on a CPU from
the resident set of the process, whose high-water mark Linux lets a process reset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

from liger_ext._meter import Meter

from .models import DTYPES, Plan, cast_parameters
from .training import PATCHED, optimizer_for, patch


class FixedHidden(torch.nn.Module):
    """Replaces the layers of a model."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: object, **kwargs: object) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.hidden)


def measure(
    config: LlamaConfig, level: str | None, device: torch.device, dtype: torch.dtype, batch: int, seq: int
) -> dict[str, int]:
    """Peak bytes of the loss, above its inputs, and of a step, above an empty process. level: the patch's level of
    memory, or None for an unpatched model."""
    meter = Meter(device)
    with device:
        torch.ones(8, 8).matmul(torch.ones(8, 8))
        empty = meter.reset()
        model = cast_parameters(LlamaForCausalLM(config), dtype).train()
        tokens = torch.randint(config.vocab_size, (batch, seq))
        hidden = torch.randn(batch, seq, config.hidden_size, dtype=dtype)
    if level is not None:
        patch(model, level)
    layers = model.model

    def loss(rows: int) -> None:
        model.model = FixedHidden(hidden[:, :rows].detach().requires_grad_())
        model(input_ids=tokens[:, :rows], labels=tokens[:, :rows], use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    loss(8)  # libraries initialise
    before = meter.reset()
    loss(seq)
    loss_bytes = meter.peak() - before

    model.model = layers
    optimizer = optimizer_for(model, 0.0)
    for rows in (8, seq):  # the first run allocates the optimizer's state
        meter.reset()
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens[:, :rows], labels=tokens[:, :rows], use_cache=False).loss.backward()
        optimizer.step()
    return {"loss": loss_bytes, "step": meter.peak() - (0 if device.type == "cuda" else empty)}


def measure_apart(name: str, config: LlamaConfig, plan: Plan) -> dict[str, int] | None:
    """`measure` for one variant, in a new process; None if the system cannot measure it (no Linux, no /proc)."""
    if plan.device.type == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    request = {
        "config": config.to_diff_dict(), "device": str(plan.device), "batch": plan.batch, "seq": plan.seq,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == plan.dtype),
        "level": plan.memory if name == PATCHED else None,
    }  # fmt: skip
    # Freed blocks of a megabyte return to the system at once, so that the resident set equals the memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-m", __spec__.name, json.dumps(request)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{child.stderr[-4000:]}")
    return json.loads(child.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="measures one variant; the demo calls this")
    parser.add_argument("request", type=json.loads)
    asked = parser.parse_args().request
    config, device = LlamaConfig(**asked["config"]), torch.device(asked["device"])
    print(json.dumps(measure(config, asked["level"], device, DTYPES[asked["dtype"]], asked["batch"], asked["seq"])))
