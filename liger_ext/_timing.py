"""Measures device time on a GPU, for tuning and for the benchmarks, and the wall time of calls on any device.

``time_graphs`` replays calls that are captured as CUDA graphs, so that a time contains no host time. Before each replay
it flushes the L2 cache by READING a large buffer: a write would leave dirty lines, whose write-back would count as the
op's time. The result is the median over replays, with the first and third quartile as the spread.
``sustained_seconds`` times calls without a graph, back to back. ``timed_call`` measures wall time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FLUSH_BYTES = 256 << 20


@dataclass
class Timing:
    """Microseconds: the median and the first and third quartile."""

    median: float
    low: float
    high: float

    @staticmethod
    def from_samples(samples: list[float]) -> Timing:
        if len(samples) < 2:
            return Timing(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4)
        return Timing(median, low, high)


def failure_text(error: Exception) -> str:
    """Returns the text that replaces the time of a provider that failed, so that the run goes on."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def timed_call(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Returns the result of a call, and its seconds until the device has done its work."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    wait(device)
    start = time.perf_counter()
    result = call()
    wait(device)
    return result, time.perf_counter() - start


def side_stream(device: str):
    """Returns a context that runs work on a new stream. A graph cannot be captured on the default stream, and autograd
    runs a backward on the stream of its forward; so forwards must run in this context, too."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def capture_graph(call: Callable[[], object], pool: object = None, warmup: int = 3) -> torch.cuda.CUDAGraph:
    """Captures the call as a graph. Graphs of one ``pool``, another graph's ``pool()``, share their memory: only the
    results of the last replayed graph are valid."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
        call()
    return graph


class _Flush:
    def __init__(self) -> None:
        self.buffer = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.out = torch.empty((), device="cuda")

    def __call__(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.out)


def time_graphs(graphs: Mapping[Any, torch.cuda.CUDAGraph], replays: int = 30) -> dict[Any, Timing]:
    """Returns the device time of each graph, with a cold L2. The graphs are replayed in turn, so that a drift of the
    clock affects all alike."""
    flush = _Flush()
    events = []
    for turn in range(replays + 1):  # the first replay warms up
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            graph.replay()
            end.record()
            if turn > 0:
                events.append((name, start, end))
    torch.cuda.synchronize()
    samples: dict[Any, list[float]] = {name: [] for name in graphs}
    for name, start, end in events:
        samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: Timing.from_samples(values) for name, values in samples.items()}


def sustained_seconds(call: Callable[[], object]) -> float:
    """Returns the seconds of one call under sustained load. It runs calls back to back for about a second and measures
    the second half, since a GPU under load lowers its clock."""

    def seconds_per_call(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    call()
    count = math.ceil(0.5 / seconds_per_call(3))
    seconds_per_call(count)
    return seconds_per_call(count)


# The timed calls: the code that users call ----------------------------------------------------------------------------


def forward_call(function: Callable, inputs: tuple) -> Callable[[], object]:
    """Returns a call of the forward. Autograd records it if an input requires a gradient."""
    return lambda: function(*inputs)


def backward_call(function: Callable, inputs: tuple) -> Callable[[], object]:
    """Returns a call of the backward through autograd, with upstream gradients of all outputs: random, or 1 for
    a scalar."""
    wanted = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = function(*inputs)
    outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t.requires_grad]
    gradients = [torch.randn_like(t) if t.dim() else torch.ones_like(t) for t in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
