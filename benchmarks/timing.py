"""How time and memory are taken.

On a GPU a call is captured as a CUDA graph, so that host time is out of the picture; before each replay the L2 cache
is flushed by READING a large buffer (writing would leave dirty lines whose write-back is charged to the op); the result
is the median over replays, with the middle half as the spread. On a CPU the providers take turns, call by call, because
the machine's speed drifts, and medians are compared.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from examples.demo.meter import Meter

FLUSH_BYTES = 256 << 20


@dataclass
class Timing:
    """Microseconds: the median and the first and third quartile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> Timing:
        if len(samples) < 2:
            return Timing(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4)
        return Timing(median, low, high)


def failure(error: Exception) -> str:
    """What stands in a record for a peer that cannot run a case; it must not end the run."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def on_a_stream_of_its_own(device: str):
    """Everything that is captured must run on one stream that is not the default one: autograd runs a backward on the
    stream of its forward."""
    return torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext()


def _graph(call: Callable[[], object], warmup: int = 3) -> torch.cuda.CUDAGraph:
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph


class _Flush:
    def __init__(self) -> None:
        self.buffer = torch.ones(FLUSH_BYTES // 4, device="cuda")
        self.out = torch.empty((), device="cuda")

    def __call__(self) -> None:
        torch.sum(self.buffer, dim=0, out=self.out)


def time_cuda(call: Callable[[], object], replays: int = 30) -> Timing:
    """Device time of one call, cold L2."""
    graph = _graph(call)
    flush = _Flush()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in [events[0], *events]:  # the first replay warms up and is overwritten
        flush()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    timing = Timing.of([start.elapsed_time(end) * 1e3 for start, end in events])
    del graph
    gc.collect()
    return timing


def time_cpu(calls: dict[str, Callable[[], object]], seconds: float = 1.0, least: int = 5) -> dict[str, Timing]:
    """Wall time of each call, taken in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while min(map(len, samples.values())) < least or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_calls(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing | str]:
    """Times every provider's call; a provider that fails is given its error's text."""
    if device == "cpu":
        return dict(time_cpu(calls))
    out: dict[str, Timing | str] = {}
    for name, call in calls.items():
        try:
            out[name] = time_cuda(call)
        except Exception as error:  # a peer that cannot run this shape must not end the run
            out[name] = failure(error)
            torch.cuda.synchronize()
    return out


def time_copy(moved_bytes: int, device: str) -> Timing:
    """The limit: our streaming copy that moves this many bytes, half read and half written; best launch shape."""
    n = max(moved_bytes // 2 // 16, 1) * 4
    x = torch.randn(n, device=device)
    op = torch.ops.liger_ext.stream_copy
    if device == "cpu":
        return time_cpu({"copy": lambda: op(x, 1)})["copy"]
    return min((time_cuda(lambda k=k: op(x, k)) for k in (1, 2, 4, 8)), key=lambda t: t.median)


def peak_mib(call: Callable[[], object], device: str) -> float:
    """The most that a second call has in use above what was in use before it."""
    meter = Meter(torch.device(device))
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = meter.reset()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (meter.peak() - before) / 2**20
