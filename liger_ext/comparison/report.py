"""The report of a comparison: progress, tables, whether the loss curves agree, a picture and numbers as JSON.

A terminal shows bars and tables of rich, if it is installed. The picture needs matplotlib.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .sides import OURS, STOCK, Side

Row = tuple[str, str, float | None, float | None]  # name, format, value of stock, value of ours


@dataclass
class Agreement:
    difference: float  # the largest, between the two losses of a step
    step: int  # its step, from 1
    bound: float

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound  # False for NaN


def agreement(stock: list[float], ours: list[float], dtype: torch.dtype) -> Agreement:
    """Rounding differs between two correct implementations, and training amplifies it: the bound limits the result.

    Unpatched runs were compared with unpatched runs whose weights differ by roundings (docs/decisions.md, "When two
    loss curves agree"); the bound is several times the largest difference in these runs.
    """
    differences = [abs(a - b) for a, b in zip(stock, ours, strict=True)]
    step = max(range(len(differences)), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
    base, growth = (5e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-4)
    return Agreement(differences[step], step + 1, base + growth * len(differences))


@contextmanager
def progress(lines: bool) -> Iterator[Callable[[Side], None]]:
    """Yields a function that shows the steps of a side: on a terminal with rich by bars, otherwise, with ``lines``,
    by a line at the start and after about every fifth of the steps."""

    def text(side: Side) -> str:
        return f"{side.name:12}  " + (f"loss {side.losses[-1]:.4f}" if side.losses else "building the model")

    def show_line(side: Side) -> None:
        done, steps = len(side.losses), side.request["steps"]
        if lines and (done % math.ceil(steps / 5) == 0 or done == steps):
            print(f"{text(side)}  step {done} of {steps}" if done else text(side), flush=True)

    if not (sys.stderr.isatty() and find_spec("rich")):
        yield show_line
        return
    from rich import progress
    from rich.console import Console

    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show_bar(side: Side) -> None:
            if side.name not in tasks:
                tasks[side.name] = bars.add_task("", total=side.request["steps"])
            bars.update(tasks[side.name], completed=len(side.losses), description=text(side))

        yield show_bar


# Tables ---------------------------------------------------------------------------------------------------------------


def rows(request: dict[str, Any], sides: dict[str, Any]) -> list[Row]:
    def row(name: str, form: str, value: Callable[[dict], float | None]) -> Row:
        return name, form, value(sides[STOCK]), value(sides[OURS])

    tokens, loss = request["batch"] * request["seq"], request["loss"]
    return [
        row("time of a step, median, ms", ",.1f", lambda side: side["time"]["median"] / 1e3),
        row("    first quartile", ",.1f", lambda side: side["time"]["low"] / 1e3),
        row("    third quartile", ",.1f", lambda side: side["time"]["high"] / 1e3),
        row("tokens per second", ",.0f", lambda side: tokens / side["time"]["median"] * 1e6),
        *([row("peak memory of the loss, MiB", ",.1f", lambda side: _mib(side["loss_bytes"]))] if loss else []),
        row("peak memory of a step, MiB", ",.1f", lambda side: _mib(side["peak_bytes"])),
        row("loss, first step", ".4f", lambda side: side["losses"][0]),
        row("loss, last step", ".4f", lambda side: side["losses"][-1]),
    ]


def _mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


def heading(facts: dict[str, Any], depth: int) -> str:
    request, every = facts["request"], facts["layers"]
    cut = facts["until"] if depth < every else None
    cut = f" (so that this ends in about {cut} s; --layers {every} trains all)" if cut else ""
    sizes = f"{request['steps']} steps of {request['batch']} x {request['seq']} tokens"
    sizes += f", LoRA of rank {request['lora']}" if request["lora"] else ""
    where = f"{request['dtype']}, memory={request['level']!r}, {request['device_name']}, {facts['versions']}"
    return f"{facts['name']}, {depth} of {every} layers{cut}, {sizes}\n{where}"


def tables(facts: dict[str, Any]) -> Iterator[tuple[str, list[Row], str]]:
    """Yields the heading, the rows and the notes of each table."""
    for depth, sides in facts["measured"].items():
        agreed, notes = facts["agreement"][depth], ""
        if any(side["time"]["high"] > 1.2 * side["time"]["low"] for side in sides.values()):
            notes = "The times differ by more than 20 %: other work on this machine disturbs them.\n"
        notes += f"largest difference of the losses: {agreed['difference']:.2e} at step {agreed['step']} "
        notes += f"(may be up to {agreed['bound']:.1e} in this dtype after {facts['request']['steps']} steps)\n"
        yield heading(facts, depth), rows(facts["request"], sides), notes
    if "extrapolated" in facts:
        (times, peaks) = ([facts["extrapolated"][s][n] for s in (STOCK, OURS)] for n in ("median", "peak_bytes"))
        out: list[Row] = [("time of a step, ms", ",.1f", *(time / 1e3 for time in times))]
        out.append(("peak memory of a step, MiB", ",.1f", *map(_mib, peaks)))
        yield f"all {facts['layers']} layers, extrapolated", out, ""


def cells(name: str, form: str, stock: float | None, ours: float | None) -> tuple[str, str, str, str]:
    if stock is None or ours is None:
        return name, "not measured", "not measured", ""
    change = "" if name.startswith((" ", "loss")) else f"{(ours / stock - 1) * 100:+.1f} %"
    return name, format(stock, form), format(ours, form), change


def print_tables(facts: dict[str, Any]) -> None:
    with_rich = sys.stdout.isatty() and find_spec("rich")
    for title, lines, notes in tables(facts):
        head, body = ("", STOCK, OURS, "change"), [cells(*line) for line in lines]
        print(title)
        if with_rich:
            from rich.console import Console
            from rich.table import Table

            table = Table(*head)
            for column in table.columns[1:]:
                column.justify = "right"
            for line in body:
                table.add_row(*line)
            Console().print(table)
        else:
            for name, stock, ours, change in (head, *body):
                print(f"  {name:36}{stock:>16}{ours:>16}{change:>10}".rstrip())
        print(notes, end="")


# Files, and the end ---------------------------------------------------------------------------------------------------


def conclude(
    facts: dict[str, Any], stem: str, folder: Path | None, as_json: bool = False, any_model: bool = True
) -> int:
    """Prints the tables, or JSON; writes picture and numbers to a folder; returns the exit status: 1 if the loss
    curves do not agree.

    ``any_model``: in bf16 the bound may be too low, because rounding changes the experts of a token; the status is 0.
    """
    verdicts = sys.stderr if as_json else sys.stdout
    if as_json:
        print(json.dumps(facts))
    else:
        print_tables(facts)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        numbers, picture = folder / f"{stem}.json", folder / f"{stem}.png"
        numbers.write_text(json.dumps(facts, indent=1) + "\n")
        missing = "install matplotlib to draw one"
        print(
            f"numbers: {numbers}   picture: {draw(picture, facts) if find_spec('matplotlib') else missing}",
            file=verdicts,
        )
    wrong = [agreed for agreed in facts["agreement"].values() if not agreed["holds"]]
    undecided = any_model and facts["request"]["dtype"] != "fp32"
    advice = "Please report this, with the table and its heading."
    if undecided:
        advice = "With experts in bf16 it may be more: --dtype fp32 decides."
    for agreed in wrong:
        differ = f"at step {agreed['step']} they differ by {agreed['difference']:.3g}"
        explained = f"rounding explains at most {agreed['bound']:.3g}"
        print(f"The loss curves do not agree: {differ}, and {explained}. {advice}", file=verdicts)
    if not wrong:
        print("The loss curves agree.", file=verdicts)
    return 1 if wrong and not undecided else 0


def draw(path: Path, facts: dict[str, Any]) -> Path:
    """Draws both loss curves, and bars of step time and memory, of the largest number of layers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    depth, sides = list(facts["measured"].items())[-1]
    bars = [row for row in rows(facts["request"], sides) if row[0].startswith(("time", "peak")) and None not in row]
    size, ratios = (6 + 2.3 * len(bars), 4.2), [3] + [1] * len(bars)
    figure, (curves, *axes) = plt.subplots(1, len(ratios), figsize=size, width_ratios=ratios, layout="constrained")
    figure.suptitle(heading(facts, depth), fontsize=10)
    colours = {STOCK: "#9aa5b1", OURS: "#1f77b4"}
    for name, width in ((STOCK, 4), (OURS, 1.5)):
        losses = sides[name]["losses"]
        curves.plot(range(1, len(losses) + 1), losses, color=colours[name], linewidth=width, label=name)
    curves.set(xlabel="step", ylabel="training loss")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.legend(frameon=False)
    for axis, (label, form, *values) in zip(axes, bars, strict=True):
        drawn = axis.bar(list(colours), values, color=list(colours.values()), width=0.7)
        axis.bar_label(drawn, labels=[format(value, form) for value in values], padding=2, fontsize=9)
        axis.set(title=label.replace(", median", "").replace("memory of", "memory\nof"), yticks=[])
        axis.title.set_fontsize(9)
        axis.set_ylim(0, 1.15 * max(values))
        axis.tick_params(axis="x", labelsize=8, rotation=20)
    for axis in (curves, *axes):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
