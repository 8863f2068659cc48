"""Trains one model with one provider in a separate process: loss curve, time of a step by kind of kernel, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from examples.demo.data import batches, hashed_words
from liger_ext._meter import Meter
from liger_ext._timing import Timing, timed_call
from liger_ext.comparison.child import FixedHidden, optimizer_for, warm_up

from . import models, saved, step_time, suite
from .footprint import Footprint

LEARNING_RATE = 1e-4  # as in the runs that bound the distance of two right loss curves (docs/decisions.md)
WARM_UP = 3  # untimed steps
DIFFERENT = 12  # batches, used in turn


@dataclass
class Measured:
    step: Timing
    peak: int  # bytes
    footprint: Footprint
    time: dict[str, float]  # milliseconds of one step, by kind
    saved: dict[str, int] | None  # saved bytes by kind; None for a compiled model
    losses: list[float]


def measure(
    config: dict, batch: int, seq: int, provider: str, device: str, dtype: str, steps: int, say: Callable
) -> Measured:
    """Runs ``steps`` with the given sizes and times those after ``WARM_UP``; ``say(text)`` reports progress.

    On a CPU the peak includes some 60 MiB of libraries that load with the first step.
    """
    place = torch.device(device)
    meter = Meter(place)
    torch.ones(8, 8, device=place).matmul(torch.ones(8, 8, device=place))
    empty = 0 if place.type == "cuda" else meter.reset()
    say("building model and data")
    model = models.build(config, place, suite.DTYPES[dtype])
    trained = models.on_request(device)[provider](model)
    optimizer = optimizer_for(model, LEARNING_RATE)
    data = batches(hashed_words(config["vocab_size"]), min(DIFFERENT, WARM_UP + steps), batch, seq, None)
    data = [tokens.to(place) for tokens in data]

    def forward(tokens: torch.Tensor = data[0]) -> torch.Tensor:
        return trained(input_ids=tokens, labels=tokens).loss

    def step(number: int) -> torch.Tensor:
        warm_up(optimizer, LEARNING_RATE, number)
        optimizer.zero_grad(set_to_none=True)
        loss = forward(data[number % len(data)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    samples, losses = [], []
    for number in range(steps):
        if number in (0, WARM_UP):
            say(f"step {number + 1} of {steps}")
            meter.reset()
        loss, seconds = timed_call(partial(step, number), place)
        losses.append(loss)
        samples.append(seconds * 1e6)
    peak = meter.peak() - empty

    say("profile and saved tensors")
    spent = step_time.time_by_kind(lambda: step(steps), device)
    compiled = trained is not model
    kinds = None if compiled else saved.saved_by_kind(model, forward)
    held = _forward_bytes(forward, meter) if place.type == "cuda" else saved.saved_bytes(model, forward)
    parameters, states = _bytes(model.parameters()), _bytes(_states(optimizer))
    # A compiler replaces stock's loss; ours is one operation in any case.
    workspace = None if provider == models.COMPILED else _loss_workspace(model, data[0], meter)
    tied = _bytes([model.lm_head.weight]) if model.config.tie_word_embeddings else 0
    footprint = Footprint(parameters, parameters, states, held, workspace, tied)
    return Measured(
        Timing.from_samples(samples[WARM_UP:]), peak, footprint, spent, kinds, [loss.item() for loss in losses]
    )


def _forward_bytes(forward: Callable[[], torch.Tensor], meter: Meter) -> int:
    """Bytes that a forward adds to those in use; gradients and states exist already."""
    before = meter.reset()
    loss = forward()
    after = meter.reset()
    del loss
    return after - before


def _loss_workspace(model: torch.nn.Module, tokens: torch.Tensor, meter: Meter) -> int:
    """Head and loss alone, on fixed hidden states: the most bytes that their backward adds to the saved tensors."""
    weight = model.lm_head.weight
    hidden = torch.randn(*tokens.shape, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
    model.model = FixedHidden(hidden)
    measured = 0
    for _ in range(2):  # the first run loads libraries
        weight.grad = hidden.grad = None
        loss = model(input_ids=tokens, labels=tokens).loss
        before = meter.reset()
        loss.backward()
        measured = meter.peak() - before
    return measured


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


def _bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
