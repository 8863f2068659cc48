"""Measures the peak memory of the loss: of the head, cross entropy and their gradients, in addition to the weights and
hidden states, which exist before.

On a GPU the allocator's statistics give the peak; on a CPU, the high-water mark of the resident set, which Linux lets a
process reset. On a CPU freed blocks return to the system at once, so that the resident set equals the memory in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from liger_ext._timing import failure_text

from . import flce, suite
from .timing import free_at_once, peak_mib

SHAPES_CUDA = [(4096, 4096, 128256), (8192, 4096, 128256), (16384, 2048, 128256)]
SHAPES_CPU = [(512, 576, 49152), (1024, 576, 49152), (2048, 576, 49152)]


@dataclass
class Peak:
    shape: str
    logits_mib: float  # size of the logits, in the matmul's dtype
    peak_mib: dict[str, float | str]


def providers() -> dict[str, Callable]:
    return flce.providers()


def run(settings: suite.Settings) -> Iterator[Peak]:
    if settings.device == "cpu":
        free_at_once()
    for rows, hidden, vocab in SHAPES_CPU if settings.device == "cpu" else SHAPES_CUDA:
        inputs = flce.inputs(rows, hidden, vocab, settings)
        peaks: dict[str, float | str] = {}
        for name, function in providers().items():
            if not settings.wants(name.split(",")[0]):
                continue
            try:
                peaks[name] = peak_mib(partial(flce.gradients, function, *inputs), settings.device)
            except Exception as error:  # a peer that cannot run this shape must not end the run
                peaks[name] = failure_text(error)
        yield Peak(f"{rows}x{hidden}x{vocab}", rows * vocab * settings.torch_dtype.itemsize / 2**20, peaks)
        del inputs


def line(record: Peak) -> str:
    return f"{record.shape}: {record.peak_mib.get('liger_ext')} MiB"


def table(records: list[Peak], settings: suite.Settings) -> suite.Grid:
    names = suite.provider_names(r.peak_mib for r in records)
    grid = suite.Grid(
        f"{settings.dtype}: peak memory of loss and gradients above the inputs, MiB",
        ["rows x hidden x vocab", "logits", *names],
    )
    for record in records:
        cells = [record.peak_mib.get(n, "") for n in names]
        texts = [f"{c:,.0f}" if isinstance(c, float) else "fails" if c else "" for c in cells]
        grid.rows.append([record.shape, f"{record.logits_mib:,.0f}", *texts])
    return grid


def draw(records: list[Peak], settings: suite.Settings, folder: Path) -> list[Path]:
    picture, (axis,) = suite.figure(1, width=10)
    values = {
        n: [p if isinstance(p := r.peak_mib.get(n), float) else None for r in records]
        for n in suite.provider_names(r.peak_mib for r in records)
    }
    suite.bars(axis, [r.shape for r in records], values, "MiB above the inputs")
    axis.set_title("peak memory of the loss and its gradients (rows x hidden x vocab)")
    return [suite.save(picture, folder / f"memory_{settings.device}_{settings.dtype}.png")]
