"""Measures time and memory. On a GPU calls are timed with CUDA graphs (liger_ext/_timing.py), as the command tune does.
On a CPU providers run in turns, call by call, because the machine's speed drifts, and medians are compared."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch

from liger_ext._meter import Meter
from liger_ext._timing import Timing, capture_graph, failure_text, time_graphs


def time_cpu(calls: dict[str, Callable[[], object]], seconds: float = 1.0, least: int = 5) -> dict[str, Timing]:
    """Wall time of each call; calls run in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds * len(calls)
    while min(map(len, samples.values())) < least or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - start) * 1e6)
    return {name: Timing.from_samples(values) for name, values in samples.items()}


def time_calls(calls: dict[str, Callable[[], object]], device: str) -> dict[str, Timing | str]:
    """Times every provider's call, in turns; a provider that fails has its error's text as its result."""
    ready, out = {}, {}
    for name, call in calls.items():
        try:
            if device == "cpu":
                call()
                ready[name] = call
            else:
                ready[name] = capture_graph(call)
        except Exception as error:  # a peer that cannot run this shape must not end the run
            out[name] = failure_text(error)
            if device == "cuda":
                torch.cuda.synchronize()
    if device == "cpu":
        out |= time_cpu(ready)
    else:
        out |= time_graphs(ready)
        ready.clear()
        gc.collect()
        torch.cuda.empty_cache()
    return {name: out[name] for name in calls}


def copy_calls(moved_bytes: int, device: str) -> dict[str, Callable[[], object]]:
    """The limit of the memory: our streaming copy of this many bytes, half read and half written; on a GPU in several
    launch configurations, of which the fastest counts."""
    n = max(moved_bytes // 2 // 16, 1) * 4
    x = torch.randn(n, device=device)
    each = (1,) if device == "cpu" else (1, 2, 4, 8)
    return {f"copy {k}": lambda k=k: torch.ops.liger_ext.stream_copy(x, k) for k in each}


def free_at_once() -> None:
    """From now on, freed CPU tensors of 1 MiB or more return their memory to the system at once, so that the resident
    set equals the memory in use."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


def peak_mib(call: Callable[[], object], device: str) -> float:
    """The most memory in use during a second call, above the memory in use before it."""
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
