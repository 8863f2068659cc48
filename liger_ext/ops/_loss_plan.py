"""Chooses the fused loss's plan: how its rows and classes are cut into chunks, and where the gradient of the logits is
stored until the matmuls that use it.

``candidates`` lists the plans that are worth a look. A trace of the op's own code (csrc/trace) gives the memory of each
and an estimate of its time on the device. ``front`` keeps those that no other plan beats in both, and a level of
``memory``, or a number of bytes, picks one of them. A plan depends only on facts that are the same from call to call,
never on how much memory is free, so that the same call gives the same bits.
"""

from __future__ import annotations

import functools
import itertools
import numbers
from typing import NamedTuple

import torch

from liger_ext import _C
from liger_ext.ops._checks import accumulator, holds
from liger_ext.ops._compile import assume_constant_result
from liger_ext.ops._loss_devices import DEVICES, Device

LEVELS = ("fast", "auto", "low", "min")
SMALLEST = "smallest chunks"  # a level for tests: 128 rows, and 1,024 classes where sizes are known

_OP = "fused_linear_cross_entropy"
_DEFERRED, _OVERLAID = int(_C.Gradients.deferred), int(_C.Gradients.overlaid)
_LEAST_ROWS, _LEAST_CLASSES = 128, 1024  # the smallest chunk of logits
_CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # of rows, in a call
_WIDE_CHUNKS = (128, 256, 512, 1024, 2048)  # rows of wide logits where their gradient is stored
_PARTS = 16  # steps between storing the gradients that fit dweight's memory, and storing all
_GRAPH_ROWS = 16_384  # for a graph, which may serve any number of rows
_SLOWEST = 4  # times the least time: no memory is worth more
_CHUNK_BYTES = 64 << 20  # of logits, where rows alone are cut: smaller chunks save too little
_SHARE_OF_GPU = 8  # the levels but "min" take at most this part of a GPU's memory beside the gradients
_ROW_MULTIPLE = _C.padded_vocab(1)
_PER_ROW, _ONCE = 64, 1 << 18  # allowances for what Python allocates: targets, a mask, results of all rows


class Call(NamedTuple):
    """The facts of a call on which its plan depends.

    ``rows`` may be symbolic. ``compute`` is the dtype of the matmuls, ``bias`` that of a bias, None without one;
    ``sum`` that in which dweight is summed over chunks, None for the accumulator's. ``device``: from ``device_of``.
    ``overlays``: may the gradient of the logits be stored in the memory that becomes dweight? ``all_rows``: rows of x,
    from which ``rows`` are gathered, or 0. ``copies``: bytes of the arguments' copies that matmuls can read. ``free``:
    bytes beside the gradients that cost nothing, since other code needs as much at another time. ``moments``: are
    entropies, or the like, wanted? ``temperature``: are there temperatures, or a scale of the logits?
    ``wide_logits``: are logits in float32, and the operands of matmuls in 16 bits?
    """

    rows: int
    hidden: int
    vocab: int
    compute: torch.dtype
    x: torch.dtype
    weight: torch.dtype
    device: int
    bias: torch.dtype | None = None
    class_weight: torch.dtype | None = None
    sum: torch.dtype | None = None
    dx: bool = True
    dweight: bool = True
    dbias: bool = False
    per_row: bool = False
    label_smoothing: bool = False
    softcap: bool = False
    token_scaling: bool = False
    z_loss: bool = False
    token_accuracy: bool = False
    predicted_tokens: bool = False
    moments: bool = False
    temperature: bool = False
    wide_logits: bool = False
    overlays: bool = True
    all_rows: int = 0
    copies: int = 0
    free: int = 0

    @classmethod
    def of(cls, rows: int, hidden: int, vocab: int, dtype: torch.dtype, device: int, **facts: object) -> Call:
        """A call whose tensors have one dtype."""
        return cls(rows, hidden, vocab, dtype, dtype, dtype, device, **facts)


class Level(str):
    """A level of ``memory`` for a call with ``free`` bytes (``Call.free``)."""

    free: int

    def __new__(cls, name: str, free: int) -> Level:
        level = super().__new__(cls, name)
        level.free = free
        return level


def device(call: Call) -> Device:
    return DEVICES[call.device]


