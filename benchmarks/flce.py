"""Times the fused linear cross entropy of liger_ext at each level of memory (``memory="fast"`` to ``"min"``), that of
other libraries, and PyTorch's functions, forward and backward. The floor is the time of the three matmuls that all of
them run (logits, dx, dweight), for all rows, in the same run; liger_ext leaves out rows whose target is ignored. A
share is floor / time. The table also has peak memory, and errors against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.ticker import LogLocator, MaxNLocator

import liger_ext.functional as LF
from liger_ext._timing import Timing, failure_text
from liger_ext.ops._loss_plan import LEVELS

from . import suite
from .flce_errors import MATMUL, Errors, Exact
from .installed import Peer, installed_functions
from .timing import peak_mib, time_cpu

# Rows, hidden size, vocabulary, and the share of ignored targets.
SHAPES_CUDA = [
    (4096, 2048, 128256, 0),
    (4096, 4096, 128256, 0),
    (8192, 4096, 128256, 0),
    (8192, 4096, 128256, 0.5),
    (8192, 4096, 32000, 0),
    (16384, 4096, 128256, 0),
    (32768, 2048, 128256, 0),
]
SUM = "rounded sum"
SHAPES_CPU = [(1024, 576, 49152, 0), (1024, 576, 49152, 0.5), (512, 2048, 32000, 0)]


@dataclass
class Result:
    shape: str
    dtype: str
    floors: dict[str, Timing]  # timed in turns with each provider
    times: dict[str, Timing | str]
    peak_mib: dict[str, float]  # above the inputs (CUDA only)
    errors: dict[str, Errors]  # of each provider, and of one matmul of the stored gradient


def _eager(x, w, t):
    return F.cross_entropy((x @ w.T).float(), t)


_LIGER = "liger_kernel.ops.fused_linear_cross_entropy:LigerFusedLinearCrossEntropyFunction.apply"
PEERS = {
    "liger": Peer(_LIGER, lambda f, x, w, t: f(x, w, t)[0]),
    "liger, fp32 sum": Peer(
        _LIGER,
        lambda f, x, w, t: f(x, w, t, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32)[0],
    ),
    "cce": Peer("cut_cross_entropy:linear_cross_entropy"),
    "quack": Peer(
        "quack.linear_cross_entropy:chunked_linear_cross_entropy", lambda f, x, w, t: f(x, w, t, chunk_size=4096)
    ),
}


def providers(counted: bool = False) -> dict[str, Callable]:
    """counted: our providers count the targets that are not ignored and leave out the other rows, as a patched model
    does, but just before the loss."""
    compiled = torch.compile(_eager, dynamic=False)
    ours = {"liger_ext": partial(_ours, counted=counted)}
    for level in ("fast", "low", "min"):
        ours[f"liger_ext, {level}"] = partial(_ours, counted=counted, memory=level)
    for level in ("low", "min"):
        ours[f"liger_ext, {level}, {SUM}"] = partial(_ours, counted=counted, memory=level, sums=True)
    return {**ours, "torch": _eager, "torch.compile": compiled, **installed_functions(PEERS)}


def _ours(x, w, t, memory="auto", counted=False, sums=False):
    """sums: dweight's sums over chunks are rounded to its dtype, as in Liger-Kernel."""
    rows = LF.count_rows(t) if counted else None
    return LF.fused_linear_cross_entropy(x, w, t, memory=memory, rows=rows, accum_dtype=w.dtype if sums else None)


