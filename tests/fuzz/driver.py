"""Starts worker processes, restarts one after the call in which it died, and groups the findings."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz.verdict import normal_form
from fuzz.worker import SETTINGS

PATIENCE = 60  # time limit of a call in seconds


@dataclass
class Group:
    """Findings of one kind and one op with the same text."""

    kind: str
    op: str
    text: str
    first: dict[str, Any]
    count: int = 0


@dataclass
class Report:
    seed: int
    calls: int = 0
    seconds: float = 0.0
    groups: dict[tuple[str, str, str], Group] = field(default_factory=dict)

    def add(self, found: dict[str, Any]) -> bool:
        """Adds a finding; returns whether it is the first of its group."""
        key = found["kind"], found["op"], normal_form(found["text"])
        first = key not in self.groups
        self.groups.setdefault(key, Group(*key, first=found)).count += 1
        return first

    def __str__(self) -> str:
        found = sum(group.count for group in self.groups.values())
        lines = [
            f"seed {self.seed}: {self.calls} calls in {self.seconds:.0f} s, "
            f"{found} findings of {len(self.groups)} kinds"
        ]
        for group in sorted(self.groups.values(), key=lambda g: -g.count):
            first = group.first
            lines += [
                "",
                f"{group.count} x {group.kind}, {group.op}: {first['text'][:600]}",
                f"  {first.get('call', '')[:600]}",
                *(f"  {note[:900]}" for note in first.get("notes", [])),
                f'  again: make fuzz ARGS="--seed {self.seed} --only {first["number"]}"',
            ]
        return "\n".join(lines)


class Worker:
    def __init__(self, args: Any, first: int, step: int, folder: Path) -> None:
        self.args, self.step, self.folder, self.first = args, step, folder, first
        self.current = folder / f"current{first}"
        self.begin(first)

    def begin(self, first: int) -> None:
        self.current.write_bytes(first.to_bytes(8, "little"))
        self.errors = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
        self.last, self.since = first, time.monotonic()
        command = [sys.executable, "-m", "fuzz", "--worker", "--first", str(first), "--step", str(self.step)]
        command += ["--current", str(self.current), "--calls", str(self.args.calls), "--seed", str(self.args.seed)]
        command += ["--crash-at", str(self.args.crash_at)]
        command += ["--device", self.args.device, "--judge-every", str(self.args.judge_every), "--ops", *self.args.ops]
        paths = [str(Path(__file__).parents[1]), *(p or os.getcwd() for p in sys.path)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **SETTINGS}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, env=env)

    def number(self) -> int:
        return int.from_bytes(self.current.read_bytes(), "little")

    def hangs(self) -> bool:
        number = self.number()
        if number != self.last:
            self.last, self.since = number, time.monotonic()
        return time.monotonic() - self.since > PATIENCE

    def calls_run(self) -> int:
        return (min(self.number(), self.args.calls) - self.first + self.step - 1) // self.step

    def end_finding(self, hung: bool) -> dict[str, Any]:
        """Returns the finding for a worker that crashed or hung."""
        code = self.process.wait()
        self.errors.seek(0)
        tail = self.errors.read().decode(errors="replace").strip().splitlines()
        last_words = [line for line in tail if "terminate called" in line or "what()" in line or "malloc" in line]
        stack = [line for line in tail if 'File "' in line and "torch" not in line][:4]
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        said = [line for line in tail if line.startswith("Fatal")] or tail[-1:]
        text = f"no answer in {PATIENCE} s" if hung else f"{name}: {said[0] if said else ''}"
        return {
            "number": self.number(),
            "kind": "hang" if hung else "crash",
            "op": drawn_op(self.args, self.number()),
            "text": text,
            "notes": last_words + stack,
        }


def drawn_op(args: Any, number: int) -> str:
    """Returns the op of a call, which is the worker's first draw."""
    return Random(f"{args.seed}/{number}").choice(args.ops)


def drive(args: Any, show: Callable[[str], None]) -> Report:
    """Runs ``args.calls`` calls, or as many as ``args.seconds`` allow, in ``args.jobs`` processes."""
    report, begin, shown = Report(args.seed), time.monotonic(), time.monotonic()

    def note(found: dict[str, Any]) -> None:
        if report.add(found):
            show(f"{found['number']}: {found['kind']}, {found['op']}: {found['text'][:200]}")

    with tempfile.TemporaryDirectory() as name, selectors.DefaultSelector() as waiting:
        workers = [Worker(args, first, args.jobs, Path(name)) for first in range(args.jobs)]
        for worker in workers:
            waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)
        while waiting.get_map():
            for key, _ in waiting.select(timeout=1):
                line = key.fileobj.readline()
                if line:
                    found = json.loads(line)
                    note(found)
                    continue
                waiting.unregister(key.fileobj)
                restart(key.data, note, waiting, hung=False)
            for worker in workers:
                if worker.process.poll() is None and worker.hangs():
                    waiting.unregister(worker.process.stdout)
                    worker.process.kill()
                    restart(worker, note, waiting, hung=True)
            report.calls, report.seconds = sum(w.calls_run() for w in workers), time.monotonic() - begin
            if time.monotonic() - shown > args.progress:
                shown = time.monotonic()
                show(f"{report.calls} calls, {report.seconds:.0f} s, {len(report.groups)} kinds of findings")
            if args.seconds and report.seconds > args.seconds:
                for worker in workers:
                    worker.process.kill()
                    worker.process.wait()
                break
    return report


def restart(
    worker: Worker, note: Callable[[dict[str, Any]], None], waiting: selectors.BaseSelector, hung: bool
) -> None:
    """Restarts a worker that has ended, and notes a finding if it crashed or hung."""
    worker.process.wait()
    behind = worker.number()
    if worker.process.returncode != 0 or hung:
        note(worker.end_finding(hung))
        behind += worker.step
    if behind < worker.args.calls:
        worker.begin(behind)
        waiting.register(worker.process.stdout, selectors.EVENT_READ, worker)
