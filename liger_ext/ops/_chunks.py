"""How the fused loss cuts its rows and classes into chunks: which memory each level of ``memory`` means."""

from __future__ import annotations

import functools

import torch

from liger_ext import _C
from liger_ext.ops._checks import accumulator

_OP = "fused_linear_cross_entropy"
_MIB = 1 << 20
_ROW_MULTIPLE = _C.padded_vocab(1)
_WORTH_OVERLAYING = 16 * _MIB  # of logits


def chunk_rows(
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    memory: str | int,
    device: torch.device,
    need_dweight: bool = False,
    rows: int | None = None,
) -> int:
    """How many rows of logits may exist at a time; the op makes the fewest equal chunks of at most as many.

    ``memory`` is the size of the buffer of logits in bytes (at least 128 rows, of fewer classes where they do not fit:
    :func:`chunk_classes`). ``"fast"`` is a GPU's memory / 32, but at least 256 MiB; on a CPU, and at ``"auto"``, 64
    MiB, but at least 256 rows. Where the weight's gradient is wanted, it also takes a single chunk whenever its logits
    are no larger than the float32 sum of that gradient, which only several chunks need. ``"auto"`` on a GPU: an eighth
    of ``rows``, where they are known, but half to one and a half times ``hidden_size``, or 256 MiB if that is more;
    512 MiB without a gradient of the weight.

    Only facts that do not change decide (never how much memory is free), so that the same call gives the same bits. A
    number of rows that a compiler does not know does not count, so that one graph serves every batch.

    Raises:
        ValueError: ``memory`` is neither ``"fast"``, ``"auto"``, ``"low"``, ``"min"`` nor a positive number.
    """
    gpu_bytes = _total_memory(device) if isinstance(memory, str) and device.type == "cuda" else None
    return rows_within(vocab_size, hidden_size, dtype, memory, gpu_bytes, need_dweight, rows)


def rows_within(
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    memory: str | int,
    gpu_bytes: int | None,
    need_dweight: bool,
    rows: int | None = None,
) -> int:
    """:func:`chunk_rows` for a GPU with ``gpu_bytes`` of memory, or for a CPU (None)."""
    row_bytes = padded_vocab(vocab_size) * dtype.itemsize
    sum_bytes = vocab_size * hidden_size * accumulator(dtype).itemsize if need_dweight else 0
    if memory in ("fast", "auto") and gpu_bytes is None:
        budget = max(64 * _MIB, 256 * row_bytes, sum_bytes)
    elif memory in ("low", "min") and gpu_bytes is None:
        budget = {"low": 32, "min": 16}[memory] * _MIB
    elif memory == "fast":
        budget = max(256 * _MIB, gpu_bytes // 32, sum_bytes)
    elif memory in ("auto", "low", "min"):
        eighth = rows // 8 if type(rows) is int else hidden_size
        chunk = min(max(eighth, hidden_size // 2), hidden_size * 3 // 2)
        budget = max(256 * _MIB, chunk * row_bytes) if need_dweight else 512 * _MIB
        budget //= {"auto": 1, "low": 3, "min": 12}[memory]
        if need_dweight and type(rows) is int and rows <= hidden_size:
            budget = max(budget, rows * row_bytes)  # at once, which takes less memory than the sum
    elif isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory < 1 << 62:
        budget = int(memory)
    else:
        raise ValueError(f"{_OP}: memory is {memory!r}, expected 'fast', 'auto', 'low', 'min' or a number of bytes greater than 0")
    return max(budget // row_bytes // 128 * 128, 128)


def stored_classes(
    rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, memory: str | int, device_type: str = "cuda"
) -> int | None:
    """Of how many classes the gradient of all rows waits for the backward, laid over the weight's gradient, at a level
    of ``memory``: all, or so many that the backward makes the others' again. None: it is not laid over that.

    ``"auto"`` stores all, where that takes less memory than a float32 sum of the weight's gradient; but a CPU would
    take each product of 16-bit matrices twice to sum x's gradient in float32. ``"low"``: as many as one and a half of
    the weight's gradient and five of x's hold, gradients included. ``"min"``: those that the weight's gradient holds.
    """
    fits = vocab_size * hidden_size >= 64 * rows  # the gradients of 64 classes
    if not fits or rows * hidden_size == 0 or rows * vocab_size * dtype.itemsize < _WORTH_OVERLAYING:
        return None
    few = hidden_size <= rows <= hidden_size * 5 // 2
    if memory == "auto":
        return vocab_size if few and (device_type != "cpu" or dtype == accumulator(dtype)) else None
    dweight, dx = vocab_size * hidden_size * dtype.itemsize, rows * hidden_size * dtype.itemsize
    if memory == "low" and rows <= hidden_size * 5 // 2:
        stored = stored_within(dweight * 3 // 2 + dx * 5, rows, hidden_size, vocab_size, dtype)
        return stored if few or stored < vocab_size else None
    if memory == "min" and rows <= hidden_size * 8:
        return _C.overlaid_classes(rows, hidden_size, vocab_size)
    return None


def stored_within(budget: int, rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype) -> int:
    """How many classes' gradients fit into so many bytes, with the gradients of weight and x and what makes them."""
    inside = _C.overlaid_classes(rows, hidden_size, vocab_size)
    rest = budget - overlaid_bytes(rows, hidden_size, vocab_size, inside, dtype)
    return min(inside + max(0, rest // (rows * dtype.itemsize) // 64 * 64), vocab_size)


def overlaid_bytes(rows: int, hidden_size: int, vocab_size: int, stored: int, dtype: torch.dtype) -> int:
    """The most memory that the gradients of weight and x, and what makes them, have at a time."""
    sizes, acc = (rows, hidden_size, vocab_size, stored), accumulator(dtype).itemsize
    dweight, dx = vocab_size * hidden_size, rows * hidden_size
    rest_of_sum = (rows - rows * dtype.itemsize // acc) * hidden_size * acc  # of dx's sum, whose first rows become dx
    rest, spare = (_C.overlaid_rest(*sizes) * dtype.itemsize, _C.overlaid_spare(*sizes) * dtype.itemsize)
    on_the_way = max(spare, rest_of_sum) if stored == vocab_size else spare + rest_of_sum
    return (dweight + dx) * dtype.itemsize + rest + on_the_way


def chunk_classes(vocab_size: int, dtype: torch.dtype, memory: str | int) -> int:
    """How many classes' logits may exist at a time: all, unless a number of bytes does not hold those of 128 rows; but
    at least 1,024."""
    if isinstance(memory, str):
        return vocab_size
    fitting = int(memory) // (128 * dtype.itemsize) // _ROW_MULTIPLE * _ROW_MULTIPLE
    return min(max(fitting, 1024), vocab_size)


@torch.compiler.assume_constant_result
@functools.cache
def _total_memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def padded_vocab(vocab_size: int) -> int:
    """``_C.padded_vocab`` of a size that may be symbolic: the elements from one row of logits to the next."""
    return (vocab_size + _ROW_MULTIPLE - 1) // _ROW_MULTIPLE * _ROW_MULTIPLE
