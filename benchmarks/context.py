"""`python -m benchmarks train --context`: finds, for each provider, the longest sequence for which one training step
with gradient checkpointing fits into memory. Each search runs in a separate process (`context_one.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import context_one, suite
from .children import ask_each
from .models import COMPILED, CONTEXT_CPU, CONTEXT_CUDA
from .train import chosen_models, chosen_providers

UNIT_CUDA, UNIT_CPU = context_one.UNIT, 128


@dataclass
class Context:
    model: str
    provider: str
    limit_gib: float | None = None
    tokens: int | None = None
    predicted: int | None = None  # by the memory model, before the first trial
    sure: bool = False  # one unit more was tried and does not fit, or needs more than the remaining memory
    bytes_per_token: float | None = None
    trials: list[tuple[int, float | None]] = field(default_factory=list)  # tokens, peak GiB (None: does not fit)
    error: str = ""


def run(settings: suite.Settings) -> Iterator[Context]:
    cpu = settings.device == "cpu"
    models = CONTEXT_CPU if cpu else CONTEXT_CUDA
    models = chosen_models(settings, models if settings.models else dict([next(iter(models.items()))]))
    wanted = chosen_providers(settings)
    if not settings.providers:  # a compiler compiles again for every length
        wanted = [provider for provider in wanted if COMPILED not in provider]
    cases = [(model, provider) for model in models for provider in wanted]
    common = dict(task="context", device=settings.device, dtype=settings.dtype, limit_gib=settings.limit_gib)
    common["unit"] = UNIT_CPU if cpu else UNIT_CUDA
    requests = [(f"{m}, {p}", common | dict(config=models[m], provider=p)) for m, p in cases]
    # Children run one after the other without a head start: the memory that is free when a child starts is its limit.
    for (model, provider), answer in zip(cases, ask_each(requests, ahead=False), strict=True):
        record = Context(model, provider, error=answer.get("error", ""))
        if "result" in answer:
            search = context_one.Search(**answer["result"])
            record.limit_gib, record.tokens, record.predicted = search.limit / 2**30, search.tokens, search.predicted
            record.sure, record.bytes_per_token = search.sure, search.bytes_per_token()
            record.trials = [(tokens, peak and peak / 2**30) for tokens, peak in search.trials]
        yield record


def line(record: Context) -> str:
    if record.tokens is None:
        return f"{record.model}, {record.provider}: {record.error}"
    return f"{record.model}, {record.provider}: {_tokens(record)} tokens in {record.limit_gib:.1f} GiB"


def _tokens(record: Context) -> str:
    return f"{'' if record.sure else 'at least '}{record.tokens:,}"


def table(records: list[Context], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{settings.dtype}: the longest sequence of one training step with gradient checkpointing",
        ["model", "provider", "GiB", "tokens", "predicted", "KB a token", "trials"],
    )
    for r in records:
        if r.tokens is None:
            grid.rows.append([r.model, r.provider, "", f"fails: {r.error}", "", "", ""])
            continue
        slope = "" if r.bytes_per_token is None else f"{r.bytes_per_token / 1e3:,.0f}"
        cells = [f"{r.limit_gib:.1f}", _tokens(r), f"{r.predicted:,}", slope, str(len(r.trials))]
        grid.rows.append([r.model, r.provider, *cells])
    return grid


def draw(records: list[Context], settings: suite.Settings, folder: Path) -> list[Path]:
    done = [r for r in records if r.tokens]
    if not done:
        return []
    models, names = (list(dict.fromkeys(getattr(r, key) for r in done)) for key in ("model", "provider"))
    found = {(r.model, r.provider): r.tokens / 1024 for r in done}
    picture, (axis,) = suite.figure(1)
    suite.bars(axis, models, {n: [found.get((m, n)) for m in models] for n in names}, "longest sequence, 1,024 tokens")
    return [suite.save(picture, folder / f"context_{settings.device}_{settings.dtype}.png")]
