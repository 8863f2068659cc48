"""The command ``python -m liger_ext tune``: measures this GPU's rates (flop/s of matmuls, bytes/s of memory, seconds of
a kernel launch) and launch plans. It stores the rates, and the plans that are faster than the built-in ones, in a file
(_tuned.py). The fused loss estimates by the rates which of its plans is fastest.

A candidate is a setting of a knob (csrc/launch/knobs.h) that leads to another legal launch plan. The built-in plan and
all candidates are timed in turn. The fastest candidate wins if it is at least 3 % faster and the interquartile ranges
of its times and of the built-in plan's do not overlap.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from . import _C, _devices, _llama, _load, _timing, _tuned
from .records import RECORDS, InputFactory, Size

OPS = tuple(name for name, record in RECORDS.items() if record.kernels == name)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEAST_SPEEDUP = 1.03  # the least speedup over the built-in plan with which a candidate wins

# Each knob is tried at half and at twice the built-in plan's value. The number of resident blocks is no field of a
# plan, so the values of RESIDENT are tried.
TRIED_KNOBS = {"threads": "threads_per_row", "block": "block", "cluster": "cluster", "stages": "stages"}
RESIDENT = (1, 2, 3, 4)

# The share of the data sheet's bandwidth that a copy far larger than the L2 reaches (docs/measurements.md). cost.h was
# fitted with the data sheet's bandwidth.
COPY_REACHES = 0.9


@dataclass(frozen=True)
class Case:
    """A call of an op, with ``options`` of its function."""

    op: str
    size: Size
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def tunable(
        self, name: str, profile: _C.DeviceProfile, dtype: torch.dtype, knobs: _C.Knobs | None = None
    ) -> tuple[_tuned.KnobKey, _C.NamedLaunch] | None:
        """Returns a class of calls that share knobs, and the launch of ``name`` (the op or its backward) that has these
        knobs. None if no launch has knobs."""
        for launch in RECORDS[self.op].plans(profile, self.size, dtype, name, knobs, self.options):
            if launch.tunable:
                rows, cols, heads = self.size.batch * self.size.rows, self.size.cols, self.size.heads
                return _tuned.KnobKey(launch.tunable, launch.instance[0], rows, cols, heads).row_class(), launch
        return None


def _facts(launch: _C.NamedLaunch) -> tuple[tuple[str, Any], ...]:
    names = ("threads_per_row", "block", "k", "slots", "cluster", "stages", "grid")
    return (("kernel", launch.kernel), *((name, getattr(launch.plan, name)) for name in names))


def candidates(
    case: Case, name: str, profile: _C.DeviceProfile, dtype: torch.dtype
) -> list[tuple[dict[str, int], _C.NamedLaunch]]:
    """Returns the candidates: knobs, and the launch with these knobs. Each launch differs from the built-in plan and
    from the other candidates."""
    _, built_in = case.tunable(name, profile, dtype)
    values = {knob: getattr(built_in.plan, plan_field) for knob, plan_field in TRIED_KNOBS.items()}
    tried = [{knob: value} for knob, default in values.items() for value in (default // 2, default * 2) if value]
    found = {_facts(built_in): ({}, built_in)}
    for knobs in [*tried, *({"resident": blocks} for blocks in RESIDENT)]:
        _, launch = case.tunable(name, profile, dtype, _C.Knobs(**knobs))
        found.setdefault(_facts(launch), (knobs, launch))
    return list(found.values())[1:]


# The tuned calls ------------------------------------------------------------------------------------------------------


def tuned_case(op: str, profile: _C.DeviceProfile, rows: int = 0, cols: int = 0) -> Case:
    """Returns the op's call in a training step of an 8B Llama, with other rows and columns if ``rows`` is not 0."""
    size, options = RECORDS[op].as_tuned(RECORDS[op].llama, _llama.DTYPE, profile)
    return Case(op, size.at(rows, cols) if rows else size, options)


# The number of 2-byte elements that fit in the memory of the largest GPU of the reference profiles.
MOST_ELEMENTS = max(profile.memory_bytes for profile in _C.profiles()) // 2


def _parse_shapes(text: str) -> list[tuple[int, int]]:
    try:
        found = [tuple(int(n) for n in shape.split("x")) for shape in text.split(",")]
        if all(len(shape) == 2 and min(shape) > 0 and math.prod(shape) <= MOST_ELEMENTS for shape in found):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"'{text}': expected rows x columns, like 8192x4096,2048x11008, of at most {MOST_ELEMENTS} elements each"
    )


