"""The demo's report: whether the curves agree, the table, the picture, and the numbers as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .models import Plan
from .training import PATCHED, UNPATCHED, Run

Memory = dict[str, dict[str, int] | None]
COLOURS = {UNPATCHED: "#9aa5b1", PATCHED: "#1f77b4"}


@dataclass
class Agreement:
    difference: float  # the largest, between the two losses of a step
    step: int  # its step, from 1
    bound: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound  # False for NaN


def agreement(plain: list[float], patched: list[float], dtype: torch.dtype) -> Agreement:
    """Rounding differs between two correct implementations, and training amplifies it: the bound limits the result.

    Unpatched runs were compared with unpatched runs whose weights differ by roundings (docs/decisions.md, "When two
    loss curves agree"); the bound is several times the largest difference in these runs.
    """
    pairs = list(zip(plain, patched, strict=True))
    differences = [abs(a - b) for a, b in pairs]
    step = max(range(len(pairs)), key=lambda i: differences[i] if differences[i] == differences[i] else float("inf"))
    base, growth = (5e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-4)
    return Agreement(differences[step], step + 1, base + growth * len(pairs))


def _mib(memory: Memory, name: str, part: str) -> float | None:
    measured = memory[name]
    return None if measured is None else measured[part] / 2**20


def rows(runs: list[Run], memory: Memory, plan: Plan) -> list[tuple[str, str, float | None, float | None]]:
    """Rows of the table: name, format, unpatched value, patched value."""
    plain, patched = runs
    return [
        ("time of a step, median, ms", ",.1f", plain.median_seconds() * 1e3, patched.median_seconds() * 1e3),
        ("tokens per second", ",.0f", plan.tokens / plain.median_seconds(), plan.tokens / patched.median_seconds()),
        ("peak memory of the loss, MiB", ",.0f", _mib(memory, UNPATCHED, "loss"), _mib(memory, PATCHED, "loss")),
        ("peak memory of a step, MiB", ",.0f", _mib(memory, UNPATCHED, "step"), _mib(memory, PATCHED, "step")),
        ("loss, first step", ".4f", plain.losses[0], patched.losses[0]),
        ("loss, last step", ".4f", plain.losses[-1], patched.losses[-1]),
    ]


def print_table(console: Console, title: str, runs: list[Run], memory: Memory, plan: Plan, agreed: Agreement) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in (UNPATCHED, PATCHED, "change"):
        table.add_column(heading, justify="right")
    for what, form, plain, patched in rows(runs, memory, plan):
        if plain is None or patched is None:
            table.add_row(what, "not measured", "not measured", "")
            continue
        change = f"{(patched / plain - 1) * 100:+.1f} %" if not what.startswith("loss") else ""
        table.add_row(what, format(plain, form), format(patched, form), change)
    console.print(table)
    console.print(
        f"largest difference between the two loss curves: {agreed.difference:.2e} at step {agreed.step} "
        f"(may be up to {agreed.bound:.1e} in this dtype after {plan.steps} steps)"
    )


def save_numbers(path: Path, title: str, runs: list[Run], memory: Memory, plan: Plan, agreed: Agreement) -> None:
    document = {
        "title": title,
        "plan": {key: value if isinstance(value, int | float) else str(value) for key, value in vars(plan).items()},
        "table": {what: {UNPATCHED: plain, PATCHED: patched} for what, _, plain, patched in rows(runs, memory, plan)},
        "agreement": vars(agreed) | {"holds": agreed.holds},
        "losses": {run.name: run.losses for run in runs},
        "seconds": {run.name: run.seconds for run in runs},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def draw(path: Path, title: str, runs: list[Run], memory: Memory, plan: Plan) -> None:
    """Both loss curves, and bars of step time and memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [("step time, ms", 0), ("loss memory, MiB", 2), ("step memory, MiB", 3)]
    values = rows(runs, memory, plan)
    bars = [(label, index) for label, index in bars if values[index][2] is not None]
    size, ratios = (6 + 2.3 * len(bars), 4.2), [3] + [1] * len(bars)
    figure, axes = plt.subplots(1, len(ratios), figsize=size, width_ratios=ratios, layout="constrained", squeeze=False)
    axes = axes[0]
    figure.suptitle(title, fontsize=11)
    steps = range(1, plan.steps + 1)
    axes[0].plot(steps, runs[0].losses, color=COLOURS[UNPATCHED], linewidth=4, label=UNPATCHED)
    axes[0].plot(steps, runs[1].losses, color=COLOURS[PATCHED], linewidth=1.5, label=PATCHED)
    axes[0].set(xlabel="step", ylabel="training loss")
    axes[0].xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False)
    for axis, (label, index) in zip(axes[1:], bars, strict=True):
        _, form, plain, patched = values[index]
        drawn = axis.bar(list(COLOURS), [plain, patched], color=list(COLOURS.values()), width=0.7)
        axis.bar_label(drawn, labels=[format(value, form) for value in (plain, patched)], padding=2, fontsize=9)
        axis.set_title(label, fontsize=10)
        axis.set_ylim(0, 1.15 * max(plain, patched))
        axis.set_yticks([])
        axis.spines["left"].set_visible(False)
        axis.tick_params(axis="x", labelsize=8, rotation=20)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
