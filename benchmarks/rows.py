"""Row ops: each case is a function of its inputs, given once per provider, and the bytes it must move at least.

Efficiency = time of a copy moving the same bytes / time of the op. Bytes are ideal: each input read once, each output
written once. The forward is timed with gradients recorded, the backward through autograd: the code that users call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import liger_ext.functional as LF
from liger_ext import _shapes
from liger_ext._timing import Timing, backward_call, failure, forward_call, on_a_stream_of_its_own

from . import eager, peers, suite
from .timing import time_calls, time_copy


@dataclass
class Case:
    op: str
    shape: str
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    functions: dict[str, Callable]  # provider -> function of the inputs
    forward_bytes: int
    backward_bytes: int


@dataclass
class Row:
    op: str
    shape: str
    dtype: str
    direction: str
    moved_bytes: int
    copy: Timing
    times: dict[str, Timing | str]


def _with_compile(functions: dict[str, Callable], plain: Callable) -> dict[str, Callable]:
    return functions | {"torch": plain, "torch.compile": torch.compile(plain, dynamic=False)}


def cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    size = dtype.itemsize
    small = device == "cpu"

    def param(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)

    norms = [(2048, 576), (2048, 4096)] if small else _shapes.NORMS
    only_rms = [] if small else _shapes.RMS_NORMS
    for rows, cols in norms + only_rms:
        matrix, stat = rows * cols * size, rows * 4
        inputs = lambda r=rows, c=cols: (param(r, c), param(c))  # noqa: E731
        yield Case(
            "rms_norm",
            f"{rows}x{cols}",
            inputs,
            _with_compile({"liger_ext": LF.rms_norm} | peers.rms_norm(), eager.rms_norm),
            2 * matrix + stat,
            3 * matrix + stat,
        )
        if (rows, cols) in only_rms:
            continue
        yield Case(
            "add_rms_norm",
            f"{rows}x{cols}",
            lambda r=rows, c=cols: (param(r, c), param(r, c), param(c)),
            _with_compile({"liger_ext": LF.add_rms_norm} | peers.add_rms_norm(), eager.add_rms_norm),
            4 * matrix + stat,
            4 * matrix + stat,
        )
        yield Case(
            "layer_norm",
            f"{rows}x{cols}",
            lambda r=rows, c=cols: (param(r, c), param(c), param(c)),
            _with_compile(
                {"liger_ext": LF.layer_norm} | peers.layer_norm(),
                eager.layer_norm,
            ),
            2 * matrix + 2 * stat,
            3 * matrix + 2 * stat,
        )

    rows, cols = norms[-1] if small else (8192, 4096)
    frozen = torch.ones(cols, device=device, dtype=dtype)
    yield Case(
        "rms_norm, frozen weight",
        f"{rows}x{cols}",
        lambda: (param(rows, cols), frozen),
        _with_compile({"liger_ext": LF.rms_norm} | peers.rms_norm(), eager.rms_norm),
        2 * rows * cols * size + 4 * rows,
        3 * rows * cols * size + 4 * rows,
    )

    glus = [(2048, 1536), (1024, 11008)] if small else _shapes.GLUS
    only_two_tensors = [] if small else glus[1:]
    for rows, cols in glus:
        matrix = rows * cols * size
        inputs = lambda r=rows, c=cols: (param(r, c), param(r, c))  # noqa: E731
        yield Case(
            "swiglu",
            f"{rows}x{cols}",
            inputs,
            _with_compile({"liger_ext": LF.swiglu} | peers.swiglu(), eager.swiglu),
            3 * matrix,
            5 * matrix,
        )
        yield Case(
            "geglu",
            f"{rows}x{cols}",
            inputs,
            _with_compile({"liger_ext": LF.geglu} | peers.geglu(), eager.geglu),
            3 * matrix,
            5 * matrix,
        )
        if (rows, cols) in only_two_tensors:
            continue
        yield Case(
            "geglu, exact",
            f"{rows}x{cols}",
            inputs,
            _with_compile(
                {"liger_ext": partial(LF.geglu, approximate="none")}, partial(eager.geglu, approximate="none")
            ),
            3 * matrix,
            5 * matrix,
        )
        yield Case(
            "swiglu, packed",
            f"{rows}x{cols}",
            lambda r=rows, c=cols: (param(r, 2 * c),),
            _with_compile({"liger_ext": LF.swiglu_packed}, lambda packed: eager.swiglu(*packed.chunk(2, -1))),
            3 * matrix,
            5 * matrix,
        )

    # Batch, sequence, heads, head_dim, and how much of it is rotated.
    ropes = [(1, 2048, 9, 3, 64, 64), (1, 2048, 32, 8, 128, 128)] if small else _shapes.ROPES
    for batch, seq, q_heads, k_heads, dim, rotary in ropes:

        def inputs(b=batch, s=seq, hq=q_heads, hk=k_heads, d=dim, r=rotary):
            q, k = (
                torch.randn(b, s, h, d, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for h in (hq, hk)
            )
            angle = torch.rand(1, s, r // 2, device=device).repeat(1, 1, 2) * 6.28
            return q, k, angle.cos().to(dtype), angle.sin().to(dtype)

        moved = 2 * batch * seq * (q_heads + k_heads) * dim * size
        yield Case(
            "rope" if rotary == dim else "rope, partial",
            f"B{batch} S{seq} {q_heads}+{k_heads} D{dim}" + (f" of which {rotary}" if rotary < dim else ""),
            inputs,
            _with_compile({"liger_ext": LF.rope} | (peers.rope() if rotary == dim else {}), eager.rope),
            moved,
            moved,
        )

    for rows, cols in [(2048, 32768)] if small else _shapes.SOFTMAXES:
        matrix = rows * cols * size
        yield Case(
            "softmax",
            f"{rows}x{cols}",
            lambda r=rows, c=cols: (param(r, c),),
            _with_compile({"liger_ext": LF.softmax} | peers.softmax(), eager.softmax),
            2 * matrix,
            3 * matrix,
        )

    for rows, vocab in [(1024, 49152)] if small else _shapes.LOSSES:
        matrix = rows * vocab * size
        yield Case(
            "cross_entropy",
            f"{rows}x{vocab}",
            lambda r=rows, v=vocab: (param(r, v), torch.randint(v, (r,), device=device)),
            _with_compile({"liger_ext": LF.cross_entropy} | peers.cross_entropy(), eager.cross_entropy),
            matrix,
            2 * matrix,
        )


def run(settings: suite.Settings) -> Iterator[Row]:
    """Times every case, forward and backward; yields a row as soon as it is measured."""
    for case in cases(settings.torch_dtype, settings.device):
        if settings.wants_op(case.op):
            with on_a_stream_of_its_own(settings.device):
                yield from _run_case(case, settings)


def _run_case(case: Case, settings: suite.Settings) -> Iterator[Row]:
    functions = {name: f for name, f in case.functions.items() if settings.wants(name)}
    inputs = case.inputs()
    for direction, bind, moved in (
        ("forward", forward_call, case.forward_bytes),
        ("backward", backward_call, case.backward_bytes),
    ):
        calls, failed = {}, {}
        for name, function in functions.items():
            try:
                calls[name] = bind(function, inputs)
            except Exception as error:  # a peer that cannot run this case
                failed[name] = failure(error)
        # A read-only op's limit is still the copy's rate: the same bytes over the same time.
        yield Row(
            case.op,
            case.shape,
            settings.dtype,
            direction,
            moved,
            time_copy(moved, settings.device),
            time_calls(calls, settings.device) | failed,
        )


def line(row: Row) -> str:
    return f"{row.op} {row.shape} {row.direction}: {_cell(row, 'liger_ext')}"


def _cell(row: Row, provider: str) -> str:
    timing = row.times.get(provider, "")
    if not timing:
        return ""
    return suite.duration(timing) + (f" ({row.copy.median / timing.median:.2f})" if isinstance(timing, Timing) else "")


def table(rows: list[Row], settings: suite.Settings) -> suite.Grid:
    names = suite.names_of(row.times for row in rows)
    grid = suite.Grid(
        f"{settings.dtype}: time, and the time of a copy of the same number of bytes over it",
        ["op", "shape", "", "copy", *names],
    )
    for row in rows:
        cells = [_cell(row, name) for name in names]
        grid.rows.append([row.op, row.shape, row.direction, suite.duration(row.copy), *cells])
    return grid


def draw(rows: list[Row], settings: suite.Settings, folder: Path) -> list[Path]:
    """One picture an op: bandwidth over the shapes, in the order of their rows' lengths, with the copy's."""
    pictures = []
    for op in dict.fromkeys(row.op for row in rows):
        made, axes = suite.figure(2)
        for axis, direction in zip(axes, ("forward", "backward"), strict=True):
            chosen = [row for row in rows if row.op == op and row.direction == direction]
            chosen.sort(key=lambda row: (_row_length(row.shape), row.moved_bytes))
            rate = lambda row, timing: row.moved_bytes / timing.median / 1e3  # noqa: E731
            shapes = range(len(chosen))
            axis.plot(shapes, [rate(r, r.copy) for r in chosen], "k--", linewidth=1, label="copy")
            for i, name in enumerate(suite.names_of(row.times for row in chosen)):
                timed = [(x, r.times[name]) for x, r in zip(shapes, chosen, strict=True)]
                points = [(x, rate(chosen[x], t)) for x, t in timed if isinstance(t, Timing)]
                axis.plot(*zip(*points, strict=True), "o-", label=name, color=suite.colour(name, i))
            axis.set_xticks(shapes, [row.shape for row in chosen], rotation=30, ha="right", fontsize=8)
            axis.set_ylim(bottom=0)
            axis.set_ylabel("GB/s of ideal bytes")
            axis.set_title(f"{op}, {direction}, {settings.dtype}")
            axis.legend(fontsize=8)
        name = op.replace(",", "").replace(" ", "_")
        pictures.append(suite.save(made, folder / f"rows_{settings.device}_{settings.dtype}_{name}.png"))
    return pictures


def _row_length(shape: str) -> int:
    return int("".join(c if c.isdigit() else " " for c in shape).split()[-1])
