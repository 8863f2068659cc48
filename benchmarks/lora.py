"""Training steps of a Llama with LoRA adapters (PEFT) on all its linear layers: forward, backward, fused AdamW of the
adapters. Each provider in a process of its own (`step_one.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from liger_ext._timing import Timing

from . import suite
from .children import ask_each
from .models import COMPILED, MODELS_CPU, MODELS_CUDA
from .train import chosen_models, chosen_providers

# PEFT keeps adapters of 16-bit weights in fp32, and a Trainer in bf16 then runs the step under autocast.
ADAPTERS = ("fp32 adapters, autocast", "all in the model's dtype")


@dataclass
class Lora:
    model: str
    adapters: str
    provider: str
    tokens: int
    step: Timing | None = None
    peak_mib: float | None = None
    loss: float | None = None  # of the last step
    error: str = ""


def run(settings: suite.Settings) -> Iterator[Lora]:
    models = chosen_models(settings, MODELS_CPU if settings.device == "cpu" else MODELS_CUDA)
    if not settings.models:
        models = dict([next(iter(models.items()))])
    wanted = chosen_providers(settings)
    if not settings.providers:
        wanted = [provider for provider in wanted if COMPILED not in provider]
    cases = [(model, adapters, provider) for model in models for adapters in ADAPTERS for provider in wanted]
    requests = []
    for model, adapters, provider in cases:
        config, batch, seq = models[model]
        request = dict(
            task="step", config=config, batch=batch, seq=seq, provider=provider, device=settings.device,
            dtype=settings.dtype, lora=True, autocast=adapters == ADAPTERS[0],
        )  # fmt: skip
        requests.append((f"{model}, {adapters}, {provider}", request))
    answers = ask_each(requests, settings.device == "cuda")
    for (model, adapters, provider), answer in zip(cases, answers, strict=True):
        _, batch, seq = models[model]
        record = Lora(model, adapters, provider, batch * seq, error=answer.get("error", ""))
        if "result" in answer:
            result = answer["result"]
            record.step, record.peak_mib = Timing(**result["step"]), result["peak"] / 2**20
            record.loss = result["loss"]
        yield record


def line(record: Lora) -> str:
    name = f"{record.model}, {record.adapters}, {record.provider}"
    if record.step is None:
        return f"{name}: {record.error}"
    return f"{name}: {suite.duration(record.step)}, {record.peak_mib:,.0f} MiB"


def table(records: list[Lora], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{settings.dtype}: training steps with LoRA of rank 16 on all linear layers",
        ["model", "adapters", "provider", "step", "tokens/s", "peak MiB", "loss"],
    )
    for r in records:
        name = [r.model, r.adapters, r.provider]
        if r.step is None:
            grid.rows.append([*name, f"fails: {r.error}", "", "", ""])
            continue
        rate = f"{r.tokens / r.step.median * 1e6:,.0f}"
        grid.rows.append([*name, suite.duration(r.step), rate, f"{r.peak_mib:,.0f}", f"{r.loss:.4f}"])
    return grid


def draw(records: list[Lora], settings: suite.Settings, folder: Path) -> list[Path]:
    return []
