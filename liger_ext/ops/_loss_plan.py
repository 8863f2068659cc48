"""Chooses the fused loss's plan: how the rows and classes of its logits are cut into chunks, and where the gradient of
the logits is stored until the matmuls that use it.

``candidates`` lists plans. csrc/trace runs the op's code with tensors without data, and so computes each plan's memory
and estimates its time on the device ("trace"). ``front`` drops every plan that another plan beats in both. Among the
remaining plans, a level of ``memory`` or a number of bytes selects one. A plan depends only on facts that are the same
from call to call, never on the free memory, so that the same call gives the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from typing import Any, NamedTuple

import torch

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, accumulator, condition_holds
from liger_ext.ops._compile import assume_constant_result
from liger_ext.ops._loss_arguments import FusedLossCall, LossArguments
from liger_ext.ops._loss_devices import DEVICES, Device

LEVELS = ("fast", "auto", "low", "min")
SMALLEST = "smallest chunks"  # a level for tests: 128 rows, and 1,024 classes if sizes are known

_OP = "fused_linear_cross_entropy"
_DEFERRED, _OVERLAID = int(_C.Gradients.deferred), int(_C.Gradients.overlaid)
_LEAST_ROWS, _LEAST_CLASSES = 128, 1024  # the smallest chunk of logits
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # chunk counts
_WIDE_CHUNKS = (128, 256, 512, 1024, 2048)  # rows of a chunk of wide (float32) logits whose gradient is stored
_PARTS = 16  # steps from storing the gradients that fit in dweight's memory to storing all
_GRAPH_ROWS = 16_384  # the rows for which a graph is planned; it may serve any number of rows
_SLOWEST = 4  # plans that take more than this multiple of the least time are dropped, whatever memory they save
_CHUNK_BYTES = 64 << 20  # the least bytes of logits for chunk_rows: smaller chunks save too little
_GPU_SHARE = 8  # the levels except "min" take at most 1/8 of a GPU's memory beside the gradients, if a plan fits
_ROW_MULTIPLE = _C.padded_vocab(1)
_PER_ROW, _ONCE = 64, 1 << 18  # allowances, in bytes, for allocations in Python: targets, a mask, results of all rows


class Level(str):
    """A level of ``memory`` for a call with ``free`` bytes (``FusedLossCall.free``)."""

    free: int

    def __new__(cls, name: str, free: int) -> Level:
        level = super().__new__(cls, name)
        level.free = free
        return level


def device(call: FusedLossCall) -> Device:
    return DEVICES[call.device]


class Plan(NamedTuple):
    """The strategy for the gradients (``_C.Gradients``, described in ``_fused_linear_op.py``), and the number of rows
    and of classes of logits that exist at a time. With ``_C.Gradients.overlaid``, ``classes`` is the number of classes
    whose gradient is stored. With wide logits (float32), ``rows`` is a chunk of the rows in every strategy."""

    gradients: int
    rows: int
    classes: int


class Choice(NamedTuple):
    """A plan, its peak memory in addition to the arguments (results included), an estimate of its time, and whether it
    runs a matmul twice."""

    plan: Plan
    bytes: int
    seconds: float
    recomputes: bool


def plan(call: FusedLossCall, memory: str | int | Plan) -> Plan:
    """Returns the plan of a call at a level of ``memory`` (one of ``LEVELS``), or within a number of bytes.

    While a graph is compiled, a level's chunks do not depend on the number of rows, so that a graph serves many sizes.
    Tests may pass a Plan: it is returned if the call's gradients permit it, otherwise a plan with the same chunks.

    Raises:
        ValueError: ``memory`` is neither a level nor a positive integer, or fewer bytes than the call needs.
    """
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory if _can_use(call, memory) else in_chunks(call, memory.rows, min(memory.classes, call.vocab))
    known = type(call.rows) is type(call.hidden) is type(call.vocab) is int and not torch.compiler.is_compiling()
    if memory == SMALLEST:
        return in_chunks(call, _LEAST_ROWS, min(_LEAST_CLASSES, call.vocab) if known else call.vocab)
    if known:
        if isinstance(memory, Level):
            call = call._replace(free=memory.free)
        return choose(call, memory if isinstance(memory, str) else int(memory)).plan
    return in_chunks(call, _graph_rows(call, memory), call.vocab)


@functools.lru_cache(maxsize=4096)
def choose(call: FusedLossCall, memory: str | int) -> Choice:
    """Returns the choice for a call whose number of rows is known."""
    found = front(call)
    if isinstance(memory, str):
        return _at_level(found, memory, call)
    fitting = [choice for choice in found if choice.bytes <= memory]
    if not fitting:
        raise ValueError(
            f"{_OP}: memory is {memory} bytes, expected at least {found[0].bytes}, or 'min', for {call.rows} rows of "
            f"{call.hidden} columns and {call.vocab} classes: gradients and temporary tensors"
        )
    return fitting[-1]


def _at_level(found: list[Choice], level: str, call: FusedLossCall) -> Choice:
    """Returns the choice of a level. ``"min"``: the least memory. The other levels take at most an eighth of a GPU's
    memory in addition to the gradients, if a plan fits. ``"fast"``: the least memory of the plans whose time is at most
    1 % above the least time. ``"auto"``: the same for 4 %, among plans that run no matmul twice. ``"low"``: the same
    for 20 %, among all plans. ``"auto"`` and ``"low"`` use up to ``call.free`` bytes in addition to the gradients if a
    plan that needs them is faster."""
    if level == "min":
        return found[0]
    profile = device(call).profile
    if profile is not None:
        most = _results(call) + profile.memory_bytes // _GPU_SHARE
        found = [choice for choice in found if choice.bytes <= most] or found[:1]
    if level == "fast":
        return _least_memory(found, 1.01)
    once = [choice for choice in found if not choice.recomputes] or found
    chosen = _least_memory(found, 1.2) if level == "low" else _least_memory(once, 1.04)
    return [choice for choice in found if choice.bytes <= max(chosen.bytes, _results(call) + call.free)][-1]


def _least_memory(found: list[Choice], times: float) -> Choice:
    """Returns the choice of a front with the least memory whose time is at most ``times`` the least time."""
    return next(choice for choice in found if choice.seconds <= times * found[-1].seconds)


@functools.lru_cache(maxsize=4096)
def front(call: FusedLossCall) -> list[Choice]:
    """Returns the candidates that no other beats in memory and time, from the least memory to the least time. None
    takes more than four times the least time."""
    choices = costs(call, candidates(call))
    slowest = _SLOWEST * min(choice.seconds for choice in choices)
    choices = [choice for choice in choices if choice.seconds <= slowest]
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bytes, choice.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def costs(call: FusedLossCall, plans: list[Plan]) -> list[Choice]:
    """Computes the memory of each plan and estimates its time."""
    arguments = call.arguments
    needed = max(call.rows, 1) * call.hidden * call.vocab * (1 + arguments.need_dx + arguments.need_dweight)
    traces = _C.loss_costs(arguments, plans, True, *device(call))
    return [
        Choice(each, _with_python(call, traced), seconds, forward + backward > needed)
        for each, (traced, seconds, forward, backward) in zip(plans, traces, strict=True)
    ]


def _with_python(call: FusedLossCall, traced: int) -> int:
    """Returns the peak bytes of a call: those of the trace, and Python's allocations. With gathered rows Python copies
    the rows of x before the op, and their gradient into the gradient of x after it."""
    row = call.hidden * call.arguments.x.dtype.itemsize
    gathered = call.rows * row if call.all_rows else 0
    all_rows_gradient = call.all_rows * row if call.arguments.need_dx else 0
    beside = call.copies + max(call.rows, call.all_rows) * _PER_ROW + _ONCE
    return max(traced + gathered, _results(call) + all_rows_gradient) + beside


def _results(call: FusedLossCall) -> int:
    """Returns the bytes of the gradients of rows, weight and bias."""
    x, weight, bias = call.arguments.x, call.arguments.weight, call.arguments.bias
    needed = (call.arguments.need_dx, x), (call.arguments.need_dweight, weight), (call.arguments.need_dbias, bias)
    return sum(math.prod(t.shape) * t.dtype.itemsize for need, t in needed if need)


def candidates(call: FusedLossCall) -> list[Plan]:
    """Lists plans: chunks of rows; the gradient of all logits, or of some classes, in dweight's memory; chunks of rows
    and classes."""
    rows, vocab = max(call.rows, 1), call.vocab
    # Multiples of 256 rows: cuBLAS is slower for some odd multiples of 128 (docs/measurements.md).
    row_chunks = {min(rows, -(-rows // count // 256) * 256) for count in _CHUNKS}
    plans = [in_chunks(call, chunk, vocab) for chunk in sorted(row_chunks | {min(rows, _LEAST_ROWS)})]
    room = _C.overlaid_room(call.hidden, call.arguments.weight.dtype, call.compute) if can_overlay(call) else 0
    # Wide logits exist a chunk of rows at a time even if the gradient of all logits is stored.
    chunks = sorted({min(rows, chunk) for chunk in _WIDE_CHUNKS}) if call.wide_logits else [rows]
    if call.overlays and _can_use(call, Plan(_DEFERRED, rows, vocab)):
        plans += [Plan(_DEFERRED, chunk, vocab) for chunk in chunks]
    if vocab * room >= 64 * rows:
        inside = _C.overlaid_classes(rows, room, vocab)
        stored = {inside + (vocab - inside) * part // _PARTS // 64 * 64 for part in range(_PARTS)}
        stored = sorted((stored - {0}) | {vocab})
        plans += [Plan(_OVERLAID, chunk, classes) for classes in stored for chunk in chunks]
    few = (chunk for chunk in (128, 512, 2048, 8192) if chunk < 2 * rows)
    for chunk, classes in itertools.product(few, (1024, 4096, 16_384)):
        if classes < vocab:
            plans.append(in_chunks(call, min(chunk, rows), classes))
    return plans


def _can_use(call: FusedLossCall, plan: Plan) -> bool:
    """Whether a call can use a plan that ``in_chunks`` does not return: overlaid, or deferred with wide logits."""
    if plan.gradients == _OVERLAID:
        return can_overlay(call)
    if not call.wide_logits or plan.gradients != _DEFERRED:
        return False
    at_once = in_chunks(call, max(call.rows, 1), call.vocab)
    return at_once.gradients == _DEFERRED and plan.classes >= call.vocab


def can_overlay(call: FusedLossCall) -> bool:
    """Whether the gradient of the logits may be stored in dweight's memory. A matmul must be able to write dweight's
    dtype."""
    weight = call.arguments.weight.dtype
    writable = weight.is_floating_point and weight in (call.compute, accumulator(call.compute))
    return call.overlays and call.arguments.need_dweight and writable and call.rows * call.hidden > 0


def in_chunks(call: FusedLossCall, rows: int, classes: int) -> Plan:
    # If a graph is compiled and the number of chunks is unknown, `at_once` is False: sums over chunks are correct for
    # any number.
    at_once = condition_holds(call.rows <= rows) and condition_holds(call.vocab <= classes)
    dx, dweight, dbias = call.arguments.need_dx, call.arguments.need_dweight, call.arguments.need_dbias
    per_row = call.arguments.reduction == REDUCTIONS["none"]
    return Plan(_gradient_strategy(dx, dweight or dbias, at_once, per_row), rows, classes)


@assume_constant_result
def _gradient_strategy(need_dx: bool, need_parameters: bool, at_once: bool, per_row: bool) -> int:
    return int(_C.gradient_strategy(need_dx, need_parameters, at_once, per_row))


def check_memory(memory: object) -> None:
    number = isinstance(memory, numbers.Integral) and not isinstance(memory, bool) and memory > 0
    if not number and not isinstance(memory, Plan) and memory not in (*LEVELS, SMALLEST):
        levels = ", ".join(map(repr, LEVELS))
        raise ValueError(f"{_OP}: memory is {memory!r}, expected {levels} or a number of bytes, an integer above 0")


# Plans that only cut rows into chunks ------------------------------------------------------------------------------


def chunk_rows(call: FusedLossCall, level: str, at_once: bool = True) -> int:
    """Returns the number of rows of logits that may exist at a time at a level, for code without an overlaid plan; at
    least the rows of 64 MiB. at_once: whether one chunk may have all rows."""
    if level == SMALLEST:
        return _LEAST_ROWS
    return max(_chunk_rows(call._replace(overlays=False), str(level), at_once), _rows_within(call, _CHUNK_BYTES))


@functools.lru_cache(maxsize=4096)
def _chunk_rows(call: FusedLossCall, level: str, at_once: bool) -> int:
    found = [c for c in front(call) if c.plan.classes >= call.vocab and (at_once or c.plan.rows < call.rows)]
    return _at_level(found, level, call).plan.rows if found else max(call.rows, 1)


def head_chunk_rows(call: FusedLossCall, memory: str | int | Plan) -> int:
    """Returns the number of rows of logits that may exist at a time for a head module that is called for its logits.
    Its parameters are its own (LoRA, quantised weights), so the plan is that of a frozen head. ``"min"`` equals
    ``"low"``: smaller chunks would save less memory than the head's other tensors take."""
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory.rows
    call = call.replaced(need_dweight=False, need_dbias=False)
    if isinstance(memory, str):
        return _C.equal_chunks(call.rows, chunk_rows(call, "low" if memory == "min" else memory))
    return _C.equal_chunks(call.rows, _rows_within(call, int(memory) - 2 * _dx_bytes(call)))


