"""How much memory a call of the fused loss takes: what its forward and its backward allocate, at the moment at which
that is the most. It follows ``csrc/ops/fused_linear.cpp``, allocation by allocation; tests compare it with what an
allocator was asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_ext import _C
from liger_ext.ops._checks import accumulator

_MIB = 1 << 20
_ONCE = 1 << 18  # an allowance for tensors that are small in any call: counts, scales, partial sums of losses
_DEFERRED, _ACCUMULATED, _RECOMPUTED, _OVERLAID = map(
    int, (_C.Gradients.deferred, _C.Gradients.accumulated, _C.Gradients.recomputed, _C.Gradients.overlaid)
)
_STATISTICS = len(_C.VocabularyStatistics.__members__)  # numbers per row and chunk of the vocabulary
# Column sums for dbias (csrc/launch/plan.cpp, plan_row_ranges) are made over ranges of rows: at most this many ranges,
# and this many bytes unless there is a single range.
_COLUMN_SUM_RANGES, _COLUMN_SUM_BYTES = 1216, 10 * _MIB
_NARROWED_ELSEWHERE = 64  # rows of the sum of dweight that are rounded to dweight's dtype in other memory, not in place


class Call(NamedTuple):
    """A call of the fused loss, as far as its memory goes. ``rows`` may be symbolic; ``dtype`` is that of the matmuls,
    and that of x and weight where theirs are None; ``bias_dtype``: None without a bias; ``sum_dtype`` (None: the
    accumulator's) is that in which dweight is summed over chunks; ``gpu_bytes`` is the memory of the GPU, None of a
    CPU; ``overlays``: the logits' gradient may lie where dweight will be; ``all_rows``: of x, from which ``rows`` are
    gathered, or 0; ``copies``: bytes of the arguments' copies that matmuls can read."""

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
    x_dtype: torch.dtype | None = None
    weight_dtype: torch.dtype | None = None
    bias_dtype: torch.dtype | None = None
    all_rows: int = 0
    copies: int = 0


class Plan(NamedTuple):
    """How the gradients are made (``_C.Gradients``); how many rows, and how many classes, of logits exist at a time;
    with ``_C.Gradients.overlaid``, ``classes`` is for how many classes the gradient is stored."""

    gradients: int
    rows: int
    classes: int


def bytes_of(call: Call, way: Plan) -> int:
    """The most memory that a forward and its backward have at a time beside their arguments, results included."""
    sizes = _Sizes(call)
    if way.gradients == _OVERLAID:
        peaks = _overlaid(call, way, sizes)
    elif way.gradients == _DEFERRED:
        peaks = _deferred(call, way, sizes)
    else:
        peaks = _in_chunks(call, way, sizes)
    of_all_rows = 0
    if call.all_rows:
        gathered = sizes.x * sizes.x_size
        peaks = [peak + gathered for peak in peaks]
        of_all_rows = call.all_rows * call.hidden * sizes.x_size if call.dx else 0
    results = sizes.dx + sizes.dweight + sizes.dbias + of_all_rows
    # Beside that: losses and other numbers per row, and tensors of a fixed size.
    each_row = 24 * sizes.acc + 64
    beside = call.copies + max(call.rows, call.all_rows) * each_row + _ONCE
    return max(max(peaks) + _matmul_scratch(call, way), results) + beside


class _Sizes:
    """Sizes of a call's tensors in bytes. Attributes that end in ``_size`` are bytes per element; ``x`` and ``weight``
    are numbers of elements."""

    def __init__(self, call: Call) -> None:
        self.compute_size = call.dtype.itemsize
        self.acc = accumulator(call.dtype).itemsize
        self.x, self.weight = call.rows * call.hidden, call.vocab * call.hidden
        x_dtype, weight_dtype = call.x_dtype or call.dtype, call.weight_dtype or call.dtype
        self.x_size, self.weight_size = x_dtype.itemsize, weight_dtype.itemsize
        bias_dtype = call.bias_dtype or (accumulator(call.dtype) if call.dbias else None)
        # Gradients, as results.
        self.dx = self.x * self.x_size if call.dx else 0
        self.dweight = self.weight * self.weight_size if call.dweight else 0
        self.dbias = call.vocab * bias_dtype.itemsize if call.dbias else 0
        # Copies in the dtype of the matmuls, where they are needed.
        self.x_cast = self.x * self.compute_size if x_dtype != call.dtype else 0
        self.weight_cast = self.weight * self.compute_size if weight_dtype != call.dtype else 0
        self.bias_cast = call.vocab * self.compute_size if bias_dtype not in (None, call.dtype) else 0
        self.casts = self.x_cast + self.weight_cast + self.bias_cast
        # Where no matmul can write the dtype of dx or dweight: a buffer in the accumulator's dtype.
        writable = call.dtype, accumulator(call.dtype)
        self.dx_wide = self.x * self.acc if call.dx and x_dtype not in writable else 0
        self.dx_apart = self.x * self.compute_size if call.dx and call.per_row and x_dtype != call.dtype else 0
        self.dweight_wide = self.weight * self.acc if call.dweight and weight_dtype not in writable else 0
        # Each row's grad_output multiplies a copy of x.
        self.scales_x = call.per_row and call.dweight
        # The sum of dweight over chunks.
        ratio = 1 if call.sum_dtype == weight_dtype else self.acc // self.weight_size
        odd = 0 if ratio == 1 else 64 * call.hidden * self.acc
        self.dweight_sum = self.weight * self.weight_size * ratio + odd if call.dweight else 0
        self.dbias_sum = call.vocab * self.acc if call.dbias else 0

    def column_sums(self, call: Call, rows: int, classes: int) -> int:
        """The workspace of a GPU's column sums (for dbias) over logits of this many rows and classes."""
        if not call.dbias or call.gpu_bytes is None:
            return 0
        range_bytes = (classes + 8) * self.acc
        return max(range_bytes, min(_COLUMN_SUM_BYTES, min(rows, _COLUMN_SUM_RANGES) * range_bytes))


def _overlaid(call: Call, way: Plan, sizes: _Sizes) -> list[int]:
    stored = min(way.classes, call.vocab)
    all_stored = stored == call.vocab
    cut = call.rows, call.hidden, call.vocab, stored
    rest, spare = (of(*cut) * sizes.compute_size for of in (_C.overlaid_rest, _C.overlaid_spare))
    # Classes whose gradient is not stored are made again in the backward, this many at a time.
    at_a_time = max(64, call.vocab * call.hidden // call.rows // 64 * 64)
    chunks = sum(not chunk.again for chunk in _overlaid_chunks(call, way)) + -(-(call.vocab - stored) // at_a_time)
    forward = sizes.casts + sizes.dweight + rest + _statistics(call, call.rows, chunks, sizes)
    # The fp32 sum of dx: its first rows lie in dx's own memory, the others in the spare, if dx is done before the spare
    # is needed for something else.
    in_dx = min(call.rows, call.rows * sizes.x_size // sizes.acc)
    sum_rest = (call.rows - in_dx) * call.hidden * sizes.acc if call.dx else 0
    beside = max(spare, sum_rest) if all_stored else spare + sum_rest
    scaled = sizes.x * sizes.compute_size if sizes.scales_x else 0
    sums = sizes.dbias_sum + sizes.column_sums(call, call.rows, _largest_chunk(call, way))
    backward = sizes.casts + sizes.dweight + rest + sizes.dx + beside + scaled + sizes.dbias + sums
    return [forward, backward]


def _overlaid_chunks(call: Call, way: Plan) -> list[_C.OverlaidChunk]:
    return _C.overlaid_chunks(call.rows, call.hidden, call.vocab, min(way.classes, call.vocab))


def _largest_chunk(call: Call, way: Plan) -> int:
    return max(chunk.classes for chunk in _overlaid_chunks(call, way))


def _deferred(call: Call, way: Plan, sizes: _Sizes) -> list[int]:
    logits = call.rows * _C.padded_vocab(call.vocab) * sizes.compute_size
    made = logits + sizes.dx + sizes.dweight + sizes.dbias
    weight_cast = sizes.weight_cast if call.dx else 0
    x_cast = sizes.x_cast if call.dweight else 0
    for_dx = max(sizes.dx_wide, sizes.dx_apart)
    for_dweight = x_cast + (sizes.x * sizes.compute_size if sizes.scales_x else 0) + sizes.dweight_wide
    for_dbias = x_cast + sizes.dbias_sum + sizes.column_sums(call, call.rows, call.vocab)
    return [logits + sizes.casts, made + weight_cast + max(for_dx, for_dweight, for_dbias)]


def _in_chunks(call: Call, way: Plan, sizes: _Sizes) -> list[int]:
    rows, classes = _C.equal_chunks(call.rows, way.rows), min(way.classes, call.vocab)
    chunk = rows * _C.padded_vocab(classes) * sizes.compute_size
    if classes < call.vocab:
        chunk += _statistics(call, rows, -(-call.vocab // classes), sizes)
        chunk += rows * call.hidden * sizes.acc if call.dx else 0
    chunk += sizes.column_sums(call, rows, classes)
    sums = (sizes.x * sizes.compute_size if call.dx else 0) + sizes.dweight_sum + sizes.dbias_sum
    narrowed = min(_NARROWED_ELSEWHERE, call.vocab) * call.hidden * sizes.weight_size if call.dweight else 0
    results = sizes.dx + sizes.dbias
    if way.gradients == _ACCUMULATED:
        return [sizes.casts + sums + chunk, sums + results + narrowed]
    if way.gradients == _RECOMPUTED:
        scaled = rows * call.hidden * sizes.compute_size if sizes.scales_x else 0
        return [sizes.casts + chunk, sizes.casts + sums + results + narrowed + chunk + scaled]
    return [sizes.casts + chunk]


def _statistics(call: Call, rows: int, chunks: int, sizes: _Sizes) -> int:
    """Bytes of the statistics of all rows in each chunk of the vocabulary."""
    return rows * chunks * (_STATISTICS * sizes.acc + 8)


def _matmul_scratch(call: Call, way: Plan) -> int:
    """torch's matmul of 16-bit matrices on a CPU copies both into the order in which they are read, in whole blocks."""
    if call.gpu_bytes is not None or call.dtype.itemsize != 2:
        return 0
    if way.gradients == _OVERLAID:
        rows, classes = call.rows, _largest_chunk(call, way)
    else:
        rows, classes = _C.equal_chunks(call.rows, way.rows), min(way.classes, call.vocab)
    rows, hidden, classes = (_C.padded_vocab(n) for n in (rows, call.hidden, classes))
    operands = rows * classes, rows * hidden, classes * hidden
    return 2 * (sum(operands) - min(operands)) + _ONCE
