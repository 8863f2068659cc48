"""What one layer and the head of an 8B Llama ask of a GPU: the launches of each op, and how many tokens the fused loss
takes. Numbers only: they can be asked for a GPU that is not here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from . import _C
from .ops._checks import accumulator
from .ops._chunks import overlaid_bytes, rows_within, stored_classes
from .records import RECORDS

TOKENS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256
DTYPE = torch.bfloat16
SHAPE = (
    f"{TOKENS:,} tokens, hidden size {HIDDEN:,}, MLP {MLP:,}, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}, "
    f"vocabulary {VOCAB:,}, bfloat16"
)
LEVELS = ("fast", "auto", "low", "min")
"""Of ``memory`` of the fused loss."""


def plans(profile: _C.DeviceProfile) -> Iterator[tuple[str, list[_C.NamedLaunch]]]:
    """Ops and the launches that each makes."""
    for record in RECORDS.values():
        if record.kernels == record.name:
            for name in (record.name, f"{record.name}_backward"):
                yield name, record.plans(profile, record.llama, DTYPE, name)


def rows_at_a_time(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> int:
    """Rows of logits in memory at a time, of a step of ``tokens`` on a GPU with ``total`` bytes."""
    if stored_classes(tokens, hidden, vocab, dtype, memory) is not None:
        return tokens
    return _C.equal_chunks(tokens, rows_within(vocab, hidden, dtype, memory, total, True, tokens))


def fused_loss_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> int:
    """The most memory that a training step's fused loss has at a time on a GPU with ``total`` bytes: x, weight and
    target, their gradients, and what the op allocates on the way."""
    size, wide = dtype.itemsize, accumulator(dtype).itemsize
    x, weight = tokens * hidden * size, vocab * hidden * size
    inputs = x + weight + tokens * (8 + wide)  # with target and each row's loss
    stored = stored_classes(tokens, hidden, vocab, dtype, memory)
    if stored is not None:
        return inputs + overlaid_bytes(tokens, hidden, vocab, stored, dtype)
    rows = rows_at_a_time(tokens, hidden, vocab, dtype, memory, total)
    logits = rows * _C.padded_vocab(vocab) * size
    if tokens <= rows:  # the gradient of all logits waits for the backward, which makes the results
        return inputs + weight + x + logits
    # The forward adds up dx and dweight beside one chunk's logits; the backward makes of them the results.
    return inputs + x + vocab * hidden * wide + max(logits, x)


def most_tokens(free: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> int:
    """The largest number of tokens whose ``fused_loss_bytes`` are at most ``free``; 0 if not even one."""

    def fits(tokens: int) -> bool:
        return fused_loss_bytes(tokens, hidden, vocab, dtype, memory, total) <= free

    # Between these numbers, at which the op takes another way, more tokens take more memory, up to the size of chunks.
    at_once = rows_within(vocab, hidden, dtype, memory, total, True)
    starts = sorted({1, hidden, hidden * 5 // 2 + 1, hidden * 8 + 1, at_once + 1, 1 << 40})
    for low, high in reversed(list(itertools.pairwise(starts))):
        if not fits(low):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
    return 0


def tokens_at_each_level(total: int, free: int) -> dict[str, dict[str, int]]:
    """By name of a memory level: "rows" of logits at a time and "bytes" that the call of ``SHAPE`` takes, and "tokens",
    the largest count that the fused loss takes at Llama's sizes on a GPU with ``total`` bytes of memory of which
    ``free`` can be had. Of so many tokens x and its gradient are nearly all: most levels have the same."""
    found = {}
    for level in LEVELS:
        sizes = HIDDEN, VOCAB, DTYPE, level, total
        found[level] = {
            "rows": rows_at_a_time(TOKENS, *sizes),
            "bytes": fused_loss_bytes(TOKENS, *sizes),
            "tokens": most_tokens(free, *sizes),
        }
    return found
