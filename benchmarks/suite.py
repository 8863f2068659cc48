"""Shared by all suites: the settings of a run, tables for the terminal and for Markdown, and the style of plots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    models: tuple[str, ...] = ()  # prefixes of names; empty: all
    curves: bool = False  # compare losses of fifty steps
    limit_gib: float | None = None  # for the search for the longest context

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
    """A table for the terminal and for Markdown."""

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


def provider_names(records: Iterable[dict[str, object]]) -> list[str]:
    """Providers in the order in which they first appear."""
    return list(dict.fromkeys(name for record in records for name in record))


COPY = "copy of the same bytes"

# Ours are red, the limit is black, unfused code is grey.
_COLOURS = {
    COPY: "#000000",
    "liger_ext": "#d62728",
    "liger_ext, fast": "#8c1d1e",
    "liger_ext, low": "#ff7f7f",
    "liger_ext, min": "#ffb3b3",
    "liger_ext + torch.compile": "#ff9896",
    "torch": "#7f7f7f",
    "Hugging Face": "#7f7f7f",
    "torch.compile": "#1f77b4",
    "F.rms_norm": "#17becf",
    "liger": "#2ca02c",
    "liger, fp32 sum": "#98df8a",
    "quack": "#9467bd",
    "cce": "#ff7f0e",
    "liger, without CuTe": "#2ca02c",
    "liger, GRPO": "#98df8a",
    "full logits, torch.compile": "#1f77b4",
    "TRL": "#7f7f7f",
    "verl": "#9467bd",
    "verl, Triton": "#ff7f0e",
    "liger_ext.trl.install()": "#d62728",
    "install() and patched model": "#8c1d1e",
}
_OTHERS = ("#bcbd22", "#e377c2", "#8c564b", "#c49c94")


def colour(provider: str, index: int) -> str:
    return _COLOURS.get(provider, _OTHERS[index % len(_OTHERS)])


def figure(columns: int, width: float = 7.0, height: float = 4.2, rows: int = 1):
    """A figure, and its axes row by row."""
    size = width * columns, height * rows
    picture, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return picture, list(axes.flat)


def side_by_side(records: list, draw: Callable[[Any, Any], None], path: Path) -> list[Path]:
    """Saves a picture with one panel per record, which draw(axis, record) fills; saves none without records."""
    if not records:
        return []
    picture, axes = figure(len(records), width=5, height=3.8)
    for axis, record in zip(axes, records, strict=True):
        draw(axis, record)
    return [save(picture, path)]


def save(picture, path: Path, stacks: bool = False) -> Path:
    """Writes the picture with one legend for all axes on the right; for stacks its order is reversed."""
    handles = {}
    for axis in picture.axes:
        handles |= {name: handle for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        picture.legend(handles.values(), handles, loc="outside right upper", fontsize=8, reverse=stacks)
    picture.savefig(path, dpi=110)
    plt.close(picture)
    return path


def bars(axis, groups: list[str], values: dict[str, list[float | None]], label: str) -> None:
    """Grouped bars: one group per shape, one bar per provider, with values above."""
    width = 0.8 / max(1, len(values))
    for i, (name, heights) in enumerate(values.items()):
        places = [g + (i - (len(values) - 1) / 2) * width for g in range(len(groups))]
        drawn = axis.bar(places, [h or 0 for h in heights], width, label=name, color=colour(name, i))
        axis.bar_label(drawn, ["" if h is None else f"{h:.3g}" for h in heights], fontsize=7, rotation=90, padding=2)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel(label)
    axis.margins(y=0.2)


def stacked(axis, bars: list[str], parts: dict[str, list[float]], label: str) -> None:
    """Stacked bars, whose parts go from bottom to top, with sums above."""
    reached = [0.0] * len(bars)
    shades = plt.get_cmap("tab20")
    for i, (name, heights) in enumerate(parts.items()):
        axis.bar(bars, heights, 0.65, bottom=reached, label=name, color=shades(i))
        reached = [a + b for a, b in zip(reached, heights, strict=True)]
    for place, height in enumerate(reached):
        axis.text(place, height, f"{height:,.3g}", ha="center", va="bottom", fontsize=8)
    axis.set_ylabel(label)
    axis.set_ylim(0, max(reached) * 1.08)  # a bar that ends in parts of height 0 has no margin
    axis.tick_params(axis="x", labelsize=8, rotation=15)
