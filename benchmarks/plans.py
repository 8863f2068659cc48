"""Compares measured time and memory of the fused loss with the estimates that choose its plans
(liger_ext/ops/_loss_plan.py): at each level of memory and with limits in bytes between the levels, for shapes of
published models. Times are compared in milliseconds, and as multiples of the time of the three matmuls (logits, dx,
dweight). These matmuls are timed with the same operands, in turns with each measurement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import liger_ext.functional as LF
from liger_ext import _C
from liger_ext._loss_report import matmul_seconds
from liger_ext._timing import Timing, failure_text
from liger_ext.ops._loss_arguments import FusedLossCall
from liger_ext.ops._loss_devices import device_index
from liger_ext.ops._loss_plan import LEVELS, Choice, choose, front

from . import flce, suite
from .timing import free_at_once, peak_mib, time_cpu


class Shape(NamedTuple):
    """``per_row``: reduction "none"; ``autocast``: x and weight in fp32, matmuls in bf16; ``peers``: also time peers,
    and draw all."""

    model: str
    rows: int
    hidden: int
    vocab: int
    per_row: bool = False
    autocast: bool = False
    peers: bool = False

    def __str__(self) -> str:
        options = ", none" * self.per_row + ", autocast" * self.autocast
        return f"{self.rows}x{self.hidden}x{self.vocab}{options}"


SHAPES_CUDA = [
    Shape("Gemma 2 2B", 8192, 2304, 256_000, peers=True),
    Shape("Qwen 3 4B", 16_384, 2560, 151_936, peers=True),
    Shape("GPT-OSS 20B", 8192, 2880, 201_088, peers=True),
    Shape("Gemma 2 2B", 8192, 2304, 256_000, per_row=True),
    Shape("Gemma 2 2B", 32_768, 2304, 256_000),
    Shape("Llama 3.2 1B", 8192, 2048, 128_256),
    Shape("Llama 3.2 1B", 32_768, 2048, 128_256),
    Shape("Llama 3.2 3B", 8192, 3072, 128_256),
    Shape("Llama 3.2 1B", 16_384, 2048, 128_256, per_row=True),
    Shape("Llama 3 8B", 65_536, 4096, 128_256),
    Shape("Llama 3 8B", 8192, 4096, 128_256),
    Shape("Llama 3 8B", 16_384, 4096, 128_256),
    Shape("Llama 3 70B", 4096, 8192, 128_256),
    Shape("Llama 2 7B", 8192, 4096, 32_000),
    Shape("Llama 2 13B", 16_384, 5120, 32_000),
    Shape("Qwen 2.5 0.5B", 2048, 896, 151_936),
    Shape("Qwen 2.5 7B", 8192, 3584, 152_064),
    Shape("Qwen 2.5 14B", 4096, 5120, 152_064),
    Shape("Qwen 3 0.6B", 8192, 1024, 151_936),
    Shape("Qwen 3 1.7B", 8192, 2048, 151_936),
    Shape("Qwen 3 8B", 4096, 4096, 151_936),
    Shape("Qwen 3 8B", 8192, 4096, 151_936, autocast=True),
    Shape("Qwen 3 32B", 2048, 5120, 151_936),
    Shape("Gemma 2 9B", 4096, 3584, 256_000),
    Shape("Gemma 3 1B", 32_768, 1152, 262_144),
    Shape("Gemma 3 1B", 8192, 1152, 262_144, autocast=True),
    Shape("Gemma 3 4B", 8192, 2560, 262_208, per_row=True),
    Shape("Gemma 3 12B", 4096, 3840, 262_208),
    Shape("Gemma 3 27B", 2048, 5376, 262_208),
    Shape("Mistral 7B", 32_768, 4096, 32_768),
    Shape("Mistral Nemo 12B", 4096, 5120, 131_072),
    Shape("Phi 3 mini", 16_384, 3072, 32_064),
    Shape("Phi 4 mini", 4096, 3072, 200_064),
    Shape("Phi 4", 8192, 5120, 100_352),
    Shape("SmolLM2 135M", 32_768, 576, 49_152),
    Shape("SmolLM2 1.7B", 16_384, 2048, 49_152),
    Shape("DeepSeek V3", 4096, 7168, 129_280),
    Shape("GLM 4 9B", 8192, 4096, 151_552),
    Shape("Granite 3 2B", 8192, 2048, 49_155),
    Shape("OLMo 2 7B", 8192, 4096, 100_352),
    Shape("GPT-2", 16_384, 768, 50_257),
]
SHAPES_CPU = [
    Shape("tiny a", 128, 32, 4096, peers=True),
    Shape("tiny b", 64, 32, 2048, per_row=True, autocast=True),
]
SECONDS = 0.5  # GPU time per point
APART = 1.03  # two times, or memories, differ if their ratio is larger
OURS = "liger_ext"


@dataclass
class Result:
    """Points are named by the levels that choose their plan, or by their bytes; peers by their names."""

    model: str
    shape: str
    drawn: bool
    matmuls_ms: float  # predicted
    front: list[tuple[float, float]]  # predicted: MiB and milliseconds of each plan
    plans: dict[str, str] = field(default_factory=dict)  # of our points alone
    predicted_ms: dict[str, float] = field(default_factory=dict)
    predicted_mib: dict[str, float] = field(default_factory=dict)
    floors: dict[str, Timing] = field(default_factory=dict)  # timed in turns with each point
    times: dict[str, Timing | str] = field(default_factory=dict)
    peak_mib: dict[str, float] = field(default_factory=dict)  # above the inputs


def plan_call(shape: Shape, dtype: torch.dtype, device: torch.device) -> FusedLossCall:
    """The call by which the op chooses its plan."""
    dtype, compute = (torch.float32, torch.bfloat16) if shape.autocast else (dtype, None)
    sizes, reduction = (shape.rows, shape.hidden, shape.vocab), "none" if shape.per_row else "mean"
    return FusedLossCall.uniform(*sizes, dtype, device_index(device), reduction, compute_dtype=compute)


def memory_points(call: FusedLossCall) -> dict[str, tuple[str | int, Choice]]:
    """The values of ``memory`` to time, each with its plan: every level, and two numbers of bytes between them."""
    chosen = {level: choose(call, level) for level in LEVELS}
    found: dict[str, tuple[str | int, Choice]] = {}
    for level, choice in chosen.items():
        found.setdefault(", ".join(same for same in LEVELS if chosen[same] == choice), (level, choice))
    others = [choice for choice in front(call) if choice not in chosen.values()]
    for place in sorted({len(others) // 3, 2 * len(others) // 3}) if others else ():
        found[f"{others[place].bytes / 2**20:,.0f} MiB"] = others[place].bytes, others[place]
    return found


def timed_loss(shape: Shape, memory: str | int) -> Callable:
    def loss(x, w, t):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=shape.autocast):
            reduction = "none" if shape.per_row else "mean"
            result = LF.fused_linear_cross_entropy(x, w, t, memory=memory, reduction=reduction)
        return result.sum() if shape.per_row else result

    return loss


def run(settings: suite.Settings) -> Iterator[Result]:
    if settings.device == "cpu":
        free_at_once()
    peers = {n: f for n, f in flce.providers().items() if not n.startswith(OURS) and settings.wants(n)}
    for shape in SHAPES_CPU if settings.device == "cpu" else SHAPES_CUDA:
        if settings.wants_model(shape.model):
            yield _measured(shape, settings, peers if shape.peers else {})


def _measured(shape: Shape, settings: suite.Settings, peers: dict[str, Callable]) -> Result:
    stored = dataclasses.replace(settings, dtype="fp32") if shape.autocast else settings
    x, w, t = flce.inputs(shape.rows, shape.hidden, shape.vocab, stored)
    call = plan_call(shape, settings.torch_dtype, x.device)
    floor = flce.make_floor(x.detach().to(call.compute), w.detach().to(call.compute), t)
    predicted = [(choice.bytes / 2**20, choice.seconds * 1e3) for choice in front(call)]
    result = Result(shape.model, str(shape), shape.peers, matmul_seconds(call) * 1e3, predicted)
    functions = {}
    for name, (memory, choice) in memory_points(call).items() if settings.wants(OURS) else ():
        functions[name] = timed_loss(shape, memory)
        way, rows, classes = choice.plan
        result.plans[name] = f"{_C.Gradients(way).name}, {rows} x {classes}"
        result.predicted_ms[name], result.predicted_mib[name] = choice.seconds * 1e3, choice.bytes / 2**20
    for name, function in (functions | peers).items():
        step = partial(flce.gradients, function, x, w, t)
        try:
            result.peak_mib[name] = peak_mib(step, settings.device)
            if settings.device == "cpu":
                timed = time_cpu({"floor": floor, name: step}, seconds=0.1)
                result.floors[name], result.times[name] = timed["floor"], timed[name]
            else:
                once = result.matmuls_ms + result.predicted_ms.get(name, result.matmuls_ms)
                rounds = min(max(3, int(SECONDS * 1e3 / (2 * once))), 12)
                result.floors[name], result.times[name] = flce.time_beside_floor(floor, step, rounds, burst=1)
        except Exception as error:  # a plan or a peer that cannot run this shape must not end the run
            result.times[name] = failure_text(error)
            if settings.device == "cuda":
                torch.cuda.synchronize()
    return result


# Tables and pictures


def _measured_points(result: Result) -> list[str]:
    return [name for name in result.plans if flce.floor_share(result, name) is not None]


def _predicted_share(result: Result, name: str) -> float:
    return result.matmuls_ms / result.predicted_ms[name]


def errors(results: list[Result]) -> dict[str, dict[str, float]]:
    """For each point and predicted quantity: the prediction divided by the measurement, minus 1."""
    found: dict[str, dict[str, float]] = {"time over that of three matmuls": {}, "time": {}, "memory": {}}
    relative, absolute, memory = found.values()
    for result in results:
        for name in _measured_points(result):
            point = f"{result.model} {result.shape}, {name}"
            relative[point] = flce.floor_share(result, name) / _predicted_share(result, name) - 1
            absolute[point] = result.predicted_ms[name] / (result.times[name].median / 1e3) - 1
            if result.peak_mib[name] > 0:
                memory[point] = result.predicted_mib[name] / result.peak_mib[name] - 1
    return found


def dominated(result: Result) -> list[tuple[str, str]]:
    """Pairs (level, point): the point, another level or a limit in bytes, takes less time and memory than the level."""
    time = {name: 1 / flce.floor_share(result, name) for name in _measured_points(result)}
    peak = result.peak_mib
    return [
        (level, other)
        for level in time
        for other in time
        if level.partition(", ")[0] in LEVELS
        and time[level] > APART * time[other]
        and peak[level] > APART * peak[other]
    ]


def line(result: Result) -> str:
    cells = (f"{name}: {flce.cell(result, name)}" for name in result.times)
    return f"{result.model}, {result.shape}: {'; '.join(cells)}"


def table(results: list[Result], settings: suite.Settings) -> list[suite.Grid]:
    return [_points(results, settings), *_peers(results, settings), _errors(results), _dominated(results)]


def _points(results: list[Result], settings: suite.Settings) -> suite.Grid:
    grid = suite.Grid(
        f"{settings.dtype}: liger_ext, forward + backward: time, share (time of three matmuls, timed in turns, "
        "over it), and peak memory above the inputs, each with its prediction",
        ["model", "rows x hidden x vocab", "memory", "time", "share", "predicted", "MiB", "predicted", "plan"],
    )
    for result in results:
        for name, plan in result.plans.items():
            share, peak = flce.floor_share(result, name), result.peak_mib.get(name)
            grid.rows.append([
                result.model,
                result.shape,
                name,
                suite.duration(result.times[name]),
                "" if share is None else f"{share:.3f}",
                f"{_predicted_share(result, name):.3f}",
                "" if peak is None else f"{peak:,.0f}",
                f"{result.predicted_mib[name]:,.0f}",
                plan,
            ])  # fmt: skip
    return grid


def _peers(results: list[Result], settings: suite.Settings) -> list[suite.Grid]:
    names = [
        name for name in suite.provider_names(r.times for r in results) if not any(name in r.plans for r in results)
    ]
    grid = suite.Grid(f"{settings.dtype}: peers, with the same columns", ["model", "rows x hidden x vocab", *names])
    for result in results:
        if any(name in result.times for name in names):
            grid.rows.append([result.model, result.shape, *[flce.cell(result, name) for name in names]])
    return [grid] if names else []


def _errors(results: list[Result]) -> suite.Grid:
    grid = suite.Grid(
        "error of the prediction, relative", ["of", "points", "median", "90th percentile", "largest", "where"]
    )
    for what, found in errors(results).items():
        if not found:
            continue
        sizes = sorted(map(abs, found.values()))
        where = max(found, key=lambda point: abs(found[point]))
        median, most = (sizes[math.ceil(share * len(sizes)) - 1] for share in (0.5, 0.9))
        numbers = [f"{median:.1%}", f"{most:.1%}", f"{found[where]:+.1%}"]
        grid.rows.append([what, str(len(sizes)), *numbers, where])
    return grid


def _dominated(results: list[Result]) -> suite.Grid:
    share = f"{APART - 1:.0%}"
    grid = suite.Grid(
        f"levels that are slower and larger than another level or number of bytes, both by more than {share}",
        ["model", "rows x hidden x vocab", "level", "", "better", ""],
    )
    for result in results:
        for level, better in dominated(result):
            cells = level, flce.cell(result, level), better, flce.cell(result, better)
            grid.rows.append([result.model, result.shape, *cells])
    grid.title += "" if grid.rows else ": none"
    return grid


def draw(results: list[Result], settings: suite.Settings, folder: Path) -> list[Path]:
    drawn = [result for result in results if result.drawn and result.floors]
    return suite.side_by_side(drawn, _plot_over_memory, folder / f"plans_{settings.device}_{settings.dtype}.png")


def _plot_over_memory(axis, result: Result) -> None:
    """Plots time over memory, less is better: a line for the predicted front, points for measurements."""
    red = suite.colour(OURS, 0)
    memory, milliseconds = zip(*result.front, strict=True)
    times = [each / result.matmuls_ms for each in milliseconds]
    axis.plot(memory, times, "-", color=red, linewidth=1, label=f"{OURS}, predicted")
    for i, name in enumerate(result.times):
        share, ours = flce.floor_share(result, name), name in result.plans
        if share is None or result.peak_mib[name] <= 0:  # a CPU's peak may be too small to measure
            continue
        point = result.peak_mib[name], 1 / share
        axis.plot(*point, "o", color=red if ours else suite.colour(name, i), label=OURS if ours else name, zorder=3)
        if ours and not name.endswith("MiB"):
            axis.annotate(name, point, fontsize=7, xytext=(2, 4), textcoords="offset points", rotation=30)
    axis.axhline(1, color="k", linestyle="--", linewidth=1, label="three matmuls")
    flce.over_memory(axis, "time / three matmuls", f"{result.model}: {result.shape}")
