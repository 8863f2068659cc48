"""Splits the time of a step by kind of kernel (on a CPU: of operator), and sums the idle time between kernels, from one
trace of torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile

# Kinds and parts of names; the first match counts, and the rest is "other". "fused" kernels do several operations at
# once: liger_ext's, the compiler's, and Triton kernels of other libraries, whose names contain no C++.
KINDS = {
    "fused": ("liger", "triton", "_rms_norm_", "_swiglu_", "element_mul_kernel"),
    "optimizer": ("adam", "multi_tensor"),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "matmul": ("nvjet", "gemm", "cublas", "cutlass", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn", "aten::linear",
               "splitk"),
    "copies": ("copy", "memcpy", "memset", "fill", "catarray", "aten::cat", "aten::clone", "aten::zero_",
               "aten::contiguous"),
    "elementwise": ("elementwise", "reduce_kernel", "softmax", "embedding", "aten::add", "aten::mul", "aten::silu",
                    "aten::sum", "aten::mean", "aten::pow", "aten::rsqrt", "aten::neg", "aten::nll_loss", "aten::div"),
}  # fmt: skip
IDLE = "idle"
COLUMNS = [*KINDS, "other", IDLE]


def kernel_kind(name: str) -> str:
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def idle_time(spans: Iterable[tuple[float, float]]) -> float:
    """The sum of the gaps between (start, end) spans; kernels of two streams may overlap."""
    idle, reached = 0.0, None
    for start, end in sorted(spans):
        if reached is not None:
            idle += max(0.0, start - reached)
        reached = end if reached is None else max(reached, end)
    return idle


def time_by_kind(step: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds of one step by kind. "idle", in which the GPU waits for the host, is not measured on a CPU."""
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        step()
        if cuda:
            torch.cuda.synchronize()
    spent = dict.fromkeys([*KINDS, "other"], 0.0)
    if not cuda:
        for event in profiled.key_averages():
            spent[kernel_kind(event.key)] += event.self_cpu_time_total / 1e3
        return spent
    return spent | kernel_times(profiled.events())


def kernel_times(events: Iterable) -> dict[str, float]:
    """Milliseconds that a GPU spent on each kind in a trace, and idle; omits kinds without a kernel."""
    spent: dict[str, float] = {}
    spans = []
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start, event.time_range.end  # microseconds
        kind = kernel_kind(event.name)
        spent[kind] = spent.get(kind, 0.0) + (end - start) / 1e3
        spans.append((start, end))
    return spent | {IDLE: idle_time(spans) / 1e3}
