"""Measures whole training steps of a Llama with random weights: forward, backward, fused AdamW. It records the loss
curve, the time of a step by kind of kernel, the peak memory and its prediction (`footprint.py`), and the bytes of saved
tensors.

Each provider trains each model in a separate process (`train_one.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from liger_ext._timing import Timing
from liger_ext.comparison.report import agreement

from . import saved, suite
from .children import ask_each
from .footprint import Footprint
from .models import MODELS_CPU, MODELS_CUDA, STOCK, on_request, providers
from .step_time import COLUMNS

STEPS, CURVE_STEPS = 11, 50
_MIB = 2**20


@dataclass
class Training:
    model: str
    provider: str
    tokens: int
    step: Timing | None = None
    peak_mib: float | None = None
    explained_mib: float | None = None  # predicted by footprint.py
    parts_mib: dict[str, float | None] | None = None  # terms of the prediction
    time_ms: dict[str, float] | None = None  # of one step, by kind
    saved_mib: dict[str, float] | None = None  # saved tensors by kind; None for a compiled model
    losses: list[float] = field(default_factory=list)
    curve: dict[str, float] | None = None  # of losses from Hugging Face's: `agreement`
    error: str = ""

    @property
    def differs(self) -> bool:
        return self.curve is not None and not self.curve["holds"]


def chosen_models(settings: suite.Settings, models: dict[str, dict]) -> dict:
    """The requested models for this device."""
    return {name: model for name, model in models.items() if settings.wants_model(name)}


def chosen_providers(settings: suite.Settings) -> list[str]:
    """The requested providers, or the default ones; for curves, the reference first."""
    if not settings.providers:
        return list(providers(settings.device))
    here = on_request(settings.device)
    if unknown := [name for name in settings.providers if name not in here]:
        raise SystemExit(f"unknown provider {', '.join(unknown)}; expected one of {', '.join(here)}")
    return [n for n in here if settings.wants(n) or (settings.curves and n == STOCK)]


def run(settings: suite.Settings) -> Iterator[Training]:
    models = chosen_models(settings, MODELS_CPU if settings.device == "cpu" else MODELS_CUDA)
    cases = [(model, provider) for model in models for provider in chosen_providers(settings)]
    requests = []
    for model, provider in cases:
        config, batch, seq = models[model]
        request = dict(
            task="train", config=config, batch=batch, seq=seq, provider=provider, device=settings.device,
            dtype=settings.dtype, steps=CURVE_STEPS if settings.curves else STEPS,
        )  # fmt: skip
        requests.append((f"{model}, {provider}", request))
    references: dict[str, list[float]] = {}
    for (model, provider), answer in zip(cases, ask_each(requests, settings.device == "cuda"), strict=True):
        _, batch, seq = models[model]
        record = Training(model, provider, batch * seq, error=answer.get("error", ""))
        if "result" in answer:
            _fill(record, answer["result"])
        if provider == STOCK:
            references[model] = record.losses
        elif settings.curves and record.losses and references.get(model):
            record.curve = agreement(references[model], record.losses, settings.torch_dtype)
        yield record


def _fill(record: Training, result: dict) -> None:
    parts = result["footprint"]
    record.step = Timing(**result["step"])
    record.peak_mib = result["peak"] / _MIB
    record.parts_mib = {name: size and size / _MIB for name, size in parts.items()}
    explained = Footprint(**parts).peak
    record.explained_mib = explained and explained / _MIB
    record.time_ms = result["time"]
    record.saved_mib = result["saved"] and {kind: size / _MIB for kind, size in result["saved"].items()}
    record.losses = result["losses"]


def line(record: Training) -> str:
    if record.step is None:
        return f"{record.model}, {record.provider}: {record.error}"
    text = f"{record.model}, {record.provider}: {suite.duration(record.step)}, {record.peak_mib:,.0f} MiB"
    return text + (f", loss curve {_verdict(record)}" if record.curve else "")


def _verdict(record: Training) -> str:
    if record.curve is None:
        return ""
    difference, bound = record.curve["difference"], record.curve["bound"]
    return f"{'FAILS' if record.differs else 'passes'}: {difference:.1e} of {bound:.1e}"


def table(records: list[Training], settings: suite.Settings) -> list[suite.Grid]:
    return [_steps(records, settings), _saved_grid(records)]


def _steps(records: list[Training], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{settings.dtype}: training steps; MiB: peak, explained (by parameters, gradients, states, saved tensors and "
        "the loss's workspace), kept (saved tensors); milliseconds of one profiled step by kind",
        ["model", "provider", "step", "tokens/s", "peak", "explained", "kept", *COLUMNS],
    )
    if settings.curves:
        grid.columns.append("loss curve")
    for r in records:
        if r.step is None:
            grid.rows.append([r.model, r.provider, f"fails: {r.error}", *[""] * (len(grid.columns) - 3)])
            continue
        memory = [
            "" if size is None else f"{size:,.0f}" for size in (r.peak_mib, r.explained_mib, r.parts_mib["saved"])
        ]
        times = [f"{r.time_ms[kind]:.1f}" if kind in r.time_ms else "" for kind in COLUMNS]
        cells = [r.model, r.provider, suite.duration(r.step), f"{r.tokens / r.step.median * 1e6:,.0f}", *memory, *times]
        grid.rows.append(cells + [_verdict(r)] * settings.curves)
    return grid


def _saved_grid(records: list[Training]) -> suite.Grid:
    grid = suite.Grid(
        "Saved tensors, MiB: the measured total, and kinds as recorded by saved-tensor hooks",
        ["model", "provider", "total", *saved.KINDS],
    )
    for r in (r for r in records if r.step):
        kinds = [f"{r.saved_mib[kind]:,.1f}" if r.saved_mib else "" for kind in saved.KINDS]
        grid.rows.append([r.model, r.provider, f"{r.parts_mib['saved']:,.1f}", *kinds])
    return grid


def draw(records: list[Training], settings: suite.Settings, folder: Path) -> list[Path]:
    done = [r for r in records if r.step]
    if not done:
        return []
    stem = f"{settings.device}_{settings.dtype}.png"
    models = list(dict.fromkeys(r.model for r in done))
    by_model = {model: [r for r in done if r.model == model] for model in models}
    picture, axes = suite.figure(2)
    names = list(dict.fromkeys(r.provider for r in done))
    for axis, label, value in (
        (axes[0], "milliseconds per step", lambda r: r.step.median / 1e3),
        (axes[1], "peak memory, GiB", lambda r: r.peak_mib / 1024),
    ):
        found = {(r.model, r.provider): value(r) for r in done}
        suite.bars(axis, models, {n: [found.get((m, n)) for m in models] for n in names}, label)
    pictures = [suite.save(picture, folder / f"train_{stem}")]

    picture, axes = suite.figure(len(models))
    for axis, (model, rows) in zip(axes, by_model.items(), strict=True):
        total = "compiled: total"
        parts = {kind: [r.saved_mib[kind] if r.saved_mib else 0.0 for r in rows] for kind in saved.KINDS}
        parts[total] = [0.0 if r.saved_mib else r.parts_mib["saved"] for r in rows]
        drawn = {kind: [size / 1024 for size in sizes] for kind, sizes in parts.items() if any(sizes)}
        suite.stacked(axis, [r.provider for r in rows], drawn, "GiB")
        axis.set_title(f"{model}: kept for the backward", fontsize=10)
    pictures.append(suite.save(picture, folder / f"train_kept_{stem}", stacks=True))

    if settings.curves:
        picture, axes = suite.figure(len(models))
        for axis, (model, rows) in zip(axes, by_model.items(), strict=True):
            for i, r in enumerate(rows):
                steps = range(1, len(r.losses) + 1)
                width = 4 if r.provider == STOCK else 1.2
                axis.plot(steps, r.losses, linewidth=width, label=r.provider, color=suite.colour(r.provider, i))
            axis.set(xlabel="step", ylabel="training loss", title=model)
        pictures.append(suite.save(picture, folder / f"train_curves_{stem}"))
    return pictures
