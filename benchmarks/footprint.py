"""A model of a training step's memory: which tensors it needs, and which of them exist at the same time.

Parameters and the optimizer's states always exist. At the end of the forward, all saved tensors exist as well, and the
backward starts with the loss, which needs a workspace (the gradients of the hidden states and of the head, and
temporary tensors). From then on, saved tensors are freed and gradients allocated. At the end of the backward all
gradients exist; an embedding that is also the head then has a second gradient, which is not yet added to the head's. So
the peak is parameters + states + the larger of (saved tensors + the loss's workspace) and (gradients + that second
gradient).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Footprint:
    """Sizes in bytes."""

    parameters: int
    gradients: int
    states: int
    saved: int  # saved tensors of the forward
    workspace: int | None  # of the loss's backward, besides the saved tensors; None: not known
    tied: int  # the embedding's gradient, before it is added to the head's; 0 if not tied

    @property
    def peak(self) -> int | None:
        if self.workspace is None:
            return None
        return self.parameters + self.states + max(self.saved + self.workspace, self.gradients + self.tied)


def count_parameters(config: dict) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**config)).parameters())


def checkpointed_bytes_per_token(config: dict, dtype: torch.dtype) -> int:
    """With gradient checkpointing, at the start of the backward: each layer's input, and for one layer gate, up, their
    product and the gradients of these three. Attention and norms need less, at another moment."""
    inputs = config["num_hidden_layers"] * config["hidden_size"]
    return (inputs + 6 * config["intermediate_size"]) * dtype.itemsize


def longest_context(config: dict, dtype: torch.dtype, limit: int) -> int:
    """The most tokens of one sequence that the model above fits into ``limit`` bytes; 0 if none fits.

    At the start of the backward, parameters, the two states of AdamW and the head's gradient exist; for a short
    sequence, the end needs more, when all gradients exist and the layers' inputs are freed.
    """
    parameters = count_parameters(config)
    begins = limit - (3 * parameters + config["vocab_size"] * config["hidden_size"]) * dtype.itemsize
    ends = limit - 4 * parameters * dtype.itemsize
    layer_bytes = 6 * config["intermediate_size"] * dtype.itemsize
    return max(0, min(begins // checkpointed_bytes_per_token(config, dtype), ends // layer_bytes))
