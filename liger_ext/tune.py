"""``python -m liger_ext tune``: measures which launch plans are fastest on this GPU and keeps what beats the built-in
ones (_tuned.py).

A candidate is a set of knobs (csrc/launch/knobs.h) that makes another legal plan. Candidates and the built-in plan take
turns in time; the best one and the built-in plan take turns once more, and it wins if the middle halves of their times
do not overlap.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from . import _C, _devices, _llama, _load, _tuned
from ._timing import Timing, backward_call, captured, failure, forward_call, on_a_stream_of_its_own, time_graphs
from .records import RECORDS, Make, Record, Size

OPS = tuple(name for name, record in RECORDS.items() if record.kernels == name)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MOST_CANDIDATES = 12

# Values worth a try, alone and in these pairs; the planner clamps them, and many make the same plan.
VALUES = {
    "threads": (16, 32, 64, 128, 256, 512, 1024),
    "block": (64, 128, 256, 512, 1024),
    "cluster": (2, 4, 8),
    "stages": (1, 2, 3, 4, 6, 8),
    "resident": (1, 2, 3, 4),
}
PAIRS = (("threads", "block"), ("block", "resident"), ("cluster", "resident"))


SHOWN = {"threads": "threads_per_row", "block": "block", "cluster": "cluster", "stages": "stages"}


@dataclass(frozen=True)
class Case:
    """A call of an op, with ``options`` of its function."""

    op: str
    size: Size
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def record(self) -> Record:
        return RECORDS[self.op]

    def tunable(
        self, name: str, profile: _C.DeviceProfile, dtype: torch.dtype, knobs: _C.Knobs | None = None
    ) -> tuple[_tuned.Call, _C.NamedLaunch] | None:
        """The launch of the op, or of its backward, called ``name`` that has knobs, if there is one, and the calls that
        share them."""
        for launch in self.record.plans(profile, self.size, dtype, name, knobs, self.options):
            if launch.tunable:
                rows, cols, heads = self.size.batch * self.size.rows, self.size.cols, self.size.heads
                return _tuned.Call(launch.tunable, launch.instance[0], rows, cols, heads).row_class(), launch
        return None


def _facts(launch: _C.NamedLaunch) -> dict[str, int]:
    names = ("threads_per_row", "block", "k", "slots", "cluster", "stages", "grid")
    return {name: getattr(launch.plan, name) for name in names}


def candidates(
    case: Case, name: str, profile: _C.DeviceProfile, dtype: torch.dtype
) -> list[tuple[dict[str, int], Any]]:
    """Knobs, and the launch that they make: each another plan than the built-in one, the nearest to it first, and no
    more than MOST_CANDIDATES."""
    _, own = case.tunable(name, profile, dtype)
    seen, found = {(own.kernel, *_facts(own).values())}, []
    single = [{knob: value} for knob, values in VALUES.items() for value in values]
    pairs = [{a: x, b: y} for a, b in PAIRS for x, y in itertools.product(VALUES[a], VALUES[b])]

    def distance(launch: _C.NamedLaunch) -> float:
        facts = zip(_facts(own).values(), _facts(launch).values(), strict=True)
        return sum(abs(math.log2((a + 1) / (b + 1))) for a, b in facts)

    def plan(knobs: dict[str, int]) -> tuple[_C.NamedLaunch, tuple]:
        _, launch = case.tunable(name, profile, dtype, _C.Knobs(**knobs))
        return launch, (launch.kernel, *_facts(launch).values())

    for group in (single, pairs):
        made = []
        for knobs in group:
            launch, key = plan(knobs)
            if key in seen:
                continue
            seen.add(key)
            # Of all values that make this plan, the one that is seen in it.
            shown = knobs | {knob: getattr(launch.plan, of) for knob, of in SHOWN.items() if knob in knobs}
            made.append((shown if plan(shown)[1] == key else knobs, launch))
        found += sorted(made, key=lambda candidate: distance(candidate[1]))
    return found[:MOST_CANDIDATES]


# What is tuned --------------------------------------------------------------------------------------------------------


def case_of(op: str, profile: _C.DeviceProfile, rows: int = 0, cols: int = 0) -> Case:
    """The call of a training step of an 8B Llama; or the same with other rows and columns."""
    size, options = RECORDS[op].as_tuned(RECORDS[op].llama, _llama.DTYPE, profile)
    return Case(op, size.at(rows, cols) if rows else size, options)


def benchmark_cases() -> list[Case]:
    """The shapes of `python -m benchmarks rows`."""
    return [
        Case(op, size, timed.options or {})
        for op in OPS
        for timed in RECORDS[op].timed
        if timed.tuned
        for size in timed.sizes
    ]


# Elements of a tensor that the largest GPU of the reference profiles holds, at two bytes each.
MOST_ELEMENTS = max(profile.memory_bytes for profile in _C.profiles()) // 2


def _shapes_of(text: str) -> list[tuple[int, int]]:
    try:
        found = [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]
        if all(len(shape) == 2 and min(shape) > 0 and math.prod(shape) <= MOST_ELEMENTS for shape in found):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"'{text}': expected rows x columns, like 8192x4096,2048x11008, of at most {MOST_ELEMENTS} elements each"
    )


def chosen_cases(arguments: argparse.Namespace, profile: _C.DeviceProfile) -> list[Case]:
    if arguments.shapes:
        made = [case_of(op, profile, *shape) for op in OPS for shape in arguments.shapes]
    else:
        made = benchmark_cases() if arguments.benchmark else [case_of(op, profile) for op in OPS]
    return [case for case in made if not arguments.ops or case.op in arguments.ops]


def jobs(
    cases: Iterable[Case], profile: _C.DeviceProfile, dtypes: Sequence[str]
) -> Iterator[tuple[Case, str, str, _tuned.Call]]:
    """(case, name of the op or of its backward, dtype, the calls that it stands for): each of these calls once."""
    seen = set()
    for case, dtype, suffix in itertools.product(cases, dtypes, ("", "_backward")):
        name = case.op + suffix
        found = case.tunable(name, profile, DTYPES[dtype])
        if found and found[0] not in seen:
            seen.add(found[0])
            yield case, name, dtype, found[0]


# Measuring ------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """``best``: the best candidate, timed in turns with the built-in plan; ``wins``: it is faster by more than the
    spread."""

    op: str
    shape: str
    dtype: str
    call: _tuned.Call
    candidates: int
    built_in: Timing | None = None
    best: Timing | None = None
    knobs: dict[str, int] | None = None
    wins: bool = False
    failed: str = ""

    @property
    def ratio(self) -> float:
        """Time of the built-in plan over the best candidate's."""
        return self.built_in.median / self.best.median if self.best else 1.0


