"""Times the log-probabilities of a head, forward and backward: our op at levels of memory and with limits in bytes, and
other libraries' functions. The floor of a case is the time of the matmuls that it needs (logits, and dx and dweight if
they are requested), with the same operands in the same run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ext._timing import Timing, failure_text

from . import flce, suite
from .log_probs_errors import Errors, Exact
from .log_probs_providers import COMPILED, LAST, OURS, Case, Function, full_logits, makers
from .timing import free_at_once, peak_mib, time_cpu


class Shape(NamedTuple):
    """``sizes``: limits of our op's memory above the inputs, in MiB, gradients included."""

    model: str
    rows: int
    hidden: int
    vocab: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rows}x{self.hidden}x{self.vocab}"


SHAPES_CUDA = [
    Shape("Qwen 3 8B", 8192, 4096, 151_936, (2700,)),
    Shape("Llama 3.2 1B", 16_384, 2048, 128_256, (4250, 2600)),
    Shape("Gemma 2 2B", 8192, 2304, 256_000, (4150,)),
]
SHAPES_CPU = [Shape("tiny a", 128, 32, 4096, (16,)), Shape("tiny b", 64, 48, 2048, (16, 8))]
# Most important first: the last ones are skipped if the run takes too long.
CASES = [
    Case("trained, entropy with gradient", entropy_gradient=True, sizes=True, compiled=True),
    Case("trained, entropy", sizes=True),
    Case("frozen, entropy", trained=False),
    Case("no gradient, entropy", gradients=False),
    Case("trained, entropy, fp32 weight under autocast", autocast=True),
    Case("trained", entropy=False, sizes=True),
]
DRAWN = "trained, entropy"
ERROR_ROWS = 1024
BONUS = 0.01  # factor of the entropy in the loss
SECONDS, LEAST, MOST = 0.4, 3, 12  # seconds of GPU time per point; rounds
SLOW = 3  # times the floor's time: slower providers need one round less
LIMIT, LIMIT_LAST = 110.0, 138.0  # seconds of a run on a GPU, after which points are skipped
LATE = "left out: the run would take too long"
ONE_MATMUL, EAGER = "one matmul", "full logits"


@dataclass
class Result:
    model: str
    shape: str
    case: str
    matmuls: int
    floors: dict[str, Timing] = field(default_factory=dict)  # timed in turns with each provider
    times: dict[str, Timing | str] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)  # above the inputs
    errors: dict[str, Errors] = field(default_factory=dict)


@dataclass
class Inputs:
    x: Tensor
    w: Tensor
    t: Tensor
    coefficients: Tensor  # factors of log-probabilities in the loss
    bonus: Tensor  # factors of entropies, not expanded, because verl's kernel needs a contiguous gradient

    @staticmethod
    def create(shape: Shape, case: Case, settings: suite.Settings) -> Inputs:
        stored = dataclasses.replace(settings, dtype="fp32") if case.autocast else settings
        x, w, t = flce.inputs(shape.rows, shape.hidden, shape.vocab, stored)
        coefficients = torch.randn(shape.rows, device=x.device)
        return Inputs(x, w.requires_grad_(case.trained), t, coefficients, torch.full_like(coefficients, BONUS))

    def first(self, rows: int) -> Inputs:
        x = self.x.detach()[:rows].requires_grad_()
        return Inputs(x, self.w, self.t[:rows], self.coefficients[:rows], self.bonus[:rows])


