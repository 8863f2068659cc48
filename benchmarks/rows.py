"""Row ops: each case is a function of its inputs, given once per provider, and the bytes it must move at least.

Efficiency = time of a copy moving the same bytes / time of the op. Bytes are ideal: each input read once, each output
written once. The forward is timed with gradients recorded, the backward through autograd: the code that users call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from liger_ext._timing import Timing, backward_call, failure, forward_call, on_a_stream_of_its_own
from liger_ext.records import RECORDS, Make, Record, Size, Timed

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
    """Of every op's record: each of its ``timed`` at each size."""
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
    made = record.inputs(Make(dtype, device, torch.Generator(device).manual_seed(0), ignored=0), size)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    for name in timed.other_dtype:
        made[name] = made[name].detach().to(other).requires_grad_()
    for name in timed.frozen:
        made[name].requires_grad_(False)
    return tuple(made.values())


def run(settings: suite.Settings) -> Iterator[Row]:
    """Times every case, forward and backward; yields a row as soon as it is measured."""
    for case in cases(settings.torch_dtype, settings.device):
        if settings.wants_op(case.op):
            with on_a_stream_of_its_own(settings.device):
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
                failed[name] = failure(error)
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
    names = suite.names_of(row.times for row in rows)
    grid = suite.Grid(
        f"{settings.dtype}: time, and the time of a copy of the same number of bytes over it",
        ["op", "shape", "", "copy", *names],
    )
    for row in rows:
        cells = [_cell(row, name) for name in names]
        grid.rows.append([row.op, row.shape, row.direction, suite.duration(row.copy), *cells])
    return grid


def draw(rows: list[Row], settings: suite.Settings, folder: Path) -> list[Path]:
    """One picture an op: bandwidth over the shapes, in the order of their rows' lengths, with the copy's."""
    pictures = []
    for op in dict.fromkeys(row.op for row in rows):
        made, axes = suite.figure(2)
        for axis, direction in zip(axes, ("forward", "backward"), strict=True):
            chosen = [row for row in rows if row.op == op and row.direction == direction]
            chosen.sort(key=lambda row: (_row_length(row.shape), row.moved_bytes))
            rate = lambda row, timing: row.moved_bytes / timing.median / 1e3  # noqa: E731
            shapes = range(len(chosen))
            axis.plot(shapes, [rate(r, r.copy) for r in chosen], "k--", linewidth=1, label="copy")
            for i, name in enumerate(suite.names_of(row.times for row in chosen)):
                timed = [(x, r.times[name]) for x, r in zip(shapes, chosen, strict=True)]
                points = [(x, rate(chosen[x], t)) for x, t in timed if isinstance(t, Timing)]
                axis.plot(*zip(*points, strict=True), "o-", label=name, color=suite.colour(name, i))
            axis.set_xticks(shapes, [row.shape for row in chosen], rotation=30, ha="right", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.set_ylabel("GB/s of ideal bytes")
            axis.set_title(f"{op}, {direction}, {settings.dtype}")
            axis.legend(fontsize=8)
        name = op.replace(",", "").replace(" ", "_")
        pictures.append(suite.save(made, folder / f"rows_{settings.device}_{settings.dtype}_{name}.png"))
    return pictures


def _row_length(shape: str) -> int:
    return int("".join(c if c.isdigit() else " " for c in shape).split()[-1])
