"""Executes the kernels' AMD code objects in an emulator, forward and backward, and compares the results with float64
under liger_ext's rule and bound.

    python tests/amd/run.py                        a few cases of every op on every architecture: minutes
    python tests/amd/run.py gfx942 gfx1100 --all   every case, a block's waves in two orders; every kernel must run
    python tests/amd/run.py gfx942 --only "rope.*16$"   cases of one op in 16 bits
    python tests/amd/run.py --all --json amd.jsonl also writes lines for `python -m liger_ext.numerics join`

Requires the HIP build of ``tests/compile_gpu.sh hip`` and an emulator. Exit status: 0 all results are right, 1 some are
wrong or missing, 2 no HIP build, 3 no emulator (the message explains how to install one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from amd import device, emulator, objects  # noqa: E402

WRONG, NO_BUILD, NO_EMULATOR = 1, 2, 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=objects.BUILT)
    parser.add_argument("--all", action="store_true", help="every case, in both orders of the waves")
    parser.add_argument("--only", default="", help="only cases whose text matches this regular expression")
    parser.add_argument("--json", type=Path, help="output file: a JSON object per line for each op and dtype")
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)  # of a child process
    return parser.parse_args()


def run_all(args: argparse.Namespace) -> int:
    """Runs one child process for each architecture, because a process has one device."""
    records, status = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for arch in args.architectures:
            output = Path(folder) / arch
            command = [sys.executable, __file__, arch, "--only", args.only, "--records", str(output)]
            done = subprocess.run([*command, *(["--all"] if args.all else [])], check=False)
            status = status or done.returncode
            if output.exists():
                records += [json.loads(line) for line in output.read_text().splitlines()]
    publish(args, records)
    return status


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def publish(args: argparse.Namespace, records: list[dict]) -> None:
    """Prints the tables of ops and of kernels, and writes the JSON file of ops."""
    for key in ("op", "kernel"):
        if found := [record for record in records if key in record]:
            print_table(key, found)
    if args.json:
        write(args.json, [record for record in records if "op" in record])


def print_table(key: str, records: list[dict]) -> None:
    """Prints, for ops or kernels by architecture, the cases, the wrong ones, and the largest error / bound."""
    from rich.console import Console
    from rich.table import Table

    platforms = list(dict.fromkeys(record["platform"] for record in records))
    table = Table(key, *platforms, title="cases, wrong ones, and largest error / bound")
    for name in dict.fromkeys(record[key] for record in records):
        cells = []
        for platform in platforms:
            found = [r for r in records if r[key] == name and r["platform"] == platform]
            cases, wrong = (sum(r[count] for r in found) for count in ("cases", "wrong"))
            cells.append(f"{cases:4d} {wrong:3d}  {max(r['share'] for r in found):.2f}" if found else "not run")
        table.add_row(name, *cells)
    Console(width=140).print(table)


def run_one(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    opened = device.Device(args.architectures[0])
    from amd.judge import Report, run_cases, run_checks

    report, start = Report(opened), time.monotonic()
    orders = ("forward", "reverse") if args.all else ("alternating",)
    for order in orders:
        run_cases(opened, report, order, args.only, quick=not args.all)
        if not args.only:
            run_checks(opened, report)
    if report.cases == 0:
        report.wrong.append(f"no case's text matches {args.only!r}")
    if args.all and not args.only:
        never = set(opened.names.values()) - set(opened.launched)
        report.wrong += [f"{name} never ran" for name in sorted(never)]
    for problem in report.wrong:
        print(f"{opened.arch}: {problem}")
    kernels = f"{len(opened.launched)} of {len(opened.names)} kernels"
    print(
        f"{opened.arch}: {report.cases} cases, {kernels}, {len(report.wrong)} wrong, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    if args.records:
        write(args.records, report.records())
    else:
        publish(args, report.records())
    return WRONG if report.wrong else 0


def main() -> int:
    args = arguments()
    try:
        for arch in (*args.architectures, objects.ARCHITECTURES[0]):
            objects.images(arch)
        emulator.load()
    except FileNotFoundError as missing:
        print(missing)
        return NO_BUILD
    except emulator.EmulatorMissing as missing:
        print(missing)
        return NO_EMULATOR
    device.build()
    return run_one(args) if len(args.architectures) == 1 else run_all(args)


if __name__ == "__main__":
    sys.exit(main())
