"""What one layer and the head of an 8B Llama ask of a GPU: the launches of each op, and how many tokens the fused loss
takes. Numbers only: they can be asked for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _C
from .ops._checks import accumulator
from .ops.fused_linear_cross_entropy import rows_within
from .records import RECORDS

TOKENS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256
DTYPE = torch.bfloat16
SHAPE = (
    f"{TOKENS:,} tokens, hidden size {HIDDEN:,}, MLP {MLP:,}, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}, "
    f"vocabulary {VOCAB:,}, bfloat16"
)
LEVELS: dict[str, str | int] = {"auto": "auto", "1 GiB": 1 << 30, "256 MiB": 1 << 28, "128 rows": 1}
"""Values of ``memory`` of the fused loss, by the names that they are shown under."""


def plans(profile: _C.DeviceProfile) -> Iterator[tuple[str, list[_C.NamedLaunch]]]:
    """Ops and the launches that each makes."""
    for record in RECORDS.values():
        if record.kernels == record.name:
            for name in (record.name, f"{record.name}_backward"):
                yield name, record.plans(profile, record.llama, DTYPE, name)


def fused_loss_bytes(tokens: int, hidden: int, vocab: int, dtype: torch.dtype, chunk_rows: int) -> int:
    """The most memory that a training step's fused loss has at a time: x, weight and target, their gradients, and what
    the op allocates on the way, when at most ``chunk_rows`` rows of logits may exist."""
    size, wide = dtype.itemsize, accumulator(dtype).itemsize
    parameters = (tokens + vocab) * hidden * size
    losses = tokens * (8 + wide)  # target and each row's loss
    row = _C.padded_vocab(vocab) * size
    if tokens <= chunk_rows:  # the gradient of all logits waits for the backward, which makes the results
        return 2 * parameters + losses + tokens * row
    # The forward adds up dx and dweight beside one chunk's logits; the backward scales them into the results.
    sums = tokens * hidden * size + vocab * hidden * wide
    return parameters + losses + sums + max(_C.equal_chunks(tokens, chunk_rows) * row, parameters)


def most_tokens(free: int, hidden: int, vocab: int, dtype: torch.dtype, chunk_rows: int) -> int:
    """The largest number of tokens whose ``fused_loss_bytes`` are at most ``free``; 0 if not even one."""

    def fits(tokens: int) -> bool:
        return fused_loss_bytes(tokens, hidden, vocab, dtype, chunk_rows) <= free

    # One chunk, or several: within each, more tokens take more memory, up to the size of equal chunks.
    several = chunk_rows + 1
    low, high = (several, 1 << 40) if fits(several) else (0, chunk_rows + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def tokens_at_each_level(total: int, free: int) -> dict[str, dict[str, int]]:
    """By name of a memory level: "rows" of logits at a time, "bytes" that the call of ``SHAPE`` takes, and "tokens",
    the largest count that the fused loss takes at Llama's sizes on a GPU with ``total`` bytes of memory of which
    ``free`` can be had. Of so many tokens x and its gradient are nearly all: most levels have the same."""
    found = {}
    for name, level in LEVELS.items():
        sizes = HIDDEN, VOCAB, DTYPE, rows_within(VOCAB, HIDDEN, DTYPE, level, total, True)
        found[name] = {
            "rows": sizes[-1],
            "bytes": fused_loss_bytes(TOKENS, *sizes),
            "tokens": most_tokens(free, *sizes),
        }
    return found
