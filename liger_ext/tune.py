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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import _C, _devices, _llama, _load, _shapes, _tuned, functional
from ._timing import Timing, backward_call, captured, failure, forward_call, on_a_stream_of_its_own, time_graphs
from .ops.fused_linear_cross_entropy import rows_within

OPS = (
    "rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "rope", "softmax", "cross_entropy",
    "fused_linear_cross_entropy",
)  # fmt: skip
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
    """A call of an op. ``rows``, ``cols``: of x, gate or logits; RoPE's positions and head dimension. ``heads``: RoPE's
    of q and of k, and the rotary dimension."""

    op: str
    rows: int
    cols: int
    heads: tuple[int, int, int] = (0, 0, 0)

    @property
    def shape(self) -> str:
        q, k, rotary = self.heads
        partial = f" of which {rotary}" if rotary < self.cols else ""
        return f"{self.rows} positions, {q}+{k} heads of {self.cols}{partial}" if q else f"{self.rows}x{self.cols}"

    def plans(self, name: str, profile: _C.DeviceProfile, dtype: str, knobs: _C.Knobs) -> list[_C.NamedLaunch]:
        """The launches of the op, or of its backward, called ``name``."""
        options: dict[str, Any] = {"bias": self.op == "layer_norm"}
        if any(self.heads):
            options |= dict(zip(("q_heads", "k_heads", "rotary_dim"), self.heads, strict=True))
        return _C.plans(name, profile, self.rows, self.cols, dtype, **options, knobs=knobs)

    def tunable(
        self, name: str, profile: _C.DeviceProfile, dtype: str, knobs: _C.Knobs | None = None
    ) -> tuple[_tuned.Call, _C.NamedLaunch] | None:
        """The launch that has knobs, if there is one, and the calls that share them."""
        for launch in self.plans(name, profile, dtype, knobs or _C.Knobs()):
            if launch.tunable != _C.Tunable.none:
                call = _tuned.Call(launch.tunable.name, launch.instance[0], self.rows, self.cols, self.heads)
                return call.row_class(), launch
        return None


def _facts(launch: _C.NamedLaunch) -> dict[str, int]:
    names = ("threads_per_row", "block", "k", "cluster", "stages", "grid")
    return {name: getattr(launch.plan, name) for name in names}


def candidates(case: Case, name: str, profile: _C.DeviceProfile, dtype: str) -> list[tuple[dict[str, int], Any]]:
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


def llama_cases(profile: _C.DeviceProfile) -> list[Case]:
    """One layer and the head of an 8B Llama."""
    tokens, vocab = _llama.TOKENS, _llama.VOCAB
    at_a_time = rows_within(vocab, _llama.HIDDEN, _llama.DTYPE, "auto", profile.memory_bytes, True)
    norms = [Case(op, tokens, _llama.HIDDEN) for op in ("rms_norm", "add_rms_norm", "layer_norm")]
    return [
        *norms,
        *(Case(op, tokens, _llama.MLP) for op in ("swiglu", "geglu")),
        Case("rope", tokens, _llama.HEAD_DIM, (_llama.HEADS, _llama.KV_HEADS, _llama.HEAD_DIM)),
        Case("softmax", tokens, tokens),
        Case("cross_entropy", tokens, vocab),
        Case("fused_linear_cross_entropy", _C.equal_chunks(tokens, at_a_time), vocab),
    ]


def benchmark_cases() -> list[Case]:
    """The shapes of `python -m benchmarks rows`."""
    return [
        *(Case(op, *s) for s in _shapes.NORMS for op in ("rms_norm", "add_rms_norm", "layer_norm")),
        *(Case("rms_norm", *s) for s in _shapes.RMS_NORMS),
        *(Case(op, *s) for s in _shapes.GLUS for op in ("swiglu", "geglu")),
        *(Case("rope", b * s, dim, (q, k, rotary)) for b, s, q, k, dim, rotary in _shapes.ROPES),
        *(Case("softmax", *s) for s in _shapes.SOFTMAXES),
        *(Case("cross_entropy", *s) for s in _shapes.LOSSES),
    ]


def _shapes_of(text: str) -> list[tuple[int, int]]:
    try:
        found = [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]
        if all(len(shape) == 2 and min(shape) > 0 for shape in found):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}': expected rows x columns, like 8192x4096,2048x11008")


