"""What one layer and the head of an 8B Llama ask of a GPU: the launches of each op, and how many tokens the fused loss
takes. Numbers only: they can be asked for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _C
from .ops._loss_devices import device_with
from .ops._loss_plan import LEVELS, Call, choose
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


def fused_loss_bytes(call: Call, memory: str | int) -> int:
    """The most memory that it has at a time: x, weight and target, their gradients, and what the op allocates."""
    inputs = (call.rows + call.vocab) * call.hidden * call.compute.itemsize + call.rows * 8
    return inputs + choose(call, memory).bytes


def most_tokens(call: Call, memory: str | int, free: int) -> int:
    """The largest number of tokens whose ``fused_loss_bytes`` are at most ``free``; 0 if not even one."""

    def fits(tokens: int) -> bool:
        return fused_loss_bytes(call._replace(rows=tokens), memory) <= free

    # More tokens may take less memory where another plan begins, so the last of many counts is the one to look behind.
    counts = [1, *(int(1.2**power) for power in range(20, 130))]
    fitting = [index for index, tokens in enumerate(counts[:-1]) if fits(tokens)]
    if not fitting:
        return 0
    low, high = counts[fitting[-1]], counts[fitting[-1] + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def tokens_at_each_level(profile: _C.DeviceProfile, free: int) -> dict[str, dict[str, float]]:
    """By name of a memory level: "rows" of logits at a time, the share of their gradient that is "stored" until it is
    used, and "bytes" that the call of ``SHAPE`` takes, and "tokens", the largest count that the fused loss takes at
    Llama's sizes on this GPU, of whose memory ``free`` bytes can be had."""
    found = {}
    call = Call.of(TOKENS, HIDDEN, VOCAB, DTYPE, device_with(profile))
    for level in LEVELS:
        chosen = choose(call, level).plan
        found[level] = {
            "rows": _C.equal_chunks(TOKENS, chosen.rows),
            "stored": min(chosen.classes / VOCAB, 1.0),
            "bytes": fused_loss_bytes(call, level),
            "tokens": most_tokens(call, level, free),
        }
    return found
