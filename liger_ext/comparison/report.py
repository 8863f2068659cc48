"""The report of a comparison: progress, tables, whether the loss curves agree, a picture and numbers as JSON.

A terminal shows bars and tables of rich, if it is installed. The picture needs matplotlib.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from liger_ext import inspection

from .sides import OURS, STOCK, Side

Row = tuple[str, str, float | None, float | None]  # name, format, value of stock, value of ours


def agreement(stock: list[float], ours: list[float], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the largest difference of the losses of a step, its step (from 1), its bound and whether the bound holds.

    Rounding differs between two correct implementations, and training amplifies it. Unpatched runs were compared with
    unpatched runs whose weights differ by roundings (docs/decisions.md, "When two loss curves agree"); the bound is
    several times the largest difference in these runs.
    """
    differences = [math.inf if math.isnan(a - b) else abs(a - b) for a, b in zip(stock, ours, strict=True)]
    base, growth = (5e-5, 1e-5) if dtype == torch.float32 else (2e-2, 5e-4)
    worst, bound = max(differences), base + growth * len(differences)
    return {"difference": worst, "step": differences.index(worst) + 1, "bound": bound, "holds": worst <= bound}


@contextmanager
def progress(lines: bool) -> Iterator[Callable[[Side], None]]:
    """Yields a function that shows the steps of a side: on a terminal with rich by bars, otherwise, with ``lines``,
    by a line at the start and after about every fifth of the steps, or else by one text while they run."""
    bars, tasks = None, {}
    if sys.stderr.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        bars = Progress(*columns, console=Console(stderr=True), transient=True)

    def show(side: Side) -> None:
        done, steps = len(side.losses), side.request["steps"]
        text = f"{side.name:12}  " + (f"loss {side.losses[-1]:.4f}" if done else "building the model")
        if bars:
            if side.name not in tasks:
                tasks[side.name] = bars.add_task("", total=steps)
            bars.update(tasks[side.name], completed=done, description=text)
        elif lines and (done % math.ceil(steps / 5) == 0 or done == steps):
            print(f"{text}  step {done} of {steps}" if done else text, flush=True)

    with bars or (nullcontext() if lines else inspection.progress("training without and with liger_ext")):
        yield show


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


def print_tables(facts: dict[str, Any]) -> None:
    for depth, sides in facts["measured"].items():
        agreed = facts["agreement"][depth]
        _print_table(heading(facts, depth), rows(facts["request"], sides))
        if any(side["time"]["high"] > 1.2 * side["time"]["low"] for side in sides.values()):
            print("The times differ by more than 20 %: other work on this machine disturbs them.")
        bound = f"(may be up to {agreed['bound']:.1e} in this dtype after {facts['request']['steps']} steps)"
        print(f"largest difference of the losses: {agreed['difference']:.2e} at step {agreed['step']} {bound}")
    if "extrapolated" in facts:
        stock, ours = facts["extrapolated"][STOCK], facts["extrapolated"][OURS]
        times = "time of a step, ms", ",.1f", stock["median"] / 1e3, ours["median"] / 1e3
        peaks = "peak memory of a step, MiB", ",.1f", _mib(stock["peak_bytes"]), _mib(ours["peak_bytes"])
        _print_table(f"all {facts['layers']} layers, extrapolated", [times, peaks])


def _print_table(title: str, lines: list[Row]) -> None:
    body = [("", STOCK, OURS, "change")]
    for name, form, *values in lines:
        has_change = all(values) and not name.startswith((" ", "loss"))
        change = f"{(values[1] / values[0] - 1) * 100:+.1f} %" if has_change else ""
        body.append((name, *("not measured" if value is None else format(value, form) for value in values), change))
    print(title)
    if sys.stdout.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.table import Column, Table

        table = Table("", *(Column(name, justify="right") for name in body.pop(0)[1:]))
        for line in body:
            table.add_row(*line)
        Console().print(table)
    else:
        for name, stock, ours, change in body:
            print(f"  {name:36}{stock:>16}{ours:>16}{change:>10}".rstrip())


# Files, and the end ---------------------------------------------------------------------------------------------------


def conclude(facts: dict[str, Any], stem: str, folder: Path | None, as_json: bool, any_model: bool) -> int:
    """Prints the tables, or JSON; writes picture and numbers to a folder; returns the exit status: 1 if the loss
    curves do not agree. ``any_model``: only in fp32, because in bf16 rounding may change the experts of a token."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        if not as_json:
            print_tables(facts)
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            numbers, picture = folder / f"{stem}.json", folder / f"{stem}.png"
            numbers.write_text(json.dumps(facts, indent=1) + "\n")
            drawn = draw(picture, facts) if find_spec("matplotlib") else "install matplotlib to draw one"
            print(f"numbers: {numbers}   picture: {drawn}")
        advice, status = "Please report this, with the table and its heading.", 1
        if any_model and facts["request"]["dtype"] != "fp32":
            advice, status = "With experts in bf16 it may be more: --dtype fp32 decides.", 0
        wrong = [agreed for agreed in facts["agreement"].values() if not agreed["holds"]]
        for agreed in wrong:
            differ = f"at step {agreed['step']} they differ by {agreed['difference']:.3g}"
            print(f"The loss curves do not agree: {differ}; rounding explains at most {agreed['bound']:.3g}. {advice}")
        if not wrong:
            print("The loss curves agree.")
    if as_json:
        print(json.dumps(facts))
    return status if wrong else 0


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
        axis.margins(y=0.15)
        axis.tick_params(axis="x", labelsize=8, rotation=20)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
