"""Measures error / bound of every op in every dtype on a platform, and joins platforms' results in a Markdown table.

    python -m liger_ext.numerics measure                          this CPU, once for each instruction set that it has
    python -m liger_ext.numerics measure --device cuda --platform "H200"
    LIGER_EXT_LIB=liger_ext/lib/host python -m liger_ext.numerics measure --small    GPU kernels, run on this CPU
    python tests/amd/run.py --all --json amd.jsonl                GPU kernels in an emulator of AMD's instructions
    python -m liger_ext.numerics join docs/numerics.jsonl h200.jsonl amd.jsonl       adds the last two to the first

``measure`` prints JSON lines. A line has "platform", "op" and "dtype"; "what", the result (an output, or a gradient)
that came closest to its bound; "share", that result's error / bound (at most 1 is right); and "results", the number of
compared results. ``bounds.py`` defines the bound. ``join`` also writes the table, as the file's name with .md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from liger_ext import _load
from liger_ext._devices import cpu_isa
from liger_ext.records import RECORDS

if TYPE_CHECKING:
    from liger_ext.rule import Measurement

SHAPES = ({}, {"tokens": 6, "hidden": 33, "vocab": 131}, {"tokens": 64, "hidden": 4096, "vocab": 4099})
"""Arguments of ``testing.examples``: its default shape, a small shape with odd sizes, and one with long rows."""
SMALL = (*SHAPES[:2], {"tokens": 4, "hidden": 4096, "vocab": 4099})
"""The same with fewer long rows, for slow platforms such as the host target."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_ISAS = ("baseline", "avx2", "avx512")
HOST_WARPS = ("32", "64")

INTRODUCTION = """\
# Numerics: one bound for every platform

`liger_ext/bounds.py` defines how far each result may be from float64: half an ulp of its dtype, plus the counted
roundings of the arithmetic. The bound is the same on every platform. A cell shows the largest error of all outputs and
gradients of an op, divided by its bound, and the result with this error (`dx` is the gradient of `x`). Lower is better,
and 1 is the limit. In bfloat16 and float16 the one rounding at the store is nearly all of the error, so a correct
implementation has values just under 1. In float32 the bound allows sums in any order, and in the fused loss the
rounding of 16-bit logits, so values are lower.

`python -m liger_ext.numerics` writes this page: `measure` runs on each machine, and `join` merges its lines with
`numerics.jsonl`. The CPU columns are of the kernels for three instruction sets. The host columns are of the GPU kernels
compiled for a CPU, in lockstep warps of 32 and 64 lanes, at fewer long rows (`measure --small`). The gfx columns are of
AMD's code objects in an instruction emulator (`tests/amd/run.py --all`), at the shapes of `tests/kernel_cases.py`. The
column "generic PTX" is of a CUDA library that contains only PTX, which the driver compiles.
"""