def _inputs(case: Case, dtype: torch.dtype, device: str) -> tuple[Callable, tuple[Any, ...]]:
    """The op as a function of its inputs' values, and these."""
    made = case.record.inputs(Make(dtype, device, torch.Generator(device).manual_seed(0), ignored=0), case.size)
    return lambda *values: case.record.run(**dict(zip(made, values, strict=True)), **case.options), tuple(made.values())


def measure(
    case: Case, name: str, dtype: str, call: _tuned.Call, profile: _C.DeviceProfile, device: str = "cuda"
) -> Result:
    """Times the built-in plan and all candidates of one op, or of its backward."""
    of = DTYPES[dtype]
    tried = [{}, *(knobs for knobs, _ in candidates(case, name, profile, of))]
    result = Result(name, str(case.size), dtype, call, len(tried) - 1)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    try:
        function, inputs = _inputs(case, of, device)
        with _tuned.forced():
            timed = (forward_call if name == case.op else backward_call)(function, inputs)
        for i, knobs in enumerate(tried):
            with _tuned.forced(**knobs):
                graphs[i] = captured(timed, graphs[0].pool() if graphs else None)
        first = time_graphs(graphs, replays=12)
        best = min(first, key=lambda i: first[i].median if i else math.inf)
        final = time_graphs({i: graphs[i] for i in {0, best}}, replays=40)
        result.built_in = final[0]
        if best:
            result.best, result.knobs = final[best], tried[best]
            result.wins = final[best].high < final[0].low
    except RuntimeError as error:  # out of memory, mostly
        result.failed = failure(error)
    finally:
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
    return result


# The command ----------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """As Markdown; times in microseconds."""
    lines = [
        "| op | shape | dtype | built-in, us | best other, us | built-in / best | knobs that won |",
        "|" + "---|" * 7,
    ]
    for r in results:
        if r.failed:
            lines.append(f"| {r.op} | {r.shape} | {r.dtype} | {r.failed} | | | |")
            continue
        knobs = ", ".join(f"{name} {value}" for name, value in r.knobs.items()) if r.wins else "none"
        best = f"{r.best.median:.1f} | {r.ratio:.3f}" if r.best else " | "
        lines.append(f"| {r.op} | {r.shape} | {r.dtype} | {r.built_in.median:.1f} | {best} | {knobs} |")
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    timed = [r for r in results if not r.failed]
    worst = max((r.ratio for r in timed if r.wins), default=1.0)
    failed = f"; {len(results) - len(timed)} could not be measured" if len(timed) < len(results) else ""
    return (
        f"{len(timed)} calls measured, another plan won {sum(r.wins for r in timed)} times{failed}. "
        f"The built-in plans take at most {100 * (worst - 1):.1f} % longer than the tuned ones."
    )


