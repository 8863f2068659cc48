"""The fused loss, forward and backward, beside its floor: the three matmuls of the same operands in the same run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import liger_ext.functional as LF

from .timing import Timing, time_cpu

SHAPES_CUDA = [
    (4096, 2048, 128256),
    (4096, 4096, 128256),
    (8192, 4096, 128256),
    (8192, 4096, 32000),
    (16384, 2048, 128256),
]
SHAPES_CPU = [(1024, 576, 49152), (512, 2048, 32000)]


@dataclass
class Result:
    shape: str
    dtype: str
    floors: dict[str, Timing]  # taken in turns with each provider
    times: dict[str, Timing | str]
    peak_mib: dict[str, float]  # above the inputs (CUDA only)


def _eager(x, w, t):
    return F.cross_entropy((x @ w.T).float(), t)


def _providers() -> dict[str, Callable]:
    out = {
        "liger_ext": LF.fused_linear_cross_entropy,
        "torch": _eager,
        "torch.compile": torch.compile(_eager, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fn

        out["liger"] = lambda x, w, t: Fn.apply(x, w, t)[0]
    if torch.cuda.is_available() and importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        out["cce"] = lambda x, w, t: linear_cross_entropy(x, w, t)
    if torch.cuda.is_available() and importlib.util.find_spec("quack"):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        out["quack"] = lambda x, w, t: chunked_linear_cross_entropy(x, w, t, chunk_size=4096)
    return out


def _time_beside_floor(floor: Callable, call: Callable, rounds: int = 12, burst: int = 3) -> tuple[Timing, Timing]:
    """Whole steps as a user runs them, in turns with the floor and with nothing else between: the clock follows the
    power that the last matmuls drew, so that a floor timed behind a memory-bound peer is up to a tenth faster than one
    timed behind another floor."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for timed, into in zip((floor, call), samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            timed()
            start.record()
            for _ in range(burst):
                timed()
            end.record()
            end.synchronize()
            into.append(start.elapsed_time(end) * 1e3 / burst)
    return Timing.of(samples[0]), Timing.of(samples[1])


def _peak_mib(call: Callable[[], object]) -> float:
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def run(dtype: torch.dtype, device: str, providers: list[str] | None) -> Iterator[Result]:
    for rows, hidden, vocab in SHAPES_CPU if device == "cpu" else SHAPES_CUDA:
        x = torch.randn(rows, hidden, device=device, dtype=dtype, requires_grad=True)
        w = (torch.randn(vocab, hidden, device=device) * hidden**-0.5).to(dtype).requires_grad_()
        t = torch.randint(vocab, (rows,), device=device)

        @torch.no_grad()
        def floor(x=x, w=w):
            logits = x @ w.T
            return logits @ w, logits.T @ x

        def step(function, x=x, w=w, t=t):
            return lambda: torch.autograd.grad(function(x, w, t), (x, w))

        calls = {n: step(f) for n, f in _providers().items() if providers is None or n in providers}
        result = Result(f"{rows}x{hidden}x{vocab}", str(dtype).removeprefix("torch."), {}, {}, {})
        for name, call in calls.items():
            if device == "cpu":
                timed = time_cpu({"floor": floor, name: call}, seconds=2.0)
                result.floors[name], result.times[name] = timed["floor"], timed[name]
                continue
            try:
                result.peak_mib[name] = _peak_mib(call)
                result.floors[name], result.times[name] = _time_beside_floor(floor, call)
            except Exception as error:  # a peer that cannot run this shape must not end the run
                result.times[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                torch.cuda.synchronize()
        yield result
        del x, w, t, calls