def chosen_cases(arguments: argparse.Namespace, profile: _C.DeviceProfile) -> list[Case]:
    if arguments.shapes:
        heads = _llama.HEADS, _llama.KV_HEADS
        made = [Case(op, r, c, (*heads, c) if op == "rope" else (0, 0, 0)) for op in OPS for r, c in arguments.shapes]
    else:
        made = benchmark_cases() if arguments.benchmark else llama_cases(profile)
    return [case for case in made if not arguments.ops or case.op in arguments.ops]


def jobs(
    cases: Iterable[Case], profile: _C.DeviceProfile, dtypes: Sequence[str]
) -> Iterator[tuple[Case, str, str, _tuned.Call]]:
    """(case, name of the op or of its backward, dtype, the calls that it stands for): each of these calls once."""
    seen = set()
    for case, dtype, suffix in itertools.product(cases, dtypes, ("", "_backward")):
        name = case.op + suffix
        found = case.tunable(name, profile, str(DTYPES[dtype]).removeprefix("torch."))
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


def _inputs(case: Case, dtype: torch.dtype, device: str) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """The op, and what it is called with."""

    def param(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    function, matrix = getattr(functional, case.op), (case.rows, case.cols)
    if case.op == "rope":
        q_heads, k_heads, rotary = case.heads
        q, k = (
            torch.randn(1, case.rows, heads, case.cols, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
            for heads in (q_heads, k_heads)
        )
        angle = torch.rand(1, case.rows, rotary // 2, device=device).repeat(1, 1, 2) * 6.28
        return function, (q, k, angle.cos().to(dtype), angle.sin().to(dtype))
    if case.op in ("swiglu", "geglu"):
        return function, (param(*matrix), param(*matrix))
    if case.op.endswith("cross_entropy"):
        target = torch.randint(case.cols, (case.rows,), device=device)
        if case.op == "cross_entropy":
            return function, (param(*matrix), target)
        # So small a hidden size that the matmuls are not what is timed; all rows in one chunk.
        one_chunk = lambda x, weight, target: function(x, weight, target, memory=1 << 50)  # noqa: E731
        return one_chunk, (param(case.rows, 64), param(case.cols, 64), target)
    extra = {"softmax": [], "rms_norm": ["w"], "add_rms_norm": ["x", "w"], "layer_norm": ["w", "w"]}[case.op]
    return function, (param(*matrix), *(param(*matrix) if e == "x" else param(case.cols) for e in extra))


def measure(
    case: Case, name: str, dtype: str, call: _tuned.Call, profile: _C.DeviceProfile, device: str = "cuda"
) -> Result:
    """Times the built-in plan and all candidates of one op, or of its backward."""
    of = DTYPES[dtype]
    tried = [{}, *(knobs for knobs, _ in candidates(case, name, profile, str(of).removeprefix("torch.")))]
    result = Result(name, case.shape, dtype, call, len(tried) - 1)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    try:
        function, inputs = _inputs(case, of, device)
        with _tuned.forced():
            timed = (backward_call if name.endswith("_backward") else forward_call)(function, inputs)
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
        of = str(DTYPES[dtype]).removeprefix("torch.")
        _, own = case.tunable(name, profile, of)
        print(f"{name} {case.shape} {dtype}")
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
    todo = list(jobs(chosen_cases(arguments, profile), profile, arguments.dtype))
    if arguments.dry_run:
        list_candidates(todo, profile)
        return 0
    return _measure_all(todo, profile, arguments)


def _measure_all(todo: Sequence[tuple], profile: _C.DeviceProfile, arguments: argparse.Namespace) -> int:
    results, driver = [], _devices.driver()
    with torch.cuda.device(arguments.device), on_a_stream_of_its_own("cuda"), _progress(len(todo)) as step:
        for case, name, dtype, call in todo:
            step(f"{name} {case.shape} {dtype}")
            results.append(measure(case, name, dtype, call, profile))
    keep(results, profile.name, driver)
    kept = f"Kept in {_tuned.path()} for {profile.name}, driver {driver}; used from the next start of Python on."
    if arguments.json:
        facts = {"device": profile.name, "driver": driver, "liger_ext": _C.version, "torch": torch.__version__}
        print(json.dumps(facts | {"results": [asdict(r) | {"ratio": r.ratio} for r in results]}))
    else:
        print(f"{table(results)}\n\n{summary(results)}\n{kept}")
    return 1 if results and all(r.failed for r in results) else 0
