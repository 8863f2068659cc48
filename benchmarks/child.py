"""The process that makes one measurement. `benchmarks.children` starts it, and documents the requests and answers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable

from liger_ext._timing import failure_text

from . import context_one, step_one, train_one

TASKS: dict[str, Callable] = {"train": train_one.measure, "context": context_one.search, "step": step_one.measure}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output must not mix with the answers

    def answer(**what: object) -> None:
        print(json.dumps(what), file=answers, flush=True)

    line = sys.stdin.readline()
    if not line:  # the parent needs no measurement from this child
        return
    request = json.loads(line)
    try:
        result = TASKS[request.pop("task")](**request, say=lambda text: answer(say=text))
    except Exception as error:
        answer(error=failure_text(error))
        raise
    answer(result=dataclasses.asdict(result))


if __name__ == "__main__":
    main()
