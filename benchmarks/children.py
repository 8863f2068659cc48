"""Runs each measurement in a separate process, so that its patches of whole modules and its memory affect no other.

A child (`python -m benchmarks.child`) reads one request from its standard input, a line of JSON, and answers with lines
of JSON: {"say": text} for progress, and at the end {"result": ...} or {"error": text}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 900  # after which the parent kills a child as hung
# On a CPU, freed blocks of a megabyte return to the system at once, so that the resident set equals the memory in use;
# on a GPU, expandable segments provide the contiguous memory that a long sequence needs.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


class Child:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, open until `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            cwd=ROOT, env=ENVIRONMENT | os.environ,
        )  # fmt: skip

    def ask(self, title: str, request: dict) -> dict:
        """Sends the request, prints the child's progress messages to stderr, and returns the child's last answer:
        {"result": ...} or {"error": text}."""
        start, answer = time.perf_counter(), {}
        watch = threading.Timer(SECONDS, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.close()
        except BrokenPipeError:  # the child has already died; its stderr shows why
            pass
        for line in self._process.stdout:
            answer = json.loads(line)
            if "say" in answer:
                print(f"  {title}, {time.perf_counter() - start:.0f} s: {answer['say']}", file=sys.stderr, flush=True)
        status = self._process.wait()
        watch.cancel()
        return answer if "result" in answer or "error" in answer else {"error": self._last_words(status)}

    def _last_words(self, status: int) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"ended with status {status}" + (f": {lines[-1][:120]}" if lines else "")

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


def ask_each(requests: Iterable[tuple[str, dict]], ahead: bool) -> Iterator[dict]:
    """Yields the answer to each request (title, content), each from a new child, one after the other.

    ``ahead``: start the next child while one works, so that imports take no extra time.
    """
    requests = list(requests)
    waiting: list[Child] = []
    try:
        for number, (title, request) in enumerate(requests):
            child = waiting.pop() if waiting else Child()
            if ahead and number + 1 < len(requests):
                waiting.append(Child())
            try:
                answer = child.ask(title, request)
            finally:
                child.end()
            yield answer
    finally:
        for child in waiting:
            child.end()
