"""What one layer and the head of an 8B Llama ask of a GPU: the launches of each op, and how many tokens the fused loss
takes. Numbers only: they can be asked for a GPU that is not here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from . import _C
from .ops import _chunks
from .records import RECORDS

TOKENS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256
DTYPE = torch.bfloat16
SHAPE = (
    f"{TOKENS:,} tokens, hidden size {HIDDEN:,}, MLP {MLP:,}, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}, "
    f"vocabulary {VOCAB:,}, bfloat16"
)


def plans(profile: _C.DeviceProfile) -> Iterator[tuple[str, list[_C.NamedLaunch]]]:
    """Ops and the launches that each makes."""
    for record in RECORDS.values():
        if record.kernels == record.name:
            for name in (record.name, f"{record.name}_backward"):
                yield name, record.plans(profile, record.llama, DTYPE, name)


def fused_loss(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> _chunks.Plan:
    """How a training step of ``tokens`` takes the fused loss on a GPU with ``total`` bytes."""
    return _chunks.plan(_chunks.Call(tokens, hidden, vocab, dtype, total), memory)


def fused_loss_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> int:
    """The most memory that it has at a time: x, weight and target, their gradients, and what the op allocates."""
    inputs = (tokens + vocab) * hidden * dtype.itemsize + tokens * 8
    call = _chunks.Call(tokens, hidden, vocab, dtype, total)
    return inputs + _chunks.bytes_of(call, _chunks.plan(call, memory))


def most_tokens(free: int, hidden: int, vocab: int, dtype: torch.dtype, memory: str | int, total: int) -> int:
    """The largest number of tokens whose ``fused_loss_bytes`` are at most ``free``; 0 if not even one."""

    def fits(tokens: int) -> bool:
        return fused_loss_bytes(tokens, hidden, vocab, dtype, memory, total) <= free

    # Between these numbers, at which the op takes another way, more tokens take more memory, up to the size of chunks.
    at_once = _chunks.level_rows(_chunks.Call(1 << 40, hidden, vocab, dtype, total), memory)
    worth = -(-_chunks.WORTH_OVERLAYING // (vocab * dtype.itemsize))
    starts = sorted({1, hidden, hidden * 5 // 2 + 1, hidden * 8 + 1, hidden * 16 + 1, worth, at_once + 1, 1 << 40})
    for low, high in reversed(list(itertools.pairwise(starts))):
        if not fits(low):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
    return 0


def tokens_at_each_level(total: int, free: int) -> dict[str, dict[str, float]]:
    """By name of a memory level: "rows" of logits at a time, the share of their gradient that is "stored" until it is
    used, and "bytes" that the call of ``SHAPE`` takes, and "tokens", the largest count that the fused loss takes at
    Llama's sizes on a GPU with ``total`` bytes of memory of which ``free`` can be had."""
    found = {}
    for level in _chunks.LEVELS:
        sizes = HIDDEN, VOCAB, DTYPE, level, total
        way = fused_loss(TOKENS, *sizes)
        found[level] = {
            "rows": _C.equal_chunks(TOKENS, way.rows),
            "stored": min(way.classes / VOCAB, 1.0),
            "bytes": fused_loss_bytes(TOKENS, *sizes),
            "tokens": most_tokens(free, *sizes),
        }
    return found
