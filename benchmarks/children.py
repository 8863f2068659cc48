"""Measurements in processes of their own: what one leaves behind (a patch of a whole module, memory) reaches no other.

A child (`python -m benchmarks.child`) reads one request from its standard input, a line of JSON, and answers with lines
of JSON: {"say": text} as it goes, at the end {"result": ...} or {"error": text}.
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
SECONDS = 900  # after which a child is taken to hang
# On a CPU, freed blocks of a megabyte go back to the system at once, so that the resident set is what is in use; on a
# GPU, segments that grow keep the memory that a long sequence needs in one piece.
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
        """The child's last answer: {"result": ...} or {"error": text}; what it says meanwhile goes to stderr."""
        start, answer = time.perf_counter(), {}
        watch = threading.Timer(SECONDS, self._process.kill)
        watch.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.close()
        except BrokenPipeError:  # it died on its way here; what it wrote says why
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
    """The answer to each request (its title, what is asked), each from a child of its own, one after the other.

    ``ahead``: start each child while the one before it works, so that nobody waits for imports.
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
