"""How much memory the fused loss takes, and the way that it goes at each level of ``memory``: how its rows and classes
are cut into chunks, and where the gradient of the logits waits."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from liger_ext import _C
from liger_ext.ops._checks import accumulator, holds

LEVELS = ("fast", "auto", "low", "min")

_OP = "fused_linear_cross_entropy"
_MIB = 1 << 20
_ROW_MULTIPLE = _C.padded_vocab(1)
_LEAST_ROWS, _LEAST_CLASSES = 128, 1024  # of logits at a time
WORTH_OVERLAYING = 16 * _MIB  # of logits
_DEFERRED, _ACCUMULATED, _RECOMPUTED, _OVERLAID = map(
    int, (_C.Gradients.deferred, _C.Gradients.accumulated, _C.Gradients.recomputed, _C.Gradients.overlaid)
)


class Call(NamedTuple):
    """A call of the fused loss, as far as its memory goes. ``rows`` may be symbolic; ``dtype`` is that of the matmuls,
    ``sum_dtype`` (None: the accumulator's) that in which dweight is summed over chunks; ``gpu_bytes`` is the memory of
    the GPU, None of a CPU; ``overlays``: the logits' gradient may lie where dweight will be."""

    rows: int
    hidden: int
    vocab: int
    dtype: torch.dtype
    gpu_bytes: int | None
    dx: bool = True
    dweight: bool = True
    dbias: bool = False
    per_row: bool = False
    overlays: bool = True
    sum_dtype: torch.dtype | None = None


class Plan(NamedTuple):
    """The way to the gradients (``_C.Gradients``); rows of logits at a time; and classes of them, or, overlaid, how
    many classes' gradients are stored."""

    gradients: int
    rows: int
    classes: int


def plan(call: Call, memory: str | int) -> Plan:
    """What the call does at a level of ``memory``, one of ``LEVELS``, or within so many bytes.

    Only facts that do not change decide (never how much memory is free), so that the same call gives the same bits. A
    number of rows that a compiler does not know does not count, so that one graph serves every batch.

    Raises:
        ValueError: ``memory`` is no level and no positive number, or fewer bytes than the call can do with.
    """
    _check(memory)
    if _known(call):
        return _planned(*call, memory)
    if isinstance(memory, str):
        return _in_chunks(call, level_rows(call, memory), call.vocab)
    # dweight's sum, that of dx and dx, and as much for logits as is left, but at least 128 rows of them.
    taken = call.vocab * call.hidden * accumulator(call.dtype).itemsize if call.dweight else 0
    return _in_chunks(call, _rows_in(call, int(memory) - taken - 2 * _dx_bytes(call)), call.vocab)


def shard_rows(call: Call, memory: str | int) -> int:
    """Rows of logits at a time of a vocabulary that is sharded over processes. ``call.vocab``: of the largest shard."""
    _check(memory)
    if isinstance(memory, str):
        return level_rows(call, "fast" if memory == "auto" else memory)
    taken = call.vocab * call.hidden * call.dtype.itemsize if call.dweight else 0
    return _rows_in(call, int(memory) - taken - 3 * _dx_bytes(call))


def _check(memory: str | int) -> None:
    number = isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory < 1 << 62
    if not number and not (isinstance(memory, str) and memory in LEVELS):
        levels = ", ".join(map(repr, LEVELS))
        raise ValueError(f"{_OP}: memory is {memory!r}, expected {levels} or a number of bytes greater than 0")


def _rows_in(call: Call, logits_bytes: int) -> int:
    return max(logits_bytes // _row_bytes(call) // 128 * 128, _LEAST_ROWS)


@functools.lru_cache(maxsize=4096)
def _planned(*call_and_memory) -> Plan:
    *call, memory = call_and_memory
    call = Call(*call)
    if not isinstance(memory, str):
        return _within(call, int(memory))
    return _overlaid(call, memory) or _in_chunks(call, level_rows(call, memory), call.vocab)


def level_rows(call: Call, level: str) -> int:
    """How many rows of logits may exist at a time at a level, if their gradient is not laid over dweight.

    ``"fast"``: a GPU's memory / 32, but at least 256 MiB; on a CPU, as ``"auto"``, 64 MiB, but at least 256 rows. With
    a gradient of the weight both also take a single chunk whenever its logits are no larger than the float32 sum of
    that gradient, which only several chunks need. ``"auto"`` on a GPU: an eighth of the rows, but half to one and a
    half times ``hidden`` (or 4,096), or 256 MiB if that is more; 512 MiB without a gradient of the weight. ``"low"`` is
    a quarter of that, ``"min"`` a twelfth; on a CPU 32 and 16 MiB.
    """
    sum_bytes = call.vocab * call.hidden * accumulator(call.dtype).itemsize if call.dweight else 0
    if call.gpu_bytes is None:
        budget = {"low": 32 * _MIB, "min": 16 * _MIB}.get(level) or max(64 * _MIB, 256 * _row_bytes(call), sum_bytes)
    elif level == "fast":
        budget = max(256 * _MIB, call.gpu_bytes // 32, sum_bytes)
    else:
        eighth = call.rows // 8 if _known(call) else call.hidden
        chunk = min(max(eighth, call.hidden // 2), max(call.hidden * 3 // 2, 4096))
        budget = max(256 * _MIB, chunk * _row_bytes(call)) if call.dweight else 512 * _MIB
        budget //= {"auto": 1, "low": 4, "min": 12}[level]
        if call.dweight and _known(call) and call.rows <= call.hidden:
            budget = max(budget, call.rows * _row_bytes(call))  # at once, which takes less memory than the sum
    return _rows_in(call, budget)


def bytes_of(call: Call, way: Plan) -> int:
    """The most memory that a forward and its backward have at a time beside their arguments, results included."""
    size, acc = call.dtype.itemsize, accumulator(call.dtype).itemsize
    dx = _dx_bytes(call)
    dweight = call.vocab * call.hidden * size if call.dweight else 0
    # Losses and statistics of rows; sums of columns; each row's grad_output multiplies a copy of x.
    small = call.rows * 256 + _MIB + (call.vocab * 12 + 5 * _MIB if call.dbias else 0)
    x_copy = call.rows * call.hidden * size if call.per_row and call.dweight else 0
    if way.gradients == _OVERLAID:
        sizes = call.rows, call.hidden, call.vocab, min(way.classes, call.vocab)
        rest, spare = _C.overlaid_rest(*sizes) * size, _C.overlaid_spare(*sizes) * size
        # The first rows of dx's sum lie where dx will be; the others in the spare, if dx is done before that is wanted.
        sum_rest = (call.rows - call.rows * size // acc) * call.hidden * acc if call.dx else 0
        beside = max(spare, sum_rest) if way.classes >= call.vocab else spare + sum_rest
        return dweight + dx + rest + beside + x_copy + small
    rows = _C.equal_chunks(call.rows, way.rows)
    logits = rows * padded_vocab(min(way.classes, call.vocab)) * size
    if way.gradients == _DEFERRED:
        return dweight + dx + logits + x_copy + small
    if call.dweight:
        dweight = call.vocab * call.hidden * (call.sum_dtype or accumulator(call.dtype)).itemsize
    if way.classes < call.vocab:
        small += rows * 32 * (call.vocab // way.classes + 1) + (rows * call.hidden * acc if call.dx else 0)
    if way.gradients == _RECOMPUTED:
        return dweight + 2 * dx + logits + rows * call.hidden * size + small
    return dweight + dx + max(logits, dx) + small  # the sum of dx becomes dx when the logits are gone


def least_bytes(call: Call) -> int:
    """The smallest number of bytes within which the call can be done."""
    return min(bytes_of(call, way) for way in _smallest(call))


def _smallest(call: Call) -> Iterator[Plan]:
    yield _in_chunks(call, _LEAST_ROWS, min(_LEAST_CLASSES, call.vocab))
    if call.dweight or call.dbias:
        yield _in_chunks(call, max(call.rows, 1), call.vocab)
    if _can_overlay(call):
        yield Plan(_OVERLAID, call.rows, _C.overlaid_classes(call.rows, call.hidden, call.vocab))


def _within(call: Call, budget: int) -> Plan:
    """The fastest way that takes at most so many bytes."""
    for way in (*_ways(call, budget), *_smallest(call)):
        if bytes_of(call, way) <= budget:
            return way
    raise ValueError(
        f"{_OP}: memory is {budget} bytes, expected at least {least_bytes(call)}, or 'min', for {call.rows} rows of "
        f"{call.hidden} columns and {call.vocab} classes: their gradients, and what makes them"
    )


def _ways(call: Call, budget: int) -> Iterator[Plan]:
    """From the fastest to the slowest, as large as they fit into the budget."""
    rows, hidden, vocab = call.rows, call.hidden, call.vocab
    if call.dweight or call.dbias:
        yield _in_chunks(call, max(rows, 1), vocab)
    overlay = _can_overlay(call)
    if overlay and _few_rows(call):
        yield Plan(_OVERLAID, rows, vocab)
    fits = range(_LEAST_ROWS, rows + _LEAST_ROWS, 128)
    chunk = 128 * bisect.bisect_right(fits, budget, key=lambda n: bytes_of(call, _in_chunks(call, n, vocab)))
    if chunk >= hidden // 2 and chunk >= _LEAST_ROWS:
        yield _in_chunks(call, chunk, vocab)
    if overlay:
        inside = _C.overlaid_classes(rows, hidden, vocab)
        left = budget - bytes_of(call, Plan(_OVERLAID, rows, inside))
        stored = inside + max(0, left // (rows * call.dtype.itemsize) // 64 * 64)
        if stored < vocab:
            yield Plan(_OVERLAID, rows, stored)
    if chunk >= _LEAST_ROWS:
        yield _in_chunks(call, chunk, vocab)
    few = max(1, min(rows, _LEAST_ROWS))
    left = budget - bytes_of(call, _in_chunks(call, few, min(_LEAST_CLASSES, vocab)))
    classes = _LEAST_CLASSES + left // (few * call.dtype.itemsize) // _ROW_MULTIPLE * _ROW_MULTIPLE
    if classes >= _LEAST_CLASSES:
        yield _in_chunks(call, few, min(classes, vocab))


def _known(call: Call) -> bool:
    """Is the number of rows one that may decide? While a graph is made, it may be the next call's, too."""
    return type(call.rows) is int and not torch.compiler.is_compiling()


def _dx_bytes(call: Call) -> int:
    return call.rows * call.hidden * call.dtype.itemsize if call.dx else 0


def _row_bytes(call: Call) -> int:
    return padded_vocab(call.vocab) * call.dtype.itemsize


def _few_rows(call: Call) -> bool:
    """So few that the gradient of all logits beside dweight takes less than a float32 sum of dweight."""
    return call.hidden <= call.rows <= call.hidden * 5 // 2


def _in_chunks(call: Call, rows: int, classes: int) -> Plan:
    # Where it is not known while a graph is made whether one chunk will do, sums are right for any number.
    at_once = holds(call.rows <= rows) and holds(call.vocab <= classes)
    return Plan(_gradients_of(call.dx, call.dweight or call.dbias, at_once, call.per_row), rows, classes)


@torch.compiler.assume_constant_result
def _gradients_of(need_dx: bool, need_parameters: bool, at_once: bool, per_row: bool) -> int:
    return int(_C.gradients_of(need_dx, need_parameters, at_once, per_row))


def _can_overlay(call: Call) -> bool:
    """dweight holds the gradients of 64 classes, and it is worth it."""
    if not (call.overlays and call.dweight) or call.rows * call.hidden == 0:
        return False
    return call.vocab * call.hidden >= 64 * call.rows and call.rows * _row_bytes(call) >= WORTH_OVERLAYING


def _overlaid(call: Call, level: str) -> Plan | None:
    """With gradients of logits laid over dweight, at a level where chunks would take more memory, or more time.

    ``"auto"`` stores those of all classes, where that takes less memory than a float32 sum of dweight; but a CPU would
    take each product of 16-bit matrices twice to sum dx in float32. ``"low"``: as many as 1.52 times dweight and five
    times dx hold, both included. ``"min"``: those that dweight holds.
    """
    if level == "fast" or not _can_overlay(call):
        return None
    if level == "auto":
        fast_sums = call.gpu_bytes is not None or call.dtype == accumulator(call.dtype)
        return Plan(_OVERLAID, call.rows, call.vocab) if _few_rows(call) and fast_sums else None
    if level == "min" and call.rows <= call.hidden * 16:
        return Plan(_OVERLAID, call.rows, _C.overlaid_classes(call.rows, call.hidden, call.vocab))
    if level == "min" or call.rows > call.hidden * 8:
        return None
    dweight, dx = call.vocab * call.hidden * call.dtype.itemsize, call.rows * call.hidden * call.dtype.itemsize
    return _within(call, max(dweight * 38 // 25 + dx * 5, least_bytes(call)))


def gpu_memory(device: torch.device) -> int | None:
    """Bytes of a GPU's memory; None of a CPU."""
    return _total_memory(device) if device.type == "cuda" else None


@torch.compiler.assume_constant_result
def _total_memory(device: torch.device) -> int:
    return _memory_of(device)


@functools.cache
def _memory_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def padded_vocab(vocab_size: int) -> int:
    """``_C.padded_vocab`` of a size that may be symbolic: the elements from one row of logits to the next."""
    return (vocab_size + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
