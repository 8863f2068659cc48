"""The command line of ``make fuzz``; the package's docstring describes it."""

from __future__ import annotations

import argparse
import sys

from ops import OPS

from fuzz import driver, worker


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fuzz", description="Calls the ops with random arguments.")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=0, help="stop after this many seconds; 0: no limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run only the call with this number")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--ops", nargs="+", default=OPS, choices=OPS, metavar="OP", help=", ".join(OPS))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--judge-every", type=int, default=4, help="compare every n-th call with float64")
    parser.add_argument("--progress", type=float, default=30, help="seconds between lines of progress")
    parser.add_argument("--crash-at", type=int, default=-1, help=argparse.SUPPRESS)  # for tests/test_fuzz.py
    for name in ("--worker", "--first", "--step", "--current"):
        kind = {"action": "store_true"} if name == "--worker" else {"type": str if name == "--current" else int}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)
    args = parser.parse_args(argv)
    args.ops = tuple(args.ops)
    return args


def main() -> int:
    args = arguments()
    if args.worker:
        worker.work(args)
        return 0
    if args.only is not None:
        case = worker.draw_case(args.seed, args.only, args.ops, args.device)
        print(case.call, *case.notes, sep="\n  ", flush=True)
        found = worker.one_call(args.seed, args.only, args.ops, args.device, 1)
        print(f"{found['kind']}: {found['text']}\n  {found['call']}\n  {found['notes']}" if found else "no finding")
        return found is not None
    report = driver.drive(args, lambda line: print(line, flush=True))
    print(report)
    return bool(report.groups)


if __name__ == "__main__":
    sys.exit(main())
