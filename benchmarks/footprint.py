"""A model of a training step's memory: what must be there, and when it is there at once.

Parameters and the optimizer's states are there always. At the end of the forward, all that it keeps is there beside
them, and the backward starts with the loss, which needs a workspace (the gradients of the hidden states and of the
head, and what the loss makes on its way). From there on tensors go and gradients come; at the end all gradients are
there, and that of an embedding which is also the head a second time. So the peak is parameters + states + the larger of
(kept + the loss's workspace) and (gradients + a tied embedding's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Footprint:
    """Bytes."""

    parameters: int
    gradients: int
    states: int
    kept: int  # by the forward for the backward
    workspace: int | None  # of the loss's backward, beside what the forward keeps; None: not known
    tied: int  # gradient of the embedding, before it is added to the head's; 0 if each has its own

    @property
    def peak(self) -> int | None:
        if self.workspace is None:
            return None
        return self.parameters + self.states + max(self.kept + self.workspace, self.gradients + self.tied)


def count_parameters(config: dict) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in LlamaForCausalLM(LlamaConfig(**config)).parameters())


def checkpointed_bytes_per_token(config: dict, dtype: torch.dtype) -> int:
    """With gradient checkpointing, as the backward begins: each layer's input, and in one layer gate, up, their product
    and the gradients of these three. Attention and norms need less at another moment."""
    inputs = config["num_hidden_layers"] * config["hidden_size"]
    return (inputs + 6 * config["intermediate_size"]) * dtype.itemsize


def longest_context(config: dict, dtype: torch.dtype, limit: int) -> int:
    """How many tokens of one sequence the model above lets into ``limit`` bytes; 0 if not even one.

    As the backward begins there are parameters, the two states of AdamW and the head's gradient; of a short sequence,
    more is in use at its end, when all gradients are there and the layers' inputs are not.
    """
    parameters = count_parameters(config)
    begins = limit - (3 * parameters + config["vocab_size"] * config["hidden_size"]) * dtype.itemsize
    ends = limit - 4 * parameters * dtype.itemsize
    of_a_layer = 6 * config["intermediate_size"] * dtype.itemsize
    return max(0, min(begins // checkpointed_bytes_per_token(config, dtype), ends // of_a_layer))
