"""How time and memory are taken. On a GPU as tuning does, in graphs (liger_ext/_timing.py); on a CPU the providers take
turns, call by call, because the machine's speed drifts, and medians are compared.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

import torch

from examples.demo.meter import Meter
from liger_ext._timing import Timing, captured, failure, time_graphs


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
    """Times every provider's call, in turns; a provider that fails is given its error's text."""
    if device == "cpu":
        return dict(time_cpu(calls))
    graphs, out = {}, {}
    for name, call in calls.items():
        try:
            graphs[name] = captured(call)
        except Exception as error:  # a peer that cannot run this shape must not end the run
            out[name] = failure(error)
            torch.cuda.synchronize()
    out |= time_graphs(graphs)
    graphs.clear()
    gc.collect()
    torch.cuda.empty_cache()
    return {name: out[name] for name in calls}


def copy_calls(moved_bytes: int, device: str) -> dict[str, Callable[[], object]]:
    """The limit: our streaming copy that moves this many bytes, half read and half written; the best launch shape of
    these counts."""
    n = max(moved_bytes // 2 // 16, 1) * 4
    x = torch.randn(n, device=device)
    each = (1,) if device == "cpu" else (1, 2, 4, 8)
    return {f"copy {k}": lambda k=k: torch.ops.liger_ext.stream_copy(x, k) for k in each}


def free_at_once() -> None:
    """From now on, a block of memory of 1 MiB or more goes back to the system when a CPU's tensor is freed, so that the
    resident set is what is in use."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


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