def run_provider(function: Function, case: Case, inputs: Inputs) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Log-probabilities, entropies and gradients."""
    with (
        torch.set_grad_enabled(case.gradients),
        torch.autocast(inputs.x.device.type, torch.bfloat16, enabled=case.autocast),
    ):
        log_probs, entropy = function(inputs.x, inputs.w, inputs.t, case)
    if not case.gradients:
        return log_probs, entropy, ()
    loss = -(log_probs.float() * inputs.coefficients).sum()
    if case.entropy_gradient:
        loss = loss - (entropy.float() * inputs.bonus).sum()
    return log_probs, entropy, torch.autograd.grad(loss, (inputs.x, inputs.w) if case.trained else (inputs.x,))


@torch.no_grad()
def make_floor(case: Case, inputs: Inputs, compute: torch.dtype) -> Callable[[], object]:
    """The matmuls that the case needs, with these operands."""
    x, w = inputs.x.detach().to(compute), inputs.w.detach().to(compute)
    g = flce.logits_gradient(x, w, inputs.t).mul_(inputs.coefficients[:, None]) if case.gradients else None

    @torch.no_grad()
    def floor():
        products = [x @ w.T]
        if case.gradients:
            products.append(g @ w)
        if case.gradients and case.trained:
            products.append(g.T @ x)
        return products

    return floor


def run(settings: suite.Settings) -> Iterator[Result]:
    """Yields the providers of ``LAST`` as separate records, after all others."""
    start = time.monotonic()
    if settings.device == "cpu":
        free_at_once()
    for make in makers(CASES[0], ()).values():
        with contextlib.suppress(Exception):  # the measurement will record the error
            make()
    gc.collect()
    gc.freeze()  # excludes what libraries allocated at import, so that the collections of peak_mib are quick
    try:
        for last in (False, True):
            limit = float("inf") if settings.device == "cpu" else start + (LIMIT_LAST if last else LIMIT)
            yield from _pass(settings, last, limit)
    finally:
        gc.unfreeze()


def _pass(settings: suite.Settings, last: bool, limit: float) -> Iterator[Result]:
    shapes = SHAPES_CPU if settings.device == "cpu" else SHAPES_CUDA
    for case in CASES:
        for shape in shapes[:1] if case.autocast else shapes:
            if not settings.wants_op(case.name) or not settings.wants_model(shape.model):
                continue
            wanted = {
                name: make
                for name, make in makers(case, shape.sizes).items()
                if (name in LAST) == last and settings.wants(name)
            }
            if wanted:
                yield _measured(shape, case, settings, wanted, limit)


def _measured(
    shape: Shape, case: Case, settings: suite.Settings, wanted: dict[str, Callable[[], Function]], limit: float
) -> Result:
    result = Result(shape.model, str(shape), case.name, case.matmuls)
    if time.monotonic() > limit:
        result.times = dict.fromkeys(wanted, LATE)
        return result
    compute = torch.bfloat16 if case.autocast else settings.torch_dtype
    try:
        torch.manual_seed(0)
        inputs = Inputs.create(shape, case, settings)
        floor = make_floor(case, inputs, compute)
        few = inputs.first(ERROR_ROWS)
        bonus = few.bonus if case.entropy_gradient else None
        exact = Exact(few.x, few.w, few.t, few.coefficients, bonus, compute)
        if case.gradients:
            result.errors[ONE_MATMUL] = exact.matmul_errors()
    except Exception as error:  # a shape that does not fit must not end the run
        result.times = dict.fromkeys(wanted, failure_text(error))
        return result
    for name, make in wanted.items():
        if time.monotonic() > limit:
            result.times[name] = LATE
            continue
        try:
            function = make()
            step = partial(run_provider, function, case, inputs)
            result.peak_mib[name] = peak_mib(step, settings.device)
            result.floors[name], result.times[name] = _in_turns(floor, step, settings)
            if name == COMPILED:  # avoids a compilation for other rows
                name, function = EAGER, full_logits
            result.errors[name] = exact.errors(*run_provider(function, case, few))
        except Exception as error:  # a peer that cannot run this shape must not end the run
            result.times.setdefault(name, failure_text(error))
        if settings.device == "cuda":
            with contextlib.suppress(Exception):  # after a failed kernel; the next call raises the error, too
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    return result


def _in_turns(floor: Callable, step: Callable, settings: suite.Settings) -> tuple[Timing, Timing]:
    """Times as many rounds as fit into the time."""
    if settings.device == "cpu":
        timed = time_cpu({"floor": floor, "step": step}, seconds=0.1)
        return timed["floor"], timed["step"]
    samples: list[tuple[float, float]] = []
    end = time.monotonic() + SECONDS
    least = LEAST
    while len(samples) < least or (len(samples) < MOST and time.monotonic() < end):
        floor_time, step_time = flce.time_beside_floor(floor, step, rounds=1, burst=1)
        samples.append((floor_time.median, step_time.median))
        least = LEAST - (step_time.median > SLOW * floor_time.median)
    floors, times = zip(*samples, strict=True)
    return Timing.from_samples(list(floors)), Timing.from_samples(list(times))


# Tables and the picture


def _merged(results: list[Result]) -> list[Result]:
    """Merges the records of each shape and case."""
    found: dict[tuple[str, str], Result] = {}
    for result in results:
        known = found.setdefault((result.shape, result.case), Result(**_fields(result)))
        for name in ("floors", "times", "peak_mib", "errors"):
            setattr(known, name, getattr(known, name) | getattr(result, name))
    return list(found.values())


def _fields(result: Result) -> dict[str, object]:
    """Fields of a record, also of one that was read from a file."""
    return {each.name: getattr(result, each.name) for each in dataclasses.fields(Result)}


def _cell(result: Result, name: str) -> str:
    found = result.times.get(name)
    if isinstance(found, str):
        return found if found == LATE else f"fails: {found}"
    return flce.cell(result, name)


def line(result: Result) -> str:
    cells = "; ".join(f"{name}: {_cell(result, name)}" for name in result.times)
    return f"{result.model}, {result.shape}, {result.case}: {cells}"


def table(results: list[Result], settings: suite.Settings) -> list[suite.Grid]:
    merged = _merged(results)
    shapes = list(dict.fromkeys((result.model, result.shape) for result in merged))
    by_shape = {shape: [result for result in merged if result.shape == shape] for _, shape in shapes}
    times = [_times(f"{model}, {shape}", by_shape[shape], settings) for model, shape in shapes]
    return times + [_errors(f"{model}, {shape}", by_shape[shape], settings) for model, shape in shapes]


def _times(title: str, results: list[Result], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{title}, {settings.dtype}: time, time of the needed matmuls (timed in turns) over it, and peak "
        "memory above the inputs",
        ["", *[result.case for result in results]],
    )
    floors = [[suite.duration(timing) for timing in result.floors.values()][:1] or [""] for result in results]
    matmuls = (f"{floor}, {result.matmuls}" for (floor,), result in zip(floors, results, strict=True))
    grid.rows.append(["the needed matmuls", *matmuls])
    for name in suite.provider_names(result.times for result in results):
        grid.rows.append([name, *[_cell(result, name) for result in results]])
    return grid


def _errors(title: str, results: list[Result], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{title}, {settings.dtype}, at most {ERROR_ROWS} rows: errors of log-probabilities and entropy (nats), dx and "
        "dweight (relative), roots of the mean square, against float64 over the rounded logits",
        ["", *[result.case for result in results]],
    )
    for name in suite.provider_names(result.errors for result in results):
        grid.rows.append([name, *[str(result.errors.get(name, "")) for result in results]])
    return grid


def draw(results: list[Result], settings: suite.Settings, folder: Path) -> list[Path]:
    drawn = [result for result in _merged(results) if result.case == DRAWN and result.floors]
    return suite.side_by_side(drawn, _plot_over_memory, folder / f"log_probs_{settings.device}_{settings.dtype}.png")


def _plot_over_memory(axis, result: Result) -> None:
    """Plots time over memory, less is better: a labelled line for our op, a point for each peer."""
    ours = []
    for i, name in enumerate(result.times):
        timing = result.times[name]
        if not isinstance(timing, Timing) or result.peak_mib[name] <= 0:  # on a CPU it may be too small to measure
            continue
        point = result.peak_mib[name], timing.median / 1e3
        if name.startswith(OURS):
            ours.append((*point, name.partition(", ")[2] or "auto"))
        else:
            axis.plot(*point, "o", color=suite.colour(name, i), label=name)
    ours.sort()
    if ours:
        memory, times, _ = zip(*ours, strict=True)
        axis.plot(memory, times, "o-", color=suite.colour(OURS, 0), label=OURS, zorder=3)
        for _, group in itertools.groupby(ours, lambda point: round(math.log(point[0], 1.03))):  # one point per plan
            same = list(group)
            text = ", ".join(name for *_, name in same)
            axis.annotate(text, same[0][:2], fontsize=7, xytext=(2, 6), textcoords="offset points", rotation=30)
    floor = next(iter(result.floors.values())).median / 1e3
    axis.axhline(floor, color="k", linestyle="--", linewidth=1, label="the needed matmuls")
    flce.over_memory(axis, "milliseconds", f"{result.model}: {result.shape}")
