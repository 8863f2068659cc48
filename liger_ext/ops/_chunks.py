"""What the fused loss does at each level of ``memory``: how its rows and classes are cut into chunks, and where the
gradient of the logits is stored until the matmuls that use it (a ``Plan``)."""

from __future__ import annotations

import bisect
import functools
import numbers
from collections.abc import Iterator

import torch

from liger_ext import _C
from liger_ext.ops._checks import accumulator, holds
from liger_ext.ops._compile import assume_constant_result
from liger_ext.ops._loss_memory import Call, Plan, bytes_of

LEVELS = ("fast", "auto", "low", "min")
SMALLEST = "smallest chunks"  # a level for tests: 128 rows, and 1,024 classes where sizes are known

_OP = "fused_linear_cross_entropy"
_MIB = 1 << 20
_ROW_MULTIPLE = _C.padded_vocab(1)
_LEAST_ROWS, _LEAST_CLASSES = 128, 1024  # the smallest chunk of logits
WORTH_OVERLAYING = 16 * _MIB  # bytes of logits, from which storing their gradient in dweight's memory pays
_OVERLAID = int(_C.Gradients.overlaid)


def plan(call: Call, memory: str | int) -> Plan:
    """What the call does at a level of ``memory``, one of ``LEVELS``, or within a number of bytes.

    The plan depends only on facts that do not change from call to call (never on how much memory is free), so that the
    same call gives the same bits. It does not depend on a number of rows that is unknown while a graph is compiled, so
    that one graph serves every batch.

    Raises:
        ValueError: ``memory`` is no level and no positive number, or fewer bytes than the call can do with.
    """
    _check(memory)
    if _known(call):
        return _planned(*call, memory)
    if isinstance(memory, str):
        return _in_chunks(call, level_rows(call, memory), call.vocab)
    return _in_chunks(call, _graph_rows(call, int(memory)), call.vocab)


def rows_of_logits(
    rows: int, hidden: int, vocab: int, dtype: torch.dtype, gpu_bytes: int | None, memory: str | int
) -> int:
    """How many rows of logits may exist at a time, at a level or within a number of bytes (at least 128), for a head
    that is called for its logits: nothing is known of what it does with them, so they count as those of a frozen
    head."""
    _check(memory)
    call = Call(rows, hidden, vocab, dtype, gpu_bytes, dweight=False)
    if isinstance(memory, str):  # "min" is as "low": smaller chunks would save less than the head's other tensors take
        return _C.equal_chunks(rows, level_rows(call, "low" if memory == "min" else memory))
    return _C.equal_chunks(rows, _rows_in(call, int(memory) - 2 * _dx_bytes(call)))


def shard_rows(call: Call, memory: str | int) -> int:
    """How many rows of logits may exist at a time, of a vocabulary that is sharded over processes. ``call.vocab`` is
    the size of the largest shard."""
    _check(memory)
    if isinstance(memory, str):
        return level_rows(call, "fast" if memory == "auto" else memory)
    taken = call.vocab * call.hidden * call.dtype.itemsize if call.dweight else 0
    return _rows_in(call, int(memory) - taken - 3 * _dx_bytes(call))


def _check(memory: str | int) -> None:
    number = isinstance(memory, numbers.Integral) and not isinstance(memory, bool) and memory > 0
    if not number and not (isinstance(memory, str) and memory in (*LEVELS, SMALLEST)):
        levels = ", ".join(map(repr, LEVELS))
        raise ValueError(f"{_OP}: memory is {memory!r}, expected {levels} or a number of bytes, an integer above 0")


