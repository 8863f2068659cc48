"""The two fine-tunings: same weights, data and order; one model is unpatched, one patched."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from .models import Plan, cast_parameters

UNPATCHED, PATCHED = "Hugging Face", "liger_ext"
WARM_UP = 3  # steps that the median time excludes: libraries initialise, caches fill
Build = Callable[[], torch.nn.Module]


def optimizer_for(model: torch.nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)


def warm_up(optimizer: torch.optim.Optimizer, learning_rate: float, step: int) -> None:
    """Sets the learning rate of a step, counted from 0: five steps of linear warm-up."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (step + 1) / 5)


def patch(model: torch.nn.Module, memory: str) -> None:
    """The only change to a training script; `memory` may be omitted for "auto"."""
    from liger_ext import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model, memory=memory)


class Run:
    """One of the two fine-tunings: its model and optimizer, the loss and time of each step."""

    def __init__(self, name: str, model: torch.nn.Module, plan: Plan):
        self.name, self.model, self.plan = name, model.train(), plan
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._optimizer: torch.optim.Optimizer | None = None

    def step(self, tokens: torch.Tensor) -> None:
        tokens = tokens.to(self.plan.device)
        if self._optimizer is None:
            self._optimizer = optimizer_for(self.model.to(self.plan.device), self.plan.learning_rate)
        warm_up(self._optimizer, self.plan.learning_rate, len(self.losses))
        self._synchronize()
        start = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self._optimizer.step()
        self._synchronize()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def median_seconds(self) -> float:
        return statistics.median(self.seconds[min(WARM_UP, len(self.seconds) - 1) :])

    def release(self) -> None:
        """Frees the device memory of model and optimizer."""
        self.model = self._optimizer = None
        gc.collect()
        if self.plan.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.plan.device.type == "cuda":
            torch.cuda.synchronize(self.plan.device)


def make_runs(build: Build, plan: Plan) -> list[Run]:
    """Two runs with the same weights. If memory does not hold both, the second model waits on the CPU."""
    torch.manual_seed(0)
    with plan.device:
        model = build()
    model = cast_parameters(model, plan.dtype).to(plan.device)
    twin = copy.deepcopy(model)
    if not plan.together:
        twin.to("cpu")
    patch(twin, plan.memory)
    return [Run(UNPATCHED, model, plan), Run(PATCHED, twin, plan)]


def train(runs: list[Run], data: list[torch.Tensor], plan: Plan) -> Iterator[Run]:
    """Trains both, and yields a run after each of its steps.

    Steps alternate, and each run goes first every other time, so that other load of the machine affects both equally.
    """
    if plan.together:
        for number in range(plan.steps):
            for run in runs if number % 2 == 0 else reversed(runs):
                run.step(data[number % len(data)])
                yield run
        return
    for run in runs:
        for number in range(plan.steps):
            run.step(data[number % len(data)])
            yield run
        run.release()
