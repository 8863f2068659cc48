"""What all suites share: the settings of a run, a table that prints and stands in a README, a plot's looks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import torch
from rich.table import Table

from liger_ext._timing import Timing

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Settings:
    device: str
    dtype: str
    providers: tuple[str, ...] = ()  # empty: all that can be imported
    ops: tuple[str, ...] = ()  # empty: all
    models: tuple[str, ...] = ()  # how names begin; empty: all
    curves: bool = False  # of fifty steps, compared
    limit_gib: float | None = None  # of the search for the longest context

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def wants(self, provider: str) -> bool:
        return not self.providers or provider in self.providers

    def wants_op(self, op: str) -> bool:
        return not self.ops or op in self.ops

    def wants_model(self, model: str) -> bool:
        return not self.models or any(model.lower().startswith(name.lower()) for name in self.models)


@dataclass
class Grid:
    """A table: for the terminal, and as Markdown for a README."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"{self.title}\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def duration(timing: Timing | str) -> str:
    if isinstance(timing, str):
        return "fails"
    return f"{timing.median / 1e3:.2f} ms" if timing.median >= 1e3 else f"{timing.median:.1f} us"


def names_of(records: Iterable[dict[str, object]]) -> list[str]:
    """Providers in the order in which they first appear."""
    return list(dict.fromkeys(name for record in records for name in record))


# Ours stands out; the limit is grey.
_COLOURS = {
    "liger_ext": "#d62728",
    "torch": "#7f7f7f",
    "torch.compile": "#1f77b4",
    "liger": "#2ca02c",
    "quack": "#9467bd",
    "Hugging Face": "#7f7f7f",
    "liger_ext + torch.compile": "#ff9896",
}


_OTHERS = ("#ff7f0e", "#17becf", "#bcbd22", "#e377c2", "#8c564b")


def colour(provider: str, index: int) -> str:
    return _COLOURS.get(provider, _OTHERS[index % len(_OTHERS)])


def figure(columns: int, width: float = 7.0, height: float = 4.2):
    made, axes = plt.subplots(1, columns, figsize=(width * columns, height), squeeze=False, layout="constrained")
    return made, list(axes[0])


def save(made, path: Path) -> Path:
    made.savefig(path, dpi=110)
    plt.close(made)
    return path


def bars(axis, groups: list[str], values: dict[str, list[float | None]], label: str) -> None:
    """Grouped bars, one group a shape, one bar a provider; with the values above them."""
    width = 0.8 / max(1, len(values))
    for i, (name, heights) in enumerate(values.items()):
        places = [g + (i - (len(values) - 1) / 2) * width for g in range(len(groups))]
        drawn = axis.bar(places, [h or 0 for h in heights], width, label=name, color=colour(name, i))
        axis.bar_label(drawn, ["" if h is None else f"{h:.3g}" for h in heights], fontsize=7, rotation=90, padding=2)
    axis.set_xticks(range(len(groups)), groups)
    axis.set_ylabel(label)
    axis.margins(y=0.2)
    axis.legend(fontsize=8)


def stacked(axis, bars: list[str], parts: dict[str, list[float]], label: str) -> None:
    """One bar each, made of parts from the bottom to the top; with their sum above them."""
    reached = [0.0] * len(bars)
    shades = plt.get_cmap("tab20")
    for i, (name, heights) in enumerate(parts.items()):
        axis.bar(bars, heights, 0.65, bottom=reached, label=name, color=shades(i))
        reached = [a + b for a, b in zip(reached, heights, strict=True)]
    for place, height in enumerate(reached):
        axis.text(place, height, f"{height:,.3g}", ha="center", va="bottom", fontsize=8)
    axis.set_ylabel(label)
    axis.set_ylim(0, max(reached) * 1.08)  # margins are none where a bar ends in parts of no height
    axis.tick_params(axis="x", labelsize=8, rotation=15)