def _graph_rows(call: Call, budget: int) -> int:
    """How many rows of logits may exist at a time in a graph of torch.compile, within a number of bytes.

    The graph may serve any number of rows, so it works in chunks, and its backward makes dweight beside the sum over
    chunks. The number of rows may be symbolic: nothing here compares it, and ``bytes_of`` cannot be asked.
    """
    size, acc = call.dtype.itemsize, accumulator(call.dtype).itemsize
    x_dtype, weight_dtype = call.x_dtype or call.dtype, call.weight_dtype or call.dtype
    # Bytes per element of weight, of x and of bias: sums, gradients, and copies in the dtype of the matmuls.
    of_weight = ((call.sum_dtype or accumulator(call.dtype)).itemsize + weight_dtype.itemsize) * call.dweight
    of_x = (size + x_dtype.itemsize) * call.dx
    of_weight += size if weight_dtype != call.dtype else 0
    of_x += size if x_dtype != call.dtype else 0
    of_bias = 4 * acc if call.bias_dtype is not None else 0
    others = (call.hidden * of_weight + of_bias) * call.vocab + call.rows * (call.hidden * of_x + 32 * acc)
    others += call.all_rows * call.hidden * 2 * x_dtype.itemsize + (10 * _MIB if call.dbias else _MIB)
    least = others + (min(call.rows, _LEAST_ROWS) if type(call.rows) is int else _LEAST_ROWS) * _row_bytes(call)
    if holds(budget < least):
        raise ValueError(
            f"{_OP}: memory is {budget} bytes, expected at least {least} in a graph of torch.compile, for {call.rows} "
            f"rows of {call.hidden} columns and {call.vocab} classes: gradients and temporary tensors"
        )
    return _rows_in(call, budget - others)


