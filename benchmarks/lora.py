"""Training steps of a Llama with LoRA adapters (PEFT) on all linear layers: forward, backward, fused AdamW of the
adapters. Each provider runs in a separate process (`step_one.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import suite
from .models import MODELS_CPU, MODELS_CUDA
from .steps import Steps, eager_providers, measured
from .train import chosen_models

# PEFT keeps adapters of 16-bit weights in fp32; a Trainer with bf16=True then runs the step under autocast.
ADAPTERS = {
    "fp32 adapters, autocast": dict(autocast=True),
    "all in the model's dtype": {},
    "nf4 weights, fp32 adapters, autocast": dict(autocast=True, four_bit=True),
}


@dataclass
class Lora(Steps):
    adapters: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.adapters}, {self.provider}"


def run(settings: suite.Settings) -> Iterator[Lora]:
    models = chosen_models(settings, MODELS_CPU if settings.device == "cpu" else MODELS_CUDA)
    if not settings.models:
        models = dict([next(iter(models.items()))])
    cases = [
        (Lora(model, provider, batch * seq, adapters=adapters), dict(lora=True, **options))
        for model, (_, batch, seq) in models.items()
        for adapters, options in ADAPTERS.items()
        for provider in eager_providers(settings)
    ]
    return measured(settings, models, cases)


def line(record: Lora) -> str:
    return record.line


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