def jobs(
    cases: Iterable[Case], profile: _C.DeviceProfile, dtypes: Sequence[str]
) -> Iterator[tuple[Case, str, str, _tuned.KnobKey]]:
    """Yields (case, name of the op or of its backward, dtype, class of calls), once for each class of calls that share
    their knobs (``_tuned.KnobKey``)."""
    seen = set()
    for case, dtype, suffix in itertools.product(cases, dtypes, ("", "_backward")):
        name = case.op + suffix
        found = case.tunable(name, profile, DTYPES[dtype])
        if found and found[0] not in seen:
            seen.add(found[0])
            yield case, name, dtype, found[0]


# Measuring ------------------------------------------------------------------------------------------------------------


def measure_rates(profile: _C.DeviceProfile, driver: str, device: str = "cuda") -> _tuned.Rates:
    """Measures the rates that csrc/trace/cost.h uses, each by work whose time is bound by that rate alone."""
    m, n, k = 8192, 4096, 32_768  # so large a k that the traffic of the result does not matter

    def matmul(dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, k, device=device, dtype=dtype) for size in (m, n))
        out = torch.empty(m, n, device=device, dtype=dtype)
        return 2 * m * n * k / _timing.sustained_seconds(lambda: torch.mm(a, b.T, out=out))

    matmul_16, matmul_32 = matmul(torch.bfloat16 if profile.native_bf16 else torch.float16), matmul(torch.float32)
    x = torch.randn(1 << 28, device=device)
    copy = min(_timing.sustained_seconds(partial(torch.ops.liger_ext.stream_copy, x, n)) for n in (1, 2, 4, 8))
    bandwidth = 2 * x.numel() * x.itemsize / copy / COPY_REACHES
    # Each kernel is launched by itself, without a graph, as the fused loss's kernels are.
    launch = _timing.sustained_seconds(partial(torch.zeros(32, device=device).add_, 1))
    return _tuned.Rates(profile.name, driver, matmul_16, matmul_32, bandwidth, launch)


@dataclass
class Result:
    """The times of one call: of the built-in plan, and of the fastest candidate (``best``), which has ``knobs``."""

    op: str
    shape: str
    dtype: str
    call: _tuned.KnobKey
    built_in: _timing.Timing | None = None
    best: _timing.Timing | None = None
    knobs: dict[str, int] | None = None
    wins: bool = False
    failed: str = ""

    @property
    def ratio(self) -> float:
        """The time of the built-in plan divided by that of the best candidate."""
        return self.built_in.median / self.best.median if self.best else 1.0


def measure(
    case: Case, name: str, dtype: str, call: _tuned.KnobKey, profile: _C.DeviceProfile, device: str = "cuda"
) -> Result:
    """Times the built-in plan and all candidates of one op, or of its backward."""
    torch_dtype = DTYPES[dtype]
    tried = [{}, *(knobs for knobs, _ in candidates(case, name, profile, torch_dtype))]
    result = Result(name, str(case.size), dtype, call)
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    try:
        record, make = (
            RECORDS[case.op],
            InputFactory(torch_dtype, device, torch.Generator(device).manual_seed(0), ignored=0),
        )
        inputs = record.inputs(make, case.size)
        run = lambda *values: record.run(**dict(zip(inputs, values, strict=True)), **case.options)  # noqa: E731
        with _tuned.forced_knobs():
            make_call = _timing.forward_call if name == case.op else _timing.backward_call
            timed = make_call(run, tuple(inputs.values()))
        for i, knobs in enumerate(tried):
            with _tuned.forced_knobs(**knobs):
                graphs[i] = _timing.capture_graph(timed, graphs[0].pool() if graphs else None)
        times = _timing.time_graphs(graphs)
        result.built_in = times[0]
        if len(tried) > 1:
            best = min(range(1, len(tried)), key=lambda i: times[i].median)
            result.best, result.knobs = times[best], tried[best]
            result.wins = result.best.high < result.built_in.low and result.ratio >= LEAST_SPEEDUP
    except RuntimeError as error:  # mostly out of memory
        result.failed = _timing.failure_text(error)
    finally:
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
    return result


# The command ----------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Returns the results as a Markdown table, with times in microseconds."""
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
    failed = sum(bool(r.failed) for r in results)
    unmeasured = f"; {failed} could not be measured" if failed else ""
    return f"{len(results) - failed} calls measured, another plan won {sum(r.wins for r in results)} times{unmeasured}."


