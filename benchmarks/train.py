"""Whole training steps of a Llama with random weights: forward, backward, fused AdamW. Time of a step, peak memory, and
where the time goes, from a profile: what is no matmul, attention or optimizer is what liger_ext is about.

Each provider trains a model of its own, one after another, since two of a real size do not fit beside each other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from examples.demo.meter import Meter
from examples.demo.training import optimizer_for
from liger_ext import apply_liger_kernel_to_llama
from liger_ext._timing import Timing, failure

from . import suite
from .installed import has

_LLAMA = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0}
# name: (configuration, batch, seq)
MODELS_CUDA = {
    "Llama-1B": (dict(_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                      tie_word_embeddings=True), 8, 2048),
    "Llama-8B": (dict(_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                      tie_word_embeddings=False), 1, 4096),
}  # fmt: skip
MODELS_CPU = {
    "SmolLM2-135M, 6 layers": (dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
                                    num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True), 1, 256),
}  # fmt: skip
WARM_UP, STEPS = 3, 8

# Kernels (operators, on a CPU) by what stands in their names; the rest is "other".
KINDS = {
    "matmul": ("nvjet", "gemm", "cublas", "cutlass", "aten::mm", "aten::addmm", "aten::bmm", "mkldnn", "aten::linear"),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn"),
    "optimizer": ("adam", "multi_tensor"),
}  # fmt: skip


@dataclass
class Training:
    model: str
    provider: str
    tokens: int
    step: Timing | None
    peak_mib: float | None
    share: dict[str, float] | None  # of the profiled time, by kind
    error: str = ""


def _stock(model: torch.nn.Module) -> torch.nn.Module:
    return model


def _patched(model: torch.nn.Module) -> torch.nn.Module:
    apply_liger_kernel_to_llama(model=model)
    return model


def _liger(model: torch.nn.Module) -> torch.nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama as apply

    apply(model=model)
    return model


def providers(device: str) -> dict[str, Callable[[torch.nn.Module], torch.nn.Module]]:
    out = {"Hugging Face": _stock, "liger_ext": _patched, "torch.compile": torch.compile}
    if device == "cuda" and has("liger_kernel"):
        out["liger"] = _liger
    return out


def kind_of(name: str) -> str:
    name = name.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


def shares(step: Callable[[], object], device: str) -> dict[str, float]:
    """Each kind's share of the time that one step keeps the device (or the CPU's operators) busy."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    busy = dict.fromkeys([*KINDS, "other"], 0.0)
    for event in profiled.key_averages():
        busy[kind_of(event.key)] += event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
    total = sum(busy.values())
    return {kind: spent / total for kind, spent in busy.items()}


def _train(name: str, provider: str, make: Callable, settings: suite.Settings) -> Training:
    config, batch, seq = (MODELS_CPU if settings.device == "cpu" else MODELS_CUDA)[name]
    device = torch.device(settings.device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    meter = Meter(device)
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**config, use_cache=False)).to(settings.torch_dtype).train()
        tokens = torch.randint(config["vocab_size"], (batch, seq))
    optimizer, trained = optimizer_for(model, 1e-4), make(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    samples = []
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            meter.reset()
        wait()
        start = time.perf_counter()
        step()
        wait()
        samples.append((time.perf_counter() - start) * 1e6)
    peak = meter.peak() / 2**20
    return Training(name, provider, batch * seq, Timing.of(samples[WARM_UP:]), peak, shares(step, settings.device))


def run(settings: suite.Settings) -> Iterator[Training]:
    # Liger comes last: what it puts into transformers' module stays there for every model that is built afterwards.
    for provider, make in providers(settings.device).items():
        for name, (_, batch, seq) in (MODELS_CPU if settings.device == "cpu" else MODELS_CUDA).items():
            if not settings.wants(provider):
                continue
            try:
                yield _train(name, provider, make, settings)
            except Exception as error:  # a peer that cannot run this model must not end the run
                text = failure(error)
                yield Training(name, provider, batch * seq, None, None, None, text)
            gc.collect()
            if settings.device == "cuda":
                torch.cuda.empty_cache()


def line(record: Training) -> str:
    return f"{record.model}, {record.provider}: " + (suite.duration(record.step) if record.step else record.error)


def table(records: list[Training], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{settings.dtype}: training steps; shares of the profiled time",
        ["model", "provider", "step", "tokens/s", "peak MiB", *KINDS, "other"],
    )
    models = list(dict.fromkeys(r.model for r in records))
    for r in sorted(records, key=lambda r: models.index(r.model)):
        if r.step is None:
            grid.rows.append([r.model, r.provider, "fails", *[""] * (len(grid.columns) - 3)])
            continue
        parts = [f"{r.share[kind]:.0%}" for kind in (*KINDS, "other")]
        rate = r.tokens / r.step.median * 1e6
        grid.rows.append([r.model, r.provider, suite.duration(r.step), f"{rate:,.0f}", f"{r.peak_mib:,.0f}", *parts])
    return grid


def draw(records: list[Training], settings: suite.Settings, folder: Path) -> list[Path]:
    done = [r for r in records if r.step]
    made, axes = suite.figure(2)
    models = list(dict.fromkeys(r.model for r in done))
    names = list(dict.fromkeys(r.provider for r in done))
    for axis, label, value in (
        (axes[0], "milliseconds a step", lambda r: r.step.median / 1e3),
        (axes[1], "peak memory, GiB", lambda r: r.peak_mib / 1024),
    ):
        found = {(r.model, r.provider): value(r) for r in done}
        suite.bars(axis, models, {n: [found.get((m, n)) for m in models] for n in names}, label)
    return [suite.save(made, folder / f"train_{settings.device}_{settings.dtype}.png")]