class Plan(NamedTuple):
    """How the gradients are made (``_C.Gradients``); how many rows, and how many classes, of logits exist at a time;
    with ``_C.Gradients.overlaid``, ``classes`` is for how many classes the gradient is stored. Wide logits exist a
    chunk of rows at a time in every way."""

    gradients: int
    rows: int
    classes: int


class Choice(NamedTuple):
    """A plan, the most memory that it takes beside the arguments at a time, results included, an estimate of its time,
    and whether a matmul runs twice."""

    plan: Plan
    bytes: int
    seconds: float
    recomputes: bool


def plan(call: Call, memory: str | int | Plan) -> Plan:
    """What the call does at a level of ``memory``, one of ``LEVELS``, or within a number of bytes.

    It does not depend on a number of rows that is unknown while a graph is compiled, so that one graph serves every
    batch. A Plan is for tests: it is taken as far as it fits the gradients that are wanted.

    Raises:
        ValueError: ``memory`` is no level and no positive number, or fewer bytes than the call can do with.
    """
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory if _fits(call, memory) else in_chunks(call, memory.rows, min(memory.classes, call.vocab))
    known = type(call.rows) is int and not torch.compiler.is_compiling()
    if memory == SMALLEST:
        return in_chunks(call, _LEAST_ROWS, min(_LEAST_CLASSES, call.vocab) if known else call.vocab)
    if known:
        if isinstance(memory, Level):
            call = call._replace(free=memory.free)
        return choose(call, memory if isinstance(memory, str) else int(memory)).plan
    return in_chunks(call, _graph_rows(call, memory), call.vocab)


@functools.lru_cache(maxsize=4096)
def choose(call: Call, memory: str | int) -> Choice:
    """The plan of a call whose number of rows is known."""
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


def _at_level(found: list[Choice], level: str, call: Call) -> Choice:
    """``"min"``: the least memory. The others take at most an eighth of a GPU's memory beside the gradients, where a
    plan does. ``"fast"``: the least memory within 1 % of the least time. ``"auto"``: no matmul runs twice, and among
    those plans the least memory within 4 % of the least time. ``"low"``: the least memory within 20 %. ``free`` bytes
    beside the gradients are used by ``"auto"`` and ``"low"``."""
    if level == "min":
        return found[0]
    profile = device(call).profile
    if profile is not None:
        most = _results(call) + profile.memory_bytes // _SHARE_OF_GPU
        found = [choice for choice in found if choice.bytes <= most] or found[:1]
    if level == "fast":
        return _least_memory(found, 1.01)
    once = [choice for choice in found if not choice.recomputes] or found
    chosen = _least_memory(found, 1.2) if level == "low" else _least_memory(once, 1.04)
    return [choice for choice in found if choice.bytes <= max(chosen.bytes, _results(call) + call.free)][-1]


def _least_memory(found: list[Choice], times: float) -> Choice:
    """The first of a front that takes at most so many times the least time."""
    return next(choice for choice in found if choice.seconds <= times * found[-1].seconds)


@functools.lru_cache(maxsize=4096)
def front(call: Call) -> list[Choice]:
    """The candidates that no other beats in memory and time, from the smallest to the fastest, which is at most four
    times as fast."""
    choices = costs(call, candidates(call))
    slowest = _SLOWEST * min(choice.seconds for choice in choices)
    choices = [choice for choice in choices if choice.seconds <= slowest]
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bytes, choice.seconds)):
        if not found or choice.seconds < found[-1].seconds:
            found.append(choice)
    return found


def costs(call: Call, plans: list[Plan]) -> list[Choice]:
    """The memory and the time of each plan."""
    needed = max(call.rows, 1) * call.hidden * call.vocab * (1 + call.dx + call.dweight)
    traces = _C.loss_costs(_traced(call), plans, *device(call))
    return [
        Choice(each, _with_python(call, traced), seconds, multiplications > needed)
        for each, (traced, seconds, multiplications) in zip(plans, traces, strict=True)
    ]


def _with_python(call: Call, traced: int) -> int:
    """The bytes of a trace, and what Python allocates beside the op: rows that count are a copy of those of x, and
    their gradient is copied into that of x at the end."""
    row = call.hidden * call.x.itemsize
    gathered = call.rows * row if call.all_rows else 0
    of_all_rows = call.all_rows * row if call.dx else 0
    beside = call.copies + max(call.rows, call.all_rows) * _PER_ROW + _ONCE
    return max(traced + gathered, _results(call) + of_all_rows) + beside