def keep(results: Sequence[Result], device: str, driver: str) -> None:
    measured = [r for r in results if not r.failed]
    winners = [
        _tuned.Entry(device, driver, r.call, r.knobs, r.built_in.median, r.best.median) for r in measured if r.wins
    ]
    _tuned.write(_tuned.path(), device, driver, [r.call for r in measured], winners)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar where rich is installed, else a line for each step; on stderr."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        steps = itertools.count(1)
        yield lambda what: print(f"{next(steps)}/{total} {what}", file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total, completed=-1)
        yield lambda what: bar.update(task, advance=1, description=what)
        bar.update(task, advance=1, description="")


def list_candidates(todo: Sequence[tuple], profile: _C.DeviceProfile) -> None:
    for case, name, dtype, _ in todo:
        of = DTYPES[dtype]
        _, own = case.tunable(name, profile, of)
        print(f"{name} {case.size} {dtype}")
        for knobs, launch in [({}, own), *candidates(case, name, profile, of)]:
            chosen = " ".join(f"{knob}={value}" for knob, value in knobs.items()) or "built-in"
            print(f"  {chosen:28}{launch.kernel}: {', '.join(f'{n} {v}' for n, v in _facts(launch).items() if v)}")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        description="Measures launch plans on this GPU and keeps those that beat the built-in ones, for this user. "
        f"LIGER_EXT_TUNED=0 in the environment turns them off. They are kept in {_tuned.path()}.",
    )
    parser.add_argument("--shapes", type=_shapes_of, help="e.g. 8192x4096,2048x11008 (default: an 8B Llama's)")
    parser.add_argument("--benchmark", action="store_true", help="the shapes of the rows benchmark")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=(), metavar="OP", help=f"of {', '.join(OPS)}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=("bf16",), help="default: bf16")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which GPU (default: 0)")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates, measure and keep nothing")
    parser.add_argument("--profile", metavar="NAME", help="with --dry-run: for another GPU")
    parser.add_argument("--json", action="store_true", help="print results as one JSON object instead of a table")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """The exit status."""
    if arguments.profile and not arguments.dry_run:
        arguments.parser.error("--profile is for --dry-run: nothing can be measured on a GPU that is not here")
    if arguments.shapes and arguments.benchmark:
        arguments.parser.error("either --shapes or --benchmark")
    try:
        profile = _C.profile(arguments.profile) if arguments.profile else None
    except ValueError as error:
        arguments.parser.error(str(error))
    if profile is None:
        found = [device for device in _devices.devices() if device.index == arguments.device and device.profile]
        if not found:
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            print(
                f"liger_ext tune: there is nothing to measure on. It needs a GPU that torch can use (device "
                f"{arguments.device}; there are {there}) and liger_ext's GPU library ({_load.gpu_status()}). "
                "--dry-run --profile NAME lists the candidates for a GPU that is not here.",
                file=sys.stderr,
            )
            return 1
        profile = found[0].profile
    try:
        todo = list(jobs(chosen_cases(arguments, profile), profile, arguments.dtype))
    except ValueError as error:  # no launch on this GPU is as large
        if not arguments.shapes:
            raise
        arguments.parser.error(f"--shapes: {error}")
    if arguments.dry_run:
        list_candidates(todo, profile)
        return 0
    return _measure_all(todo, profile, arguments)


def _measure_all(todo: Sequence[tuple], profile: _C.DeviceProfile, arguments: argparse.Namespace) -> int:
    results, driver = [], _devices.driver()
    with torch.cuda.device(arguments.device), on_a_stream_of_its_own("cuda"), _progress(len(todo)) as step:
        for case, name, dtype, call in todo:
            step(f"{name} {case.size} {dtype}")
            results.append(measure(case, name, dtype, call, profile))
    keep(results, profile.name, driver)
    kept = f"Kept in {_tuned.path()} for {profile.name}, driver {driver}; used from the next start of Python on."
    if arguments.json:
        versions = {"liger_ext": _load.cpu_facts.version, "torch": torch.__version__}
        facts = {"device": profile.name, "driver": driver, **versions}
        print(json.dumps(facts | {"results": [asdict(r) | {"ratio": r.ratio} for r in results]}))
    else:
        print(f"{table(results)}\n\n{summary(results)}\n{kept}")
    return 1 if results and all(r.failed for r in results) else 0