def list_candidates(todo: Sequence[tuple], profile: _C.DeviceProfile) -> None:
    for case, name, dtype, _ in todo:
        torch_dtype = DTYPES[dtype]
        _, built_in = case.tunable(name, profile, torch_dtype)
        print(f"{name} {case.size} {dtype}")
        for knobs, launch in [({}, built_in), *candidates(case, name, profile, torch_dtype)]:
            chosen = " ".join(f"{knob}={value}" for knob, value in knobs.items()) or "built-in"
            print(f"  {chosen:16}{', '.join(f'{fact} {value}' for fact, value in _facts(launch) if value)}")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        description="Measures this GPU's rates, by which the fused loss chooses its plan, and launch plans. Stores the "
        f"rates, and the plans that are faster than the built-in ones, in {_tuned.path()}. LIGER_EXT_TUNED=0 in the "
        "environment turns them off.",
    )
    parser.add_argument("--shapes", type=_parse_shapes, help="e.g. 8192x4096,2048x11008 (default: an 8B Llama's)")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=(), metavar="OP", help=f"of {', '.join(OPS)}")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=("bf16",), help="default: bf16")
    parser.add_argument("--device", type=int, default=0, metavar="INDEX", help="which GPU (default: 0)")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; measure and store nothing")
    parser.add_argument("--profile", metavar="NAME", help="with --dry-run: for another GPU")
    parser.add_argument("--json", action="store_true", help="print results as one JSON object instead of a table")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if arguments.profile and not arguments.dry_run:
        arguments.parser.error("--profile is for --dry-run: nothing can be measured on a GPU that is not here")
    try:
        profile = _C.profile(arguments.profile) if arguments.profile else None
    except ValueError as error:
        arguments.parser.error(str(error))
    if profile is None:
        found = [device for device in _devices.devices() if device.index == arguments.device and device.profile]
        if not found:
            there = torch.cuda.device_count() if torch.cuda.is_available() else 0
            print(
                f"liger_ext tune: no GPU can be measured. It needs a GPU that torch can use (device "
                f"{arguments.device}; torch finds {there}) and liger_ext's GPU library ({_load.gpu_status()}). "
                "--dry-run --profile NAME lists the candidates for a GPU that is not here.",
                file=sys.stderr,
            )
            return 1
        profile = found[0].profile
    try:
        shapes = arguments.shapes or [()]
        cases = [tuned_case(op, profile, *shape) for op in arguments.ops or OPS for shape in shapes]
        todo = list(jobs(cases, profile, arguments.dtype))
    except ValueError as error:  # an op has no kernel or no launch for a shape
        if not arguments.shapes:
            raise
        arguments.parser.error(f"--shapes: {error}; --ops selects the ops to tune")
    if arguments.dry_run:
        list_candidates(todo, profile)
        return 0
    return _measure_all(todo, profile, arguments)


def _measure_all(todo: Sequence[tuple], profile: _C.DeviceProfile, arguments: argparse.Namespace) -> int:
    results, driver, rates = [], _devices.driver(), None
    with torch.cuda.device(arguments.device), _timing.side_stream("cuda"):
        print("the GPU's rates", file=sys.stderr, flush=True)
        try:
            rates = measure_rates(profile, driver)
            shown = f"Rates: {_tuned.describe_rates(rates)}."
        except RuntimeError as error:  # mostly out of memory
            shown = f"The GPU's rates could not be measured: {_timing.failure_text(error)}"
        torch.cuda.empty_cache()
        for number, (case, name, dtype, call) in enumerate(todo, 1):
            print(f"{number}/{len(todo)} {name} {case.size} {dtype}", file=sys.stderr, flush=True)
            results.append(measure(case, name, dtype, call, profile))
    entries = [
        _tuned.Entry(profile.name, driver, r.call, r.knobs, r.built_in.median, r.best.median) for r in results if r.wins
    ]
    measured = [r.call for r in results if not r.failed]
    _tuned.write(_tuned.path(), profile.name, driver, measured, entries, rates)
    location = f"Kept in {_tuned.path()} for {profile.name}, driver {driver}; used from the next start of Python on."
    if arguments.json:
        versions = {"liger_ext": _load.cpu_facts.version, "torch": torch.__version__}
        facts = {"device": profile.name, "driver": driver, **versions, "rates": asdict(rates) if rates else shown}
        print(json.dumps(facts | {"results": [asdict(r) | {"ratio": r.ratio} for r in results]}))
    else:
        print(f"{table(results)}\n\n{summary(results)}\n{shown}\n{location}")
    return 1 if rates is None or (results and all(r.failed for r in results)) else 0