def _results(call: Call) -> int:
    """Bytes of the gradients of rows, weight and bias."""
    of_weight = call.vocab * call.hidden * call.weight.itemsize if call.dweight else 0
    of_bias = call.vocab * (call.bias or accumulator(call.compute)).itemsize if call.dbias else 0
    return of_weight + of_bias + (call.rows * call.hidden * call.x.itemsize if call.dx else 0)


def _traced(call: Call, in_place: bool = True) -> _C.LossCall:
    fields = call._asdict()
    for name in ("device", "overlays", "all_rows", "copies", "free"):
        del fields[name]
    return _C.LossCall(*fields.values(), in_place)


def candidates(call: Call) -> list[Plan]:
    """Chunks of rows; the gradient of all logits, or of some, overlaid with dweight; chunks of rows and classes."""
    rows, vocab = max(call.rows, 1), call.vocab
    # Multiples of 256 rows: cuBLAS is up to a tenth slower for odd multiples of 128.
    of_rows = {min(rows, -(-rows // count // 256) * 256) for count in _CHUNKS}
    plans = [in_chunks(call, chunk, vocab) for chunk in sorted(of_rows | {min(rows, _LEAST_ROWS)})]
    room = _C.overlaid_room(call.hidden, call.weight, call.compute) if can_overlay(call) else 0
    # Wide logits exist a chunk of rows at a time where the gradient of all is stored, too.
    chunks = sorted({min(rows, chunk) for chunk in _WIDE_CHUNKS}) if call.wide_logits else [rows]
    if call.overlays and _fits(call, Plan(_DEFERRED, rows, vocab)):
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


def _fits(call: Call, plan: Plan) -> bool:
    """Whether the call can take a plan that is not ``in_chunks``."""
    if plan.gradients == _OVERLAID:
        return can_overlay(call)
    if not call.wide_logits or plan.gradients != _DEFERRED:
        return False
    at_once = in_chunks(call, max(call.rows, 1), call.vocab)
    return at_once.gradients == _DEFERRED and plan.classes >= call.vocab


def can_overlay(call: Call) -> bool:
    """May the gradient of logits be stored in dweight's memory? A matmul has to write dweight's dtype."""
    writable = call.weight.is_floating_point and call.weight in (call.compute, accumulator(call.compute))
    return call.overlays and call.dweight and writable and call.rows * call.hidden > 0


def in_chunks(call: Call, rows: int, classes: int) -> Plan:
    # If it is not known, while a graph is compiled, whether one chunk is enough, sums over chunks are right in any
    # case.
    at_once = holds(call.rows <= rows) and holds(call.vocab <= classes)
    return Plan(_gradients_of(call.dx, call.dweight or call.dbias, at_once, call.per_row), rows, classes)


@assume_constant_result
def _gradients_of(need_dx: bool, need_parameters: bool, at_once: bool, per_row: bool) -> int:
    return int(_C.gradient_strategy(need_dx, need_parameters, at_once, per_row))


def check_memory(memory: object) -> None:
    number = isinstance(memory, numbers.Integral) and not isinstance(memory, bool) and memory > 0
    if not number and not isinstance(memory, Plan) and memory not in (*LEVELS, SMALLEST):
        levels = ", ".join(map(repr, LEVELS))
        raise ValueError(f"{_OP}: memory is {memory!r}, expected {levels} or a number of bytes, an integer above 0")


# Where rows are cut into chunks, and nothing else ------------------------------------------------------------------


def chunk_rows(call: Call, level: str, at_once: bool = True) -> int:
    """How many rows of logits may exist at a time at a level, for code that overlays nothing; at least those of 64 MiB.
    at_once: may all?"""
    if level == SMALLEST:
        return _LEAST_ROWS
    return max(_chunk_rows(call._replace(overlays=False), str(level), at_once), _rows_in(call, _CHUNK_BYTES))


@functools.lru_cache(maxsize=4096)
def _chunk_rows(call: Call, level: str, at_once: bool) -> int:
    found = [c for c in front(call) if c.plan.classes >= call.vocab and (at_once or c.plan.rows < call.rows)]
    return _at_level(found, level, call).plan.rows if found else max(call.rows, 1)


def rows_of_logits(call: Call, memory: str | int | Plan) -> int:
    """How many rows of logits may exist at a time for a head that is called for its logits. Its parameters are its own,
    so it counts as a frozen head. ``"min"`` is as ``"low"``, since smaller chunks would save less than the head's other
    tensors take."""
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory.rows
    call = call._replace(dweight=False, dbias=False)
    if isinstance(memory, str):
        return _C.equal_chunks(call.rows, chunk_rows(call, "low" if memory == "min" else memory))
    return _C.equal_chunks(call.rows, _rows_in(call, int(memory) - 2 * _dx_bytes(call)))


def shard_rows(call: Call, memory: str | int | Plan) -> int:
    """How many rows of logits may exist at a time, of a vocabulary that is sharded over processes; ``call.vocab`` is
    the size of the largest shard. With all rows at once, the gradient of the logits is stored, unless they are wide;
    else the backward recomputes them, so ``"low"`` is the least memory within 20 % of the fastest plan that does."""
    check_memory(memory)
    if isinstance(memory, Plan):
        return memory.rows
    if isinstance(memory, str):
        of = call._replace(per_row=True)
        at_once = memory in ("fast", "auto") and not call.wide_logits
        return chunk_rows(of, "fast" if memory == "auto" else memory, at_once)
    taken = call.vocab * call.hidden * call.weight.itemsize if call.dweight else 0
    return _rows_in(call, int(memory) - taken - 3 * _dx_bytes(call))


def _dx_bytes(call: Call) -> int:
    return call.rows * call.hidden * call.compute.itemsize if call.dx else 0


def _rows_in(call: Call, logits_bytes: int) -> int:
    return max(logits_bytes // _row_bytes(call) // 128 * 128, _LEAST_ROWS)


def _row_bytes(call: Call) -> int:
    gradient = call.dx or call.dweight or call.dbias
    wide = call.wide_logits * torch.float32.itemsize
    return padded_vocab(call.vocab) * (wide + (call.compute.itemsize if gradient or not wide else 0))


def _graph_rows(call: Call, memory: str | int) -> int:
    """How many rows of logits may exist at a time in a graph of torch.compile.

    The graph may serve any number of rows, and its backward makes dweight beside the sum over chunks. A level takes the
    chunks that it would take of 16,384 rows. For a number of bytes, two traces give what each row takes, and what the
    call takes whatever its rows; the number of rows may be symbolic, and nothing here compares it.
    """
    # A graph is made for the sizes of the head. torch.compile specialises a symbolic length of a range.
    hidden, vocab = len(range(call.hidden)), len(range(call.vocab))
    some = call._replace(rows=_GRAPH_ROWS, hidden=hidden, vocab=vocab, all_rows=0, copies=0, overlays=False)
    if isinstance(memory, str):
        return _level_in_graph(memory, *some)
    of_call, of_row = _bytes_in_graph(*some)
    gathered = call.all_rows * call.hidden * 2 * call.x.itemsize
    others = of_call + call.rows * (of_row + _PER_ROW) + gathered + _ONCE
    least = others + _LEAST_ROWS * _row_bytes(call)
    if holds(memory < least):
        raise ValueError(
            f"{_OP}: memory is {memory} bytes, expected at least {least} in a graph of torch.compile, for {call.rows} "
            f"rows of {call.hidden} columns and {call.vocab} classes: gradients and temporary tensors"
        )
    return _rows_in(call, memory - others)


@assume_constant_result
def _level_in_graph(level: str, *call: object) -> int:
    return chunk_rows(Call(*call), level, at_once=False)


@assume_constant_result
def _bytes_in_graph(*call: object) -> tuple[int, int]:
    """What a graph's call takes in chunks of 128 rows: whatever its rows, without a chunk's logits; and each row."""
    of = Call(*call)
    plan = in_chunks(of, _LEAST_ROWS, of.vocab)

    def traced(rows: int) -> int:
        return _C.loss_costs(_traced(of._replace(rows=rows), in_place=False), [plan], *device(of))[0][0]

    # The peak is the largest of several moments, each of which grows with the rows: with many rows a row takes most.
    of_row = -(-(traced(2 * of.rows) - traced(of.rows)) // of.rows)
    return traced(_LEAST_ROWS) - _LEAST_ROWS * _row_bytes(of), of_row


def padded_vocab(vocab_size: int) -> int:
    """``_C.padded_vocab`` of a size that may be symbolic: the elements from one row of logits to the next."""
    return (vocab_size + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
