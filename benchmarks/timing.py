"""How time and memory are taken. On a GPU as tuning does, in graphs (liger_ext/_timing.py); on a CPU the providers take
turns, call by call, because the machine's speed drifts, and medians are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from examples.demo.meter import Meter
from liger_ext._timing import Timing, failure, time_cuda


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
