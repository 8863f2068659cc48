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
        ValueError: ``memory`` is neither ``"fast"``, ``"auto"`` nor a positive number.
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
    elif memory == "fast":
        budget = max(256 * _MIB, gpu_bytes // 32, sum_bytes)
    elif memory == "auto":
        eighth = rows // 8 if type(rows) is int else hidden_size
        chunk = min(max(eighth, hidden_size // 2), hidden_size * 3 // 2)
        budget = max(256 * _MIB, chunk * row_bytes) if need_dweight else 512 * _MIB
        if need_dweight and type(rows) is int and rows <= hidden_size:
            budget = max(budget, rows * row_bytes)  # at once, which takes less memory than the sum
    elif isinstance(memory, (int, float)) and not isinstance(memory, bool) and 0 < memory < 1 << 62:
        budget = int(memory)
    else:
        raise ValueError(f"{_OP}: memory is {memory!r}, expected 'fast', 'auto' or a number of bytes greater than 0")
    return max(budget // row_bytes // 128 * 128, 128)


def overlays(rows: int, hidden_size: int, vocab_size: int, dtype: torch.dtype, device_type: str = "cuda") -> bool:
    """Whether the gradient of all logits is large enough to be laid over the weight's, and takes less memory so than a
    float32 sum of the latter does. A CPU would take each product of 16-bit matrices twice to sum them in float32."""
    worth_it = rows * vocab_size * dtype.itemsize >= _WORTH_OVERLAYING
    sums = device_type != "cpu" or dtype == accumulator(dtype)
    return worth_it and sums and 0 < hidden_size <= rows <= hidden_size * 5 // 2


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
