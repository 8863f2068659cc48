"""Shared by suites of training steps: a record of one provider's steps, and its measurement (`step_one.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from liger_ext._timing import Timing

from . import suite
from .children import ask_each
from .models import COMPILED
from .train import chosen_providers


@dataclass
class Steps:
    model: str
    provider: str
    tokens: int
    step: Timing | None = None
    peak_mib: float | None = None
    loss: float | None = None  # of the last step
    error: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.provider}"

    @property
    def line(self) -> str:
        if self.step is None:
            return f"{self.name}: {self.error}"
        return f"{self.name}: {suite.duration(self.step)}, {self.peak_mib:,.0f} MiB, loss {self.loss:.4f}"

    def shares(self, base: Steps | None) -> tuple[str, str]:
        """The time and the memory divided by those of ``base``, for a table; empty without ``base``."""
        if base is None:
            return "", ""
        return f"{self.step.median / base.step.median:.3f}", f"{self.peak_mib / base.peak_mib:.3f}"


Record = TypeVar("Record", bound=Steps)


def eager_providers(settings: suite.Settings) -> list[str]:
    """The requested providers; by default all without a compiler."""
    chosen = chosen_providers(settings)
    return chosen if settings.providers else [provider for provider in chosen if COMPILED not in provider]


def measured(
    settings: suite.Settings, models: dict[str, tuple[dict, int, int]], cases: Iterable[tuple[Record, dict]]
) -> Iterator[Record]:
    """Yields the records of `cases` with measurements or the error; each comes with options of `step_one.measure`."""
    cases, requests = list(cases), []
    for record, options in cases:
        config, batch, seq = models[record.model]
        request = dict(
            task="step", config=config, batch=batch, seq=seq, provider=record.provider, device=settings.device,
            dtype=settings.dtype, **options,
        )  # fmt: skip
        requests.append((record.name, request))
    for (record, _), answer in zip(cases, ask_each(requests, settings.device == "cuda"), strict=True):
        record.error = answer.get("error", "")
        if "result" in answer:
            result = answer["result"]
            record.step, record.peak_mib = Timing(**result["step"]), result["peak"] / 2**20
            record.loss = result["loss"]
        yield record
