"""Times row ops, which process the rows of their inputs independently (norms, activations, softmax, ...). A case has,
for every provider, a function of the same inputs, and the least number of bytes that an implementation must move.

Efficiency = time of a copy moving the same bytes / time of the op; 1 is the limit of the memory. Each input counts as
read once, each output as written once. The forward is timed with autograd recording it, the backward through autograd:
the code that users call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from liger_ext._timing import Timing, backward_call, failure_text, forward_call, side_stream
from liger_ext.records import RECORDS, InputFactory, Record, Size, Timed, other_dtype

from . import suite
from .ops import functions
from .timing import copy_calls, time_calls


@dataclass
class Case:
    op: str
    shape: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    functions: dict[str, Callable]  # provider -> function of the inputs
    forward_bytes: int
    backward_bytes: int


@dataclass
class Row:
    op: str
    shape: str
    dtype: str
    direction: str
    moved_bytes: int
    copy: Timing
    times: dict[str, Timing | str]


def cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Cases from every op's record: each of its ``timed`` at each size."""
    for record in RECORDS.values():
        for timed in record.timed:
            for size in timed.small if device == "cpu" else timed.sizes:
                label = f"{record.name}, {timed.label}" if timed.label else record.name
                moved = record.moved(size, dtype.itemsize)
                make = partial(_inputs, record, timed, size, dtype, device)
                named = functions(record.name, timed.options, timed.peers)
                named["torch.compile"] = torch.compile(named["torch"], dynamic=False)
                yield Case(label, str(size), make, named, *moved)


