"""Measures training steps (forward, backward, fused AdamW) of model families other than Llama: time, peak memory and
the last loss. Each model has the width of a published model, but only a few layers. Each provider runs in a separate
process (`step_one.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from . import suite
from .models import FAMILIES_CPU, FAMILIES_CUDA, STOCK
from .steps import Steps, eager_providers, measured
from .train import chosen_models


def run(settings: suite.Settings) -> Iterator[Steps]:
    models = chosen_models(settings, FAMILIES_CPU if settings.device == "cpu" else FAMILIES_CUDA)
    providers = eager_providers(settings)
    cases = (
        (Steps(model, provider, batch * seq), {}) for model, (_, batch, seq) in models.items() for provider in providers
    )
    return measured(settings, models, cases)


def line(record: Steps) -> str:
    return record.line


def table(records: list[Steps], settings: suite.Settings) -> suite.Grid:
    """A table of the figures, with shares of Hugging Face's time and memory."""
    grid = suite.Grid(
        f"{settings.dtype}: training steps of a few layers of other families",
        ["model", "provider", "step", "of stock's", "peak MiB", "of stock's", "loss after 14 steps"],
    )
    stock = {r.model: r for r in records if r.provider == STOCK and r.step}
    for r in records:
        if r.step is None:
            grid.rows.append([r.model, r.provider, f"fails: {r.error}", "", "", "", ""])
            continue
        time, memory = r.shares(stock.get(r.model))
        figures = [suite.duration(r.step), time, f"{r.peak_mib:,.0f}", memory, f"{r.loss:.4f}"]
        grid.rows.append([r.model, r.provider, *figures])
    return grid


def draw(records: list[Steps], settings: suite.Settings, folder: Path) -> list[Path]:
    return []
