"""Runs the two sides of a comparison, each in a process of its own, so that neither inherits memory or compiled code.

Both have the same weights and the same batches. A process answers each line on its standard input (``child.py``), so
that the parent decides which side takes the next step. If both fit in memory, their steps alternate after the warm-up,
and each side goes first every other time: other load of the machine then affects both equally.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from liger_ext._timing import Timing
from liger_ext.inspection import Failed, Impossible

STOCK, OURS = "Hugging Face", "liger_ext"
WARM_UP = 3  # steps that times exclude: libraries initialise, caches fill
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COMMAND = [sys.executable, "-m", "liger_ext.comparison.child"]
TOO_LITTLE = "MemoryError", "DefaultCPUAllocator"  # in a traceback, the first also in OutOfMemoryError


class Side:
    """A process that trains one side. As a context manager it leaves no process behind."""

    def __init__(self, name: str, request: dict[str, Any]):
        self.name, self.request = name, request
        self.facts: dict[str, Any] = {}
        self.losses, self.seconds, self.free_bytes = [], [], 0

    def __enter__(self) -> Side:
        # Freed blocks of a megabyte return to the system at once, so that the resident set equals the memory in use.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            COMMAND, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def ask(self, question: Any = None) -> dict[str, Any]:
        """Sends a question, if there is one, and returns the next answer."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            if question is not None:
                print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> Exception:
        status = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read()
        if status == -signal.SIGKILL or any(word in errors for word in TOO_LITTLE):
            advice = "pass a smaller --batch or --seq, or fewer layers"
            return Impossible(f"too little memory for {self.request['depth']} layers with {self.name}: {advice}")
        last = (errors.strip().splitlines() or [f"ended with status {status}"])[-1]
        return Failed(f"training {self.request['depth']} layers with {self.name} failed: {last}")

    def step(self) -> None:
        answer = self.ask("step")
        self.losses.append(answer["loss"])
        self.seconds.append(answer["seconds"])
        self.facts["peak_bytes"], self.free_bytes = answer["peak_bytes"], answer["free_bytes"]

    def leaves_room(self) -> bool:
        """Returns whether the other side fits beside this one, after its warm-up; a GPU's context takes memory, too."""
        peak = self.facts["peak_bytes"]
        return peak is not None and self.free_bytes > 1.25 * peak + 2**30

    def result(self) -> dict[str, Any]:
        time = Timing.from_samples([s * 1e6 for s in self.seconds[min(WARM_UP, len(self.seconds) - 1) :]])
        return self.facts | {"losses": self.losses, "seconds": self.seconds, "time": vars(time)}


def train(request: dict[str, Any], names: tuple[str, ...], show: Callable[[Side], None]) -> dict[str, Any]:
    """Returns the result of each side that is named; calls ``show`` before a side builds its model and after each step.

    Raises:
        Impossible: a side has too little memory.
        Failed: another error of a side.
    """
    with contextlib.ExitStack() as running:
        changes = {STOCK: {"level": None}, OURS: {}}
        sides = [running.enter_context(Side(name, request | changes[name])) for name in names]
        for side in sides:
            side.ask()  # it has done its imports, which would disturb the times of the other side

        def step(side: Side) -> None:
            if len(side.losses) < request["steps"]:
                side.step()
                show(side)

        for side in sides:
            show(side)
            side.facts = side.ask(side.request)
            for _ in range(WARM_UP):
                step(side)
            if side is not sides[-1] and not side.leaves_room():
                for _ in range(request["steps"]):
                    step(side)
                side.__exit__()
        for number in range(request["steps"]):
            for side in sides if number % 2 == 0 else reversed(sides):
                step(side)
        return {side.name: side.result() for side in sides}