def _inputs(record: Record, timed: Timed, size: Size, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    arguments = record.inputs(InputFactory(dtype, device, torch.Generator(device).manual_seed(0), ignored=0), size)
    for name in timed.other_dtype:
        arguments[name] = arguments[name].detach().to(other_dtype(dtype)).requires_grad_()
    for name in timed.frozen:
        arguments[name].requires_grad_(False)
    return tuple(arguments.values())


def run(settings: suite.Settings) -> Iterator[Row]:
    """Times every requested case, forward and backward; yields each row once it is measured."""
    for case in cases(settings.torch_dtype, settings.device):
        if settings.wants_op(case.op):
            with side_stream(settings.device):
                yield from _run_case(case, settings)


def _run_case(case: Case, settings: suite.Settings) -> Iterator[Row]:
    functions = {name: f for name, f in case.functions.items() if settings.wants(name)}
    inputs = case.inputs()
    for direction, bind, moved in (
        ("forward", forward_call, case.forward_bytes),
        ("backward", backward_call, case.backward_bytes),
    ):
        calls, failed = {}, {}
        for name, function in functions.items():
            try:
                calls[name] = bind(function, inputs)
            except Exception as error:  # a peer that cannot run this case
                failed[name] = failure_text(error)
        # A read-only op's limit is still the copy's rate: the same bytes over the same time.
        copies = copy_calls(moved, settings.device)
        times = time_calls(copies | calls, settings.device)
        copy = min((times.pop(name) for name in copies), key=lambda timing: timing.median)
        yield Row(case.op, case.shape, settings.dtype, direction, moved, copy, times | failed)


def line(row: Row) -> str:
    return f"{row.op} {row.shape} {row.direction}: {_cell(row, 'liger_ext')}"


def _cell(row: Row, provider: str) -> str:
    timing = row.times.get(provider, "")
    if not timing:
        return ""
    return suite.duration(timing) + (f" ({row.copy.median / timing.median:.2f})" if isinstance(timing, Timing) else "")


def table(rows: list[Row], settings: suite.Settings) -> suite.Grid:
    names = suite.provider_names(row.times for row in rows)
    grid = suite.Grid(
        f"{settings.dtype}: time, and time of a copy of as many bytes divided by it",
        ["op", "shape", "", "copy", *names],
    )
    for row in rows:
        cells = [_cell(row, name) for name in names]
        grid.rows.append([row.op, row.shape, row.direction, suite.duration(row.copy), *cells])
    return grid


def draw(rows: list[Row], settings: suite.Settings, folder: Path) -> list[Path]:
    """One picture per op. It plots the share of the copy's speed, for calls that fill the device: over the row length,
    with a panel for each direction, or as bars if all rows are equally long. A last panel has the microseconds of the
    other calls."""
    fastest = max(_copy_rate(row) for row in rows)
    pictures = []
    for op in dict.fromkeys(row.op for row in rows):
        op_rows = [row for row in rows if row.op == op]
        names = suite.provider_names(row.times for row in op_rows)
        large = [row for row in op_rows if _copy_rate(row) >= FILLS * fastest]
        small = [row for row in op_rows if _copy_rate(row) < FILLS * fastest]
        panels = []
        if len({_row_length(row.shape) for row in large}) > 1:
            directions = dict.fromkeys(row.direction for row in large)
            panels = [(_over_length, [row for row in large if row.direction == d], d) for d in directions]
        elif large:
            panels = [(_shares, large, "")]
        if small:
            panels.append((_microseconds, small, "calls too small to fill the device"))
        picture, axes = suite.figure(len(panels), width=5.6 if len(panels) > 1 else 7)
        for axis, (drawn, chosen, title) in zip(axes, panels, strict=True):
            drawn(axis, chosen, names)
            axis.set_title(", ".join(filter(None, (op, settings.dtype, title))), fontsize=10)
        name = op.replace(",", "").replace(" ", "_")
        pictures.append(suite.save(picture, folder / f"rows_{settings.device}_{settings.dtype}_{name}.png"))
    return pictures


FILLS = 0.5  # a call fills the device if a copy of its bytes has this share of the fastest copy's speed


def _copy_rate(row: Row) -> float:
    return row.moved_bytes / row.copy.median


def _share(row: Row, provider: str) -> float | None:
    timing = row.times.get(provider)
    return row.copy.median / timing.median if isinstance(timing, Timing) else None


def _over_length(axis, rows: list[Row], names: list[str]) -> None:
    """A line joins the largest call of each row length; hollow marks show the others."""
    lengths = sorted({_row_length(row.shape) for row in rows})
    largest = {length: max(r.moved_bytes for r in rows if _row_length(r.shape) == length) for length in lengths}
    axis.axhline(1, color=suite.colour(suite.COPY, 0), linestyle="--", linewidth=1, label=suite.COPY)
    for i, name in enumerate(names):
        joined, others = [], []
        for row in sorted(rows, key=lambda row: _row_length(row.shape)):
            length, share = _row_length(row.shape), _share(row, name)
            if share is not None:
                (joined if row.moved_bytes == largest[length] else others).append((lengths.index(length), share))
        looks = {"color": suite.colour(name, i), "markersize": 5, "zorder": 3 if name == "liger_ext" else 2}
        axis.plot(*zip(*joined, strict=True), "o-", label=name, **looks)
        if others:
            axis.plot(*zip(*others, strict=True), "o", fillstyle="none", **looks)
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=30, ha="right", fontsize=8)
    axis.set_xlim(-0.5, len(lengths) - 0.5)
    axis.set_ylim(0, 1.15)
    hollow = "; hollow: fewer rows" * (len(lengths) < len({row.shape for row in rows}))
    what = "size of a head" if "D" in rows[0].shape else "length of a row"
    axis.set(xlabel=what + hollow, ylabel="share of the copy's speed")


def _shares(axis, rows: list[Row], names: list[str]) -> None:
    axis.axhline(1, color=suite.colour(suite.COPY, 0), linestyle="--", linewidth=1, label=suite.COPY)
    values = {name: [_share(row, name) for row in rows] for name in names}
    suite.bars(axis, [f"{row.shape}\n{row.direction}" for row in rows], values, "share of the copy's speed")


def _microseconds(axis, rows: list[Row], names: list[str]) -> None:
    times = {suite.COPY: [row.copy.median for row in rows]}
    for name in names:
        timings = [row.times.get(name) for row in rows]
        times[name] = [timing.median if isinstance(timing, Timing) else None for timing in timings]
    suite.bars(axis, [f"{row.shape}\n{row.direction}" for row in rows], times, "microseconds")


def _row_length(shape: str) -> int:
    return int("".join(c if c.isdigit() else " " for c in shape).split()[-1])
