"""Training steps of models of other families than Llama: a few layers at the width, and with the vocabulary, of a model
that people train; forward, backward, fused AdamW. Each provider in a process of its own (`step_one.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from liger_ext._timing import Timing

from . import suite
from .children import ask_each
from .models import COMPILED, FAMILIES_CPU, FAMILIES_CUDA, STOCK
from .train import chosen_models, chosen_providers


@dataclass
class Family:
    model: str
    provider: str
    tokens: int
    step: Timing | None = None
    peak_mib: float | None = None
    loss: float | None = None  # of the last step
    error: str = ""


def run(settings: suite.Settings) -> Iterator[Family]:
    models = chosen_models(settings, FAMILIES_CPU if settings.device == "cpu" else FAMILIES_CUDA)
    wanted = chosen_providers(settings)
    if not settings.providers:
        wanted = [provider for provider in wanted if COMPILED not in provider]
    cases = [(model, provider) for model in models for provider in wanted]
    requests = []
    for model, provider in cases:
        config, batch, seq = models[model]
        request = dict(
            task="step", config=config, batch=batch, seq=seq, provider=provider, device=settings.device,
            dtype=settings.dtype,
        )  # fmt: skip
        requests.append((f"{model}, {provider}", request))
    for (model, provider), answer in zip(cases, ask_each(requests, settings.device == "cuda"), strict=True):
        _, batch, seq = models[model]
        record = Family(model, provider, batch * seq, error=answer.get("error", ""))
        if "result" in answer:
            result = answer["result"]
            record.step, record.peak_mib = Timing(**result["step"]), result["peak"] / 2**20
            record.loss = result["loss"]
        yield record


def line(record: Family) -> str:
    name = f"{record.model}, {record.provider}"
    if record.step is None:
        return f"{name}: {record.error}"
    return f"{name}: {suite.duration(record.step)}, {record.peak_mib:,.0f} MiB, loss {record.loss:.4f}"


def table(records: list[Family], settings: suite.Settings) -> suite.Grid:
    """Shares of the time and memory of Hugging Face's step beside the figures."""
    grid = suite.Grid(
        f"{settings.dtype}: training steps of a few layers of other families",
        ["model", "provider", "step", "of stock's", "peak MiB", "of stock's", "loss after 14 steps"],
    )
    stock = {r.model: r for r in records if r.provider == STOCK and r.step}
    for r in records:
        if r.step is None:
            grid.rows.append([r.model, r.provider, f"fails: {r.error}", "", "", "", ""])
            continue
        base = stock.get(r.model)
        time = f"{r.step.median / base.step.median:.3f}" if base else ""
        memory = f"{r.peak_mib / base.peak_mib:.3f}" if base else ""
        figures = [suite.duration(r.step), time, f"{r.peak_mib:,.0f}", memory, f"{r.loss:.4f}"]
        grid.rows.append([r.model, r.provider, *figures])
    return grid


def draw(records: list[Family], settings: suite.Settings, folder: Path) -> list[Path]:
    return []