def shard_rows(call: FusedLossCall, memory: str | int | Plan) -> int:
    """Returns the number of rows of logits that may exist at a time if the vocabulary is sharded over processes.

    ``call.vocab`` is the size of the largest shard. If all rows exist at once and the logits are not wide, their
    gradient is stored. Otherwise the backward recomputes the logits, so ``"low"`` is the least memory within 20 % of
    the fastest plan that recomputes them."""
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory.rows
    if isinstance(memory, str):
        sharded_call = call.replaced(reduction=REDUCTIONS["none"], normalizer=None)
        at_once = memory in ("fast", "auto") and not call.wide_logits
        return chunk_rows(sharded_call, "fast" if memory == "auto" else memory, at_once)
    taken = _results(call.replaced(need_dx=False, need_dbias=False))
    return _rows_within(call, int(memory) - taken - 3 * _dx_bytes(call))


def _dx_bytes(call: FusedLossCall) -> int:
    return call.rows * call.hidden * call.compute.itemsize if call.arguments.need_dx else 0


def _rows_within(call: FusedLossCall, logits_bytes: int) -> int:
    return max(logits_bytes // _row_bytes(call) // 128 * 128, _LEAST_ROWS)


def _row_bytes(call: FusedLossCall) -> int:
    gradient = call.arguments.need_dx or call.arguments.need_dweight or call.arguments.need_dbias
    wide = call.wide_logits * torch.float32.itemsize
    return padded_vocab(call.vocab) * (wide + (call.compute.itemsize if gradient or not wide else 0))


def _graph_rows(call: FusedLossCall, memory: str | int) -> int:
    """Returns the number of rows of logits that may exist at a time in a graph of torch.compile.

    The graph may serve any number of rows, and its backward allocates dweight beside the sum over chunks. A level takes
    the chunks of a call with 16,384 rows. For a number of bytes, traces compute the bytes of each row and the bytes
    that do not depend on the rows. The number of rows may be symbolic, so only ``condition_holds`` compares it.
    """
    # A graph is compiled for the sizes of the head: len(range(n)) has torch.compile specialise a symbolic n.
    hidden, vocab = len(range(call.hidden)), len(range(call.vocab))
    # torch.compile takes no layout as a constant.
    dtypes = [getattr(argument, "dtype", argument) for argument in call.arguments]
    if isinstance(memory, str):
        return _level_in_graph(memory, call.device, hidden, vocab, *dtypes)
    call_bytes, row_bytes = _bytes_in_graph(call.device, hidden, vocab, *dtypes)
    gathered = call.all_rows * call.hidden * 2 * call.arguments.x.dtype.itemsize
    others = call_bytes + call.rows * (row_bytes + _PER_ROW) + gathered + _ONCE
    least = others + _LEAST_ROWS * _row_bytes(call)
    if condition_holds(memory < least):
        raise ValueError(
            f"{_OP}: memory is {memory} bytes, expected at least {least} in a graph of torch.compile, for {call.rows} "
            f"rows of {call.hidden} columns and {call.vocab} classes: gradients and temporary tensors"
        )
    return _rows_within(call, memory - others)


def _call_in_graph(device: int, hidden: int, vocab: int, *arguments: Any) -> FusedLossCall:
    sizes = {"rows": _GRAPH_ROWS, "hidden": hidden, "vocab": vocab}
    return FusedLossCall(LossArguments(*arguments).with_sizes(**sizes), device, overlays=False)


@assume_constant_result
def _level_in_graph(level: str, *call: Any) -> int:
    return chunk_rows(_call_in_graph(*call), level, at_once=False)


@assume_constant_result
def _bytes_in_graph(*constants: Any) -> tuple[int, int]:
    """Returns the bytes of a graph's call in chunks of 128 rows: those that do not depend on the rows, without the
    logits of a chunk; and those of each row."""
    call = _call_in_graph(*constants)
    plan = in_chunks(call, _LEAST_ROWS, call.vocab)

    def traced(rows: int) -> int:
        return _C.loss_costs(call.resized(rows=rows).arguments, [plan], False, *device(call))[0][0]

    # The peak is the maximum of several sums that are linear in the rows. It is convex, so the bytes of a row are
    # largest at many rows.
    row_bytes = -(-(traced(2 * call.rows) - traced(call.rows)) // call.rows)
    return traced(_LEAST_ROWS) - _LEAST_ROWS * _row_bytes(call), row_bytes


def padded_vocab(vocab_size: int) -> int:
    """Returns ``_C.padded_vocab`` of a size that may be symbolic: the stride of the logits' rows, in elements."""
    return (vocab_size + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