def ensure_line(
    lines: dict[tuple[str, str], dict[str, Any]], platform: str, op: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns the line of an op's kernels in a dtype; creates it if ``lines`` has none."""
    key = RECORDS[op].kernels, str(dtype).removeprefix("torch.")
    empty = {"platform": platform, "op": key[0], "dtype": key[1], "what": "", "share": 0.0, "results": 0}
    return lines.setdefault(key, empty)


def keep_closest(line: dict[str, Any], measured: Iterable[Measurement]) -> None:
    """Adds measurements to a line: their count, and the result that came closest to its bound."""
    for found in measured:
        line["results"] += 1
        if not found.share <= line["share"]:
            line |= {"what": found.what, "share": found.share}


def measure(device: str, platform: str, shapes: Iterable[dict[str, int]]) -> Iterator[dict[str, Any]]:
    """Compares every op's examples of these shapes with float64. Yields one line for each op and dtype."""
    from liger_ext import testing

    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for shape in shapes:
        for op, inputs in testing.examples(device, DTYPES, **shape):
            dtype = next(v.dtype for v in inputs.values() if v.is_floating_point())
            keep_closest(ensure_line(lines, platform, op, dtype), testing.compare(op, inputs))
    yield from lines.values()


def _measure_each(small: bool) -> Iterator[dict[str, Any]]:
    """Measures each instruction set that the CPU has, or each warp width of the host target, in a new process, since
    the library chooses it when it is loaded."""
    if _load.library_folder().name == "host":
        variable, values, name = "LIGER_EXT_HOST_WARP", HOST_WARPS, "host wave"
    else:
        variable, values, name = "LIGER_EXT_CPU_ISA", CPU_ISAS[: CPU_ISAS.index(cpu_isa()) + 1], "CPU "
    for value in values:
        command = [sys.executable, "-m", "liger_ext.numerics", "measure", "--platform", f"{name}{value}"]
        command += ["--small"] if small else []
        done = subprocess.run(
            command, env={**os.environ, variable: value}, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode not in (0, 1):  # 1: an error exceeds its bound, as the lines show
            raise subprocess.CalledProcessError(done.returncode, command)
        yield from map(json.loads, done.stdout.splitlines())


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def join(file: Path, others: Iterable[Path]) -> list[dict[str, Any]]:
    """Merges the lines of other files into ``file``, where they replace lines of the same op, dtype and platform.
    Writes the page beside it. Returns all lines."""
    lines = [line for part in (file, *others) if part != file or file.exists() for line in read(part)]
    joined = list({(line["platform"], line["op"], line["dtype"]): line for line in lines}.values())
    file.write_text("".join(json.dumps(line) + "\n" for line in joined))
    file.with_suffix(".md").write_text(table(joined))
    return joined


def exceeds_bound(line: dict[str, Any]) -> bool:
    """Whether a result exceeds its bound, or a case failed in another way."""
    return not line["share"] <= 1 or line.get("wrong", 0) > 0


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Returns the Markdown page: a row for each op and dtype, a column for each platform."""
    cells = {(line["op"], line["dtype"], line["platform"]): line for line in lines}
    platforms = list(dict.fromkeys(platform for _, _, platform in cells))
    ops, dtypes = (list(dict.fromkeys(key[i] for key in cells)) for i in range(2))
    rows = [
        (op, dtype) for op in ops for dtype in dtypes if any((op, dtype, platform) in cells for platform in platforms)
    ]
    text = [f"| op | dtype | {' | '.join(platforms)} |", "|---|---|" + "---|" * len(platforms)]
    for op, dtype in rows:
        found = [cells.get((op, dtype, platform)) for platform in platforms]
        shown = [f"{line['share']:.2f} ({line['what']})" if line else "" for line in found]
        text.append(f"| {op} | {dtype} | {' | '.join(shown)} |")
    return f"{INTRODUCTION}\n" + "\n".join(text) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 if an error exceeds its bound, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m liger_ext.numerics", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="print JSON lines")
    measuring.add_argument("--device", default="cpu", help="cpu, or a GPU as torch names it (default: cpu)")
    measuring.add_argument("--platform", help="the column's heading (default: the instruction sets, or the GPU's name)")
    measuring.add_argument("--small", action="store_true", help="few long rows, for a slow platform")
    joining = commands.add_parser("join", help="merge lines of platforms into a file, and write the page beside it")
    joining.add_argument("file", type=Path, help="JSON lines; the page is the same name with .md")
    joining.add_argument("others", nargs="*", type=Path, help="JSON lines of one or several platforms")
    chosen = parser.parse_args(arguments)
    if chosen.command == "join":
        return int(any(map(exceeds_bound, join(chosen.file, chosen.others))))
    if chosen.device == "cpu" and chosen.platform is None:
        measured = _measure_each(chosen.small)
    else:
        platform = chosen.platform or torch.cuda.get_device_name(chosen.device)
        measured = measure(chosen.device, platform, SMALL if chosen.small else SHAPES)
    status = 0
    for line in measured:
        print(json.dumps(line), flush=True)
        status = status or int(exceeds_bound(line))
    return status


if __name__ == "__main__":
    sys.exit(main())
