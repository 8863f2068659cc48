"""Runs test cases in several processes: ``python processes.py <module> <folder> <case> ...``.

``<module>.CASES`` is {name: (number of processes, function)}; each process calls the function with its `World`. One
interpreter imports everything and forks once for each process, because starting an interpreter is the expensive part.
The processes see no GPU. Each case has its own process group, so that a failing case disturbs no other. Each process
writes the errors of its cases to ``<folder>/<processes>-<rank>.json``.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from cases import environment
from pairs import pairwise, product

TIMEOUT = datetime.timedelta(seconds=60)


class World:
    """The processes of a case. They share ``folder`` for files."""

    def __init__(self, folder):
        self.size, self.rank, self.group, self.folder = dist.get_world_size(), dist.get_rank(), dist.group.WORLD, folder

    def gathered(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def same(self, t):
        """Asserts that ``t`` is bitwise equal in all processes."""
        for other in self.gathered(t.detach()):
            assert torch.equal(other.nan_to_num(7e7), t.detach().nan_to_num(7e7)), (other, t)


def all_pairs_cases(kind, f, factors, possible=lambda case: True, processes=2):
    """Returns entries of `CASES`: `f(world, **case)` for an all-pairs design of `factors`."""
    cases = [case for case in product(factors) if possible(case)]
    found = {}
    for case in pairwise(cases) if len(factors) > 1 else cases:
        words = [name if value is True else str(value) for name, value in case.items() if value]
        found[", ".join([kind, *words])] = processes, partial(f, **case)
    return found


def run_errors(request, module, tmp_path_factory):
    """Runs the cases of the selected tests. Returns, for each, the error of the first process that failed, or None."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["case"] for item in here if "case" in item.callspec.params}
    names = [name for name in importlib.import_module(module).CASES if name in asked]
    env = environment() | {"CUDA_VISIBLE_DEVICES": ""}
    folder, log = tmp_path_factory.mktemp(module), tmp_path_factory.mktemp("log") / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, module, folder, *names], env=env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        failed = process.wait(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
    assert not failed, log.read_text()
    found = {}
    for written in sorted(folder.glob("*.json")):
        for name, text in json.loads(written.read_text()).items():
            found[name] = found.get(name) or (text and f"in process {written.stem.partition('-')[2]}:\n{text}")
    return found


def run_cases(cases, world_class, size, rank, folder):
    torch.set_num_threads(1)
    results = {}
    for number, (name, run) in enumerate(cases.items()):
        case_folder = folder / f"{size}-{number}"
        case_folder.mkdir(exist_ok=True)
        started = time.perf_counter()
        method = f"file://{case_folder}/store"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=TIMEOUT)
        try:
            run(world_class(case_folder))
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        dist.destroy_process_group()
        print(f"{time.perf_counter() - started:.2f} s in process {rank}: {name}", flush=True)
    (folder / f"{size}-{rank}.json").write_text(json.dumps(results))


def main(module, folder, *names):
    module = importlib.import_module(module)
    chosen = [(name, *module.CASES[name]) for name in names]
    for size in sorted({size for _, size, _ in chosen}):
        cases = {name: run for name, processes, run in chosen if processes == size}
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                try:
                    run_cases(cases, getattr(module, "World", World), size, rank, Path(folder))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # a thread of gloo that waits for the interpreter would abort its ordinary end
            children.append(child)
        failed = [os.waitpid(child, 0)[1] for child in children]
        if any(failed):
            sys.exit(f"a process of {size} has failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