def time_beside_floor(floor: Callable, call: Callable, rounds: int = 12, burst: int = 3) -> tuple[Timing, Timing]:
    """Times whole steps as a user runs them, in turns with the floor and nothing else between. The GPU's clock depends
    on the power that the last matmuls drew: a floor that runs after a memory-bound peer is faster than one after
    another floor."""
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for timed, into in zip((floor, call), samples, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            timed()
            start.record()
            for _ in range(burst):
                timed()
            end.record()
            end.synchronize()
            into.append(start.elapsed_time(end) * 1e3 / burst)
    return Timing.from_samples(samples[0]), Timing.from_samples(samples[1])


def inputs(
    rows: int, hidden: int, vocab: int, settings: suite.Settings, ignored: float = 0
) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight and targets; logits have a standard deviation of 1."""
    x = torch.randn(rows, hidden, device=settings.device, dtype=settings.torch_dtype, requires_grad=True)
    w = (torch.randn(vocab, hidden, device=settings.device) * hidden**-0.5).to(settings.torch_dtype).requires_grad_()
    target = torch.randint(vocab, (rows,), device=settings.device)
    target[torch.randperm(rows)[: int(rows * ignored)]] = -100
    return x, w, target


def logits_gradient(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The gradient that the op multiplies: random numbers of both signs would draw more power, and slow down the
    floor."""
    out = torch.empty(len(x), len(w), device=x.device, dtype=x.dtype)
    for i in range(0, len(x), 1024):
        share = torch.softmax((x[i : i + 1024] @ w.T).float(), 1)
        share[torch.arange(len(share)), t[i : i + 1024].clamp(min=0)] -= 1
        out[i : i + 1024] = share
    return out


@torch.no_grad()
def make_floor(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> Callable[[], object]:
    """The three matmuls with these operands."""
    g = logits_gradient(x, w, t)

    @torch.no_grad()
    def floor():
        return x @ w.T, g @ w, g.T @ x

    return floor


def gradients(function: Callable, x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> object:
    return torch.autograd.grad(function(x, w, t), (x, w))


def run(settings: suite.Settings) -> Iterator[Result]:
    for rows, hidden, vocab, ignored in SHAPES_CPU if settings.device == "cpu" else SHAPES_CUDA:
        x, w, t = inputs(rows, hidden, vocab, settings, ignored)
        floor = make_floor(x, w, t)
        functions = {n: f for n, f in providers(counted=ignored > 0).items() if settings.wants(n)}
        calls = {name: partial(gradients, function, x, w, t) for name, function in functions.items()}
        shape = f"{rows}x{hidden}x{vocab}" + f", {ignored:.0%} ignored" * (ignored > 0)
        exact = Exact(x, w, t)
        result = Result(shape, settings.dtype, {}, {}, {}, {MATMUL: exact.matmul_errors()})
        for name, call in calls.items():
            try:
                if settings.device == "cpu":
                    timed = time_cpu({"floor": floor, name: call}, seconds=2.0)
                    result.floors[name], result.times[name] = timed["floor"], timed[name]
                else:
                    result.peak_mib[name] = peak_mib(call, settings.device)
                    result.floors[name], result.times[name] = time_beside_floor(floor, call)
                result.errors[name] = exact.errors(functions[name])
            except Exception as error:  # a peer that cannot run this shape must not end the run
                result.times[name] = failure_text(error)
                if settings.device == "cuda":
                    torch.cuda.synchronize()
        yield result
        del x, w, t, floor, calls, exact


def floor_share(result: Result, provider: str) -> float | None:
    timing = result.times.get(provider)
    return result.floors[provider].median / timing.median if isinstance(timing, Timing) else None


def line(result: Result) -> str:
    return f"{result.shape}: {cell(result, 'liger_ext')}"


def cell(result: Result, provider: str) -> str:
    share = floor_share(result, provider)
    if share is None:
        return "fails" if provider in result.times else ""
    peak = f", {result.peak_mib[provider]:,.0f} MiB" if provider in result.peak_mib else ""
    return f"{suite.duration(result.times[provider])}, {share:.2f}{peak}"


def table(results: list[Result], settings: suite.Settings) -> list[suite.Grid]:
    return [_times(results, settings), _errors(results, settings)]


def _errors(results: list[Result], settings: suite.Settings) -> suite.Grid:
    names = [name for name in suite.provider_names(result.errors for result in results) if name != MATMUL]
    grid = suite.Grid(
        f"{settings.dtype}: error of dweight and of the loss, relative, against float64 over logits and their gradient "
        f"rounded to {settings.dtype}",
        ["rows x hidden x vocab", MATMUL, *names],
    )
    for result in results:
        cells = [result.errors.get(name) for name in (MATMUL, *names)]
        grid.rows.append([result.shape, *["" if cell is None else str(cell) for cell in cells]])
    return grid


def _times(results: list[Result], settings: suite.Settings) -> suite.Grid:
    names = suite.provider_names(result.times for result in results)
    grid = suite.Grid(
        f"{settings.dtype}: forward + backward: time, time of three matmuls (timed in turns) over it, "
        "and peak memory above the inputs",
        ["rows x hidden x vocab", "three matmuls", *names],
    )
    for result in results:
        floor = suite.duration(next(iter(result.floors.values()))) if result.floors else ""
        grid.rows.append([result.shape, floor, *[cell(result, name) for name in names]])
    return grid


def draw(results: list[Result], settings: suite.Settings, folder: Path) -> list[Path]:
    picture, (axis,) = suite.figure(1, width=18)
    names = suite.provider_names(result.times for result in results)
    shares = {name: [floor_share(result, name) for result in results] for name in names}
    suite.bars(axis, [result.shape for result in results], shares, "three matmuls / forward + backward")
    axis.axhline(1, color="k", linestyle="--", linewidth=1)
    axis.set_title("fused linear cross entropy beside its floor (rows x hidden x vocab)")
    pictures = [suite.save(picture, folder / f"flce_{settings.device}_{settings.dtype}.png")]
    measured = [result for result in results if result.peak_mib]
    if measured:
        columns = min(4, len(measured))
        picture, axes = suite.figure(columns, width=4.4, height=3.4, rows=-(-len(measured) // columns))
        for axis in axes[len(measured) :]:
            axis.remove()
        for axis, result in zip(axes, measured, strict=False):
            _plot_over_memory(axis, result, [name for name in names if any(name in each.peak_mib for each in measured)])
        pictures.append(suite.save(picture, folder / f"flce_memory_{settings.device}_{settings.dtype}.png"))
    return pictures


def _plot_over_memory(axis, result: Result, names: list[str]) -> None:
    """Plots peak memory and time of each provider, less is better; a line joins our levels, which are labelled."""
    ours = []
    for i, name in enumerate(names):
        timing, peak = result.times.get(name), result.peak_mib.get(name)
        if not isinstance(timing, Timing) or peak is None:
            continue
        point = peak, timing.median / 1e3
        if name.endswith(SUM):
            axis.plot(*point, "o", fillstyle="none", color=suite.colour("liger_ext", 0), label=f"liger_ext, {SUM}")
        elif name.startswith("liger_ext"):
            level = name.partition(", ")[2] or "auto"
            ours.append((LEVELS.index(level), level, point))
        else:
            axis.plot(*point, "o", color=suite.colour(name, i), label=name)
    ours.sort()
    points = [point for *_, point in ours]
    axis.plot(*zip(*points, strict=True), "o-", color=suite.colour("liger_ext", 0), label="liger_ext", zorder=3)
    named = {", ".join(level for _, level, other in ours if close(point, other)): point for point in points}
    for text, point in named.items():
        axis.annotate(text, point, fontsize=7, xytext=(2, 4), textcoords="offset points", rotation=30)
    floor = next(iter(result.floors.values())).median / 1e3
    axis.axhline(floor, color="k", linestyle="--", linewidth=1, label="three matmuls")
    over_memory(axis, "milliseconds", result.shape)


def over_memory(axis, label: str, title: str) -> None:
    axis.set(xlabel="peak MiB above the inputs", ylabel=label, title=title)
    least, most = axis.dataLim.intervalx
    if most > 10 * least:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    else:
        axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.set_minor_formatter("")
    axis.margins(x=0.15)
    axis.set_ylim(0)


def close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Returns whether the points coincide in the picture."""
    return all(abs(a - b) <= 0.03 * a for a, b in zip(one, other, strict=True))
