"""Error / bound of every op in every dtype on every platform: measured as JSON lines, shown as a Markdown table.

    python -m liger_ext.numerics measure                          this CPU, once for each instruction set it has
    python -m liger_ext.numerics measure --device cuda --platform "H200"
    python -m liger_ext.numerics table cpu.jsonl h200.jsonl > docs/numerics.md

A line is ``{"platform", "op", "dtype", "what", "share", "results"}``: the result (an output, or a gradient) that came
closest to its bound, and how many elements were compared. ``bounds.py`` says what the bound is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SHAPES = ({}, {"tokens": 6, "hidden": 33, "vocab": 131}, {"tokens": 64, "hidden": 4096, "vocab": 4099})
"""Of ``testing.examples``: its own, a small odd one, a long one."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU_ISAS = ("baseline", "avx2", "avx512")

INTRODUCTION = """\
# Numerics: one bound for every platform

`liger_ext/bounds.py` states how far each result may be from float64: half an ulp of its dtype, and the roundings of
the arithmetic, counted. The bound is the same on every platform. The table shows the largest error / bound of all
outputs and gradients of an op, and where it was; 1 is the limit. In bfloat16 and float16 the one rounding at the store
is nearly all of it, so values just under 1 are what a right implementation has; in float32 the bound leaves room for
sums in any order, and in the fused loss for the rounding of 16-bit logits.

Made by `python -m liger_ext.numerics`: `measure` on each machine, `table` of all lines, which are `numerics.jsonl`.
"""


def measure(device: str, platform: str) -> Iterator[dict[str, Any]]:
    """One line for each op and dtype."""
    from liger_ext import testing

    worst: dict[tuple[str, str], dict[str, Any]] = {}
    for shape in SHAPES:
        for op, inputs in testing.examples(device, DTYPES, **shape):
            dtype = next(str(v.dtype) for v in inputs.values() if v.is_floating_point()).removeprefix("torch.")
            line = worst.setdefault(
                (op, dtype), {"platform": platform, "op": op, "dtype": dtype, "what": "", "share": 0.0, "results": 0}
            )
            for found in testing.compare(op, inputs):
                line["results"] += 1
                if not found.share <= line["share"]:
                    line |= {"what": found.what, "share": found.share}
    yield from worst.values()


def _measure_cpu() -> Iterator[str]:
    """Each instruction set in a process of its own: it is chosen when the library is loaded."""
    for isa in CPU_ISAS:
        command = [sys.executable, "-m", "liger_ext.numerics", "measure", "--platform", f"CPU {isa}"]
        environment = {**os.environ, "LIGER_EXT_CPU_ISA": isa}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        yield from done.stdout.splitlines()


def table(lines: Iterable[dict[str, Any]]) -> str:
    """Markdown: ops and dtypes down, platforms across; of several lines for one cell the last counts."""
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
    """Runs the command; 1 if a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m liger_ext.numerics", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="print JSON lines")
    measuring.add_argument("--device", default="cpu", help="cpu, or a GPU as torch names it (default: cpu)")
    measuring.add_argument("--platform", help="the column's heading (default: the instruction sets, or the GPU's name)")
    showing = commands.add_parser("table", help="print Markdown")
    showing.add_argument("files", nargs="+", type=Path, help="JSON lines, of one or several machines")
    chosen = parser.parse_args(arguments)
    if chosen.command == "table":
        lines = [json.loads(line) for file in chosen.files for line in file.read_text().splitlines()]
        print(table(lines), end="")
        return int(any(not line["share"] <= 1 for line in lines))
    if chosen.device == "cpu" and chosen.platform is None:
        measured = map(json.loads, _measure_cpu())
    else:
        measured = measure(chosen.device, chosen.platform or torch.cuda.get_device_name(chosen.device))
    broken = False
    for line in measured:
        print(json.dumps(line), flush=True)
        broken = broken or not line["share"] <= 1
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