def _rows_in(call: Call, logits_bytes: int) -> int:
    return max(logits_bytes // _row_bytes(call) // 128 * 128, _LEAST_ROWS)


@functools.lru_cache(maxsize=4096)
def _planned(*call_and_memory) -> Plan:
    *call, memory = call_and_memory
    call = Call(*call)
    if not isinstance(memory, str):
        return _within(call, int(memory))
    if memory == SMALLEST:
        return _in_chunks(call, _LEAST_ROWS, min(_LEAST_CLASSES, call.vocab))
    return _overlaid(call, memory) or _in_chunks(call, level_rows(call, memory), call.vocab)


def level_rows(call: Call, level: str) -> int:
    """How many rows of logits may exist at a time at a level, if their gradient is not stored in dweight's memory.

    ``"fast"``: a GPU's memory / 32, but at least 256 MiB; on a CPU, as ``"auto"``, 64 MiB, but at least 256 rows. With
    a gradient of the weight both also take a single chunk whenever its logits are no larger than the float32 sum of
    that gradient, which only several chunks need. ``"auto"`` on a GPU: an eighth of the rows, but half to one and a
    half times ``hidden`` (or 4,096), or 256 MiB if that is more; 512 MiB without a gradient of the weight. ``"low"`` is
    a quarter of that, ``"min"`` a twelfth; on a CPU 32 and 16 MiB.
    """
    if level == SMALLEST:
        return _LEAST_ROWS
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
            budget = max(budget, call.rows * _row_bytes(call))  # one chunk takes less memory than the sum
    return _rows_in(call, budget)


def least_bytes(call: Call) -> int:
    """The smallest number of bytes within which the call can be done."""
    return min(bytes_of(call, way) for way in _smallest(call))


def _smallest(call: Call) -> Iterator[Plan]:
    """Of each kind of plan, the one that takes the least memory."""
    yield _in_chunks(call, _LEAST_ROWS, call.vocab)
    yield _in_chunks(call, _LEAST_ROWS, min(_LEAST_CLASSES, call.vocab))
    if call.dweight or call.dbias:
        yield _in_chunks(call, max(call.rows, 1), call.vocab)
    if _can_overlay(call):
        yield Plan(_OVERLAID, call.rows, call.vocab)
        yield Plan(_OVERLAID, call.rows, _C.overlaid_classes(call.rows, call.hidden, call.vocab))


def _within(call: Call, budget: int) -> Plan:
    """The fastest plan that takes at most ``budget`` bytes; ValueError says how many the smallest one takes."""
    for way in (*_ways(call, budget), *_smallest(call)):
        if bytes_of(call, way) <= budget:
            return way
    raise ValueError(
        f"{_OP}: memory is {budget} bytes, expected at least {least_bytes(call)}, or 'min', for {call.rows} rows of "
        f"{call.hidden} columns and {call.vocab} classes: gradients and temporary tensors"
    )


def _ways(call: Call, budget: int) -> Iterator[Plan]:
    """Plans from the fastest to the slowest kind, each with chunks as large as the budget allows. Some may not fit."""
    rows, hidden, vocab = call.rows, call.hidden, call.vocab
    if call.dweight or call.dbias:
        yield _in_chunks(call, max(rows, 1), vocab)
    overlay = _can_overlay(call)
    if overlay and _few_rows(call):
        yield Plan(_OVERLAID, rows, vocab)
    fits = range(_LEAST_ROWS, rows + _LEAST_ROWS, 128)
    chunk = 128 * bisect.bisect_right(fits, budget, key=lambda n: bytes_of(call, _in_chunks(call, n, vocab)))
    # Each chunk reads and writes the sum of dweight: that is fast enough if a chunk has many rows.
    sum_size = (call.sum_dtype or accumulator(call.dtype)).itemsize
    if chunk >= hidden // (8 if sum_size == 2 else 2) and chunk >= _LEAST_ROWS:
        yield _in_chunks(call, chunk, vocab)
    if overlay:
        inside = _C.overlaid_classes(rows, hidden, vocab)
        stored = inside
        for _ in range(4):  # iterates, since the memory beside the gradients depends a little on how many are stored
            left = budget - bytes_of(call, Plan(_OVERLAID, rows, stored))
            stored = max(inside, stored + left // (rows * call.dtype.itemsize) // 64 * 64)
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
    """May the plan depend on the number of rows? Not while a graph is compiled: the next call may have another."""
    return type(call.rows) is int and not torch.compiler.is_compiling()


def _dx_bytes(call: Call) -> int:
    return call.rows * call.hidden * call.dtype.itemsize if call.dx else 0


def _row_bytes(call: Call) -> int:
    return padded_vocab(call.vocab) * call.dtype.itemsize


def _few_rows(call: Call) -> bool:
    """Are there so few rows that the gradient of all logits, stored in dweight's memory and beside it, takes less
    beside it than a float32 sum of dweight would?"""
    return call.hidden <= call.rows <= call.hidden * 5 // 2


def _in_chunks(call: Call, rows: int, classes: int) -> Plan:
    # If it is not known, while a graph is compiled, whether one chunk is enough, sums over chunks are right in any
    # case.
    at_once = holds(call.rows <= rows) and holds(call.vocab <= classes)
    return Plan(_gradients_of(call.dx, call.dweight or call.dbias, at_once, call.per_row), rows, classes)


@assume_constant_result
def _gradients_of(need_dx: bool, need_parameters: bool, at_once: bool, per_row: bool) -> int:
    return int(_C.gradients_of(need_dx, need_parameters, at_once, per_row))


def _can_overlay(call: Call) -> bool:
    """Can the logits' gradient be stored in dweight's memory (at least that of 64 classes), and does it pay?"""
    if not (call.overlays and call.dweight) or call.rows * call.hidden == 0:
        return False
    return call.vocab * call.hidden >= 64 * call.rows and call.rows * _row_bytes(call) >= WORTH_OVERLAYING


def _overlaid(call: Call, level: str) -> Plan | None:
    """The plan that stores gradients of logits in dweight's memory; None at a level where chunks take less memory and
    time.

    ``"auto"`` stores the gradients of all classes, if that takes less memory than a float32 sum of dweight. (Not on a
    CPU for 16-bit types, where summing dx in float32 takes each product twice.) ``"low"`` stores as many as fit, with
    dweight and dx, into 1.52 times dweight's memory and five times dx's; ``"min"`` those that fit dweight's memory.
    """
    if level == "fast" or not _can_overlay(call):
        return None
    if level == "auto":
        fast_sums = call.gpu_bytes is not None or call.dtype == accumulator(call.dtype)
        return Plan(_OVERLAID, call.rows, call.vocab) if _few_rows(call) and fast_sums else None
    least = Plan(_OVERLAID, call.rows, _C.overlaid_classes(call.rows, call.hidden, call.vocab))
    if call.rows > call.hidden * {"low": 8, "min": 16}[level]:
        return None
    if level == "min":  # with a sum of dweight in 16 bits, chunks may be faster in the same memory
        return least if call.sum_dtype in (None, accumulator(call.dtype)) else _within(call, bytes_of(call, least))
    dweight, dx = call.vocab * call.hidden * call.dtype.itemsize, call.rows * call.hidden * call.dtype.itemsize
    return _within(call, max(dweight * 38 // 25 + dx * 5, bytes_of(call, least)))


def gpu_memory(device: torch.device) -> int | None:
    """The bytes of a GPU's memory; None for a CPU."""
    return _total_memory(device) if device.type == "cuda" else None


@assume_constant_result
def _total_memory(device: torch.device) -> int:
    return _memory_of(device)


@functools.cache
def _memory_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def padded_vocab(vocab_size: int) -> int:
    """``_C.padded_vocab`` of a size that may be symbolic: the elements from one row of logits to the next."""
    return (vocab_size + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
