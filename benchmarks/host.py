"""Measures host time: the time that Python, checks and dispatch take in a call of an op. It dominates at small shapes.

On a GPU calls are queued without synchronisation, and the device's work takes less time than the host's; on a CPU the
tensors are so small that their arithmetic does not matter. Each op is timed as a forward without gradients, and as a
forward and backward through autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from liger_ext._timing import Timing
from liger_ext.records import RECORDS, InputFactory

from . import suite
from .ops import functions

SAMPLES, BURST = 15, 20


@dataclass
class HostTime:
    op: str
    shape: str
    forward: dict[str, Timing]  # without gradients
    step: dict[str, Timing]  # forward and backward through autograd


@dataclass
class Case:
    op: str
    inputs: tuple[torch.Tensor, ...]
    functions: dict[str, Callable]


def cases(settings: suite.Settings) -> Iterator[Case]:
    """Small calls of every op that `benchmarks rows` times."""
    rows, cols = (1024, 4096) if settings.device == "cuda" else (4, 64)
    for name, record in RECORDS.items():
        if record.timed:
            size = record.llama.at(rows, cols)
            if any(size.heads):  # as many elements, in heads of 64
                size = replace(size.at(max(4, rows * cols // (16 * 64)), 64), heads=(12, 4, 64))
            generator = torch.Generator(settings.device).manual_seed(0)
            arguments = record.inputs(InputFactory(settings.torch_dtype, settings.device, generator, ignored=0), size)
            yield Case(name, tuple(arguments.values()), functions(name))


def _step(function: Callable, inputs: tuple[torch.Tensor, ...]) -> Callable[[], object]:
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in outputs]

    def step() -> object:
        results = function(*inputs)
        return torch.autograd.grad(results if isinstance(results, tuple) else (results,), wanted, gradients)

    return step


def _time(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing]:
    """Times bursts of the calls in turns; the device is idle when a burst begins, and no call synchronises."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(-3, SAMPLES):  # negative samples warm up
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(BURST):
                call()
            spent = time.perf_counter() - start
            if sample >= 0:
                samples[name].append(spent / BURST * 1e6)
    wait()
    return {name: Timing.from_samples(values) for name, values in samples.items()}


def run(settings: suite.Settings) -> Iterator[HostTime]:
    for case in cases(settings):
        if not settings.wants_op(case.op):
            continue
        functions = {name: f for name, f in case.functions.items() if settings.wants(name)}
        with torch.no_grad():
            forward = _time({n: partial(f, *case.inputs) for n, f in functions.items()}, settings.device)
        step = _time({n: _step(f, case.inputs) for n, f in functions.items()}, settings.device)
        yield HostTime(case.op, "x".join(map(str, case.inputs[0].shape)), forward, step)


def line(record: HostTime) -> str:
    ours = record.forward.get("liger_ext"), record.step.get("liger_ext")
    return f"{record.op}: " + ", ".join(suite.duration(t) for t in ours if t)


def table(records: list[HostTime], settings: suite.Settings) -> suite.Grid:
    names = suite.provider_names(r.forward for r in records)
    grid = suite.Grid(f"{settings.dtype}: host time of a call", ["op", "shape", "", *names])
    for record in records:
        for what, times in (("forward, no grad", record.forward), ("forward + backward", record.step)):
            cells = [suite.duration(times[n]) if n in times else "" for n in names]
            grid.rows.append([record.op, record.shape, what, *cells])
    return grid


def draw(records: list[HostTime], settings: suite.Settings, folder: Path) -> list[Path]:
    picture, axes = suite.figure(2)
    names = suite.provider_names(r.forward for r in records)
    for axis, what in zip(axes, ("forward", "step"), strict=True):
        times = [getattr(r, what) for r in records]
        suite.bars(axis, [r.op for r in records], {
            n: [t[n].median if n in t else None for t in times] for n in names
        }, "microseconds")  # fmt: skip
        axis.set_yscale("log")
        axis.set_title("forward, no grad" if what == "forward" else "forward + backward")
    return [suite.save(picture, folder / f"host_{settings.device}_{settings.dtype}.png")]
