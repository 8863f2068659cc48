"""``python -m benchmarks rows|flce``: a table on the terminal, JSON lines in --out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from . import flce, rows
from .timing import Timing

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _facts(device: str) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "commit": commit, "date": time.strftime("%Y-%m-%d")}


def _cell(timing: Timing | str, share: float | None) -> str:
    if isinstance(timing, str):
        return "[dim]fails[/dim]"
    unit = f"{timing.median / 1e3:.2f} ms" if timing.median >= 1e3 else f"{timing.median:.1f} us"
    return f"{unit} {share:.2f}" if share is not None else unit


def _rows(arguments: argparse.Namespace, console: Console, write) -> None:
    results = []
    for row in rows.run(DTYPES[arguments.dtype], arguments.device, arguments.providers, arguments.ops):
        write(dataclasses.asdict(row))
        results.append(row)
        ours = row.times.get("liger_ext")
        share = row.copy.median / ours.median if isinstance(ours, Timing) else None
        console.print(f"{row.op} {row.shape} {row.direction}: {ours if isinstance(ours, str) else _cell(ours, share)}")
    names = list(dict.fromkeys(name for row in results for name in row.times))
    table = Table(
        title=f"{arguments.dtype}: time, and efficiency = time of a same-size copy / time", title_justify="left"
    )
    for column in ("op", "shape", "direction", "copy", *names):
        table.add_column(column, no_wrap=True)
    for row in results:
        cells = [
            _cell(row.times[n], row.copy.median / row.times[n].median if isinstance(row.times[n], Timing) else None)
            if n in row.times
            else ""
            for n in names
        ]
        table.add_row(row.op, row.shape, row.direction, _cell(row.copy, None), *cells)
    console.print(table)


def _flce(arguments: argparse.Namespace, console: Console, write) -> None:
    results = list(flce.run(DTYPES[arguments.dtype], arguments.device, arguments.providers))
    names = list(dict.fromkeys(name for result in results for name in result.times))
    table = Table(
        title=f"{arguments.dtype}: forward + backward, share of the floor, peak MiB above the inputs",
        title_justify="left",
    )
    for column in ("rows x hidden x vocab", "floor", *names):
        table.add_column(column, no_wrap=True)
    for result in results:
        write(dataclasses.asdict(result))
        cells = []
        for name in names:
            timing = result.times[name]
            cell = _cell(timing, result.floors[name].median / timing.median if isinstance(timing, Timing) else None)
            cells.append(cell + (f" {result.peak_mib[name]:.0f}" if name in result.peak_mib else ""))
        table.add_row(result.shape, _cell(next(iter(result.floors.values())), None), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="liger_ext beside peers and the limit.")
    parser.add_argument("suite", choices=("rows", "flce"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default=None, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--providers", nargs="+", help="only these: liger_ext, torch, torch.compile, liger, ...")
    parser.add_argument("--ops", nargs="+", help="only these row ops")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON lines")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    torch._dynamo.config.cache_size_limit = 64  # one compiled version per shape

    facts = _facts(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=None if Console().is_terminal else 220)
    console.print(" | ".join(f"{key} {value}" for key, value in facts.items()))
    with (arguments.out / f"{arguments.suite}_{arguments.device}_{arguments.dtype}.jsonl").open("w") as file:

        def write(record: dict) -> None:
            file.write(json.dumps(facts | record) + "\n")
            file.flush()

        (_rows if arguments.suite == "rows" else _flce)(arguments, console, write)


if __name__ == "__main__":
    main()
