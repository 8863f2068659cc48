"""Computes the launch plans of each op at the sizes of an 8B Llama, and the number of tokens for which the fused loss
fits in memory, for the doctor. A device profile suffices for this, so the GPU need not be in this machine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import _C
from .ops._loss_arguments import FusedLossCall
from .ops._loss_devices import profile_index
from .ops._loss_plan import LEVELS, choose
from .records import RECORDS

TOKENS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 8192, 4096, 14_336, 32, 8, 128, 128_256
DTYPE = torch.bfloat16
SHAPE = (
    f"{TOKENS:,} tokens, hidden size {HIDDEN:,}, MLP {MLP:,}, {HEADS} + {KV_HEADS} heads of {HEAD_DIM}, "
    f"vocabulary {VOCAB:,}, bfloat16"
)


def plans(profile: _C.DeviceProfile) -> Iterator[tuple[str, list[_C.NamedLaunch] | Exception]]:
    """Yields the name of each op with its own kernels, and of its backward, with the launches or the op's error."""
    for record in RECORDS.values():
        if record.kernels == record.name:
            for name in (record.name, f"{record.name}_backward"):
                try:
                    yield name, record.plans(profile, record.llama, DTYPE, name)
                except Exception as error:  # any error is reported, and the other ops are planned
                    yield name, error


def fused_loss_bytes(call: FusedLossCall, memory: str | int) -> int:
    """Returns the peak memory of a call: x, weight and target, their gradients, and the op's allocations."""
    inputs = (call.rows + call.vocab) * call.hidden * call.compute.itemsize + call.rows * 8
    return inputs + choose(call, memory).bytes


def most_tokens(call: FusedLossCall, memory: str | int, free: int) -> int:
    """Returns the largest number of tokens whose ``fused_loss_bytes`` are at most ``free``; 0 if one token is too
    many."""

    def fits(tokens: int) -> bool:
        return fused_loss_bytes(call.resized(rows=tokens), memory) <= free

    # The memory is not monotonic: more tokens may take less where the plan changes. So the bisection starts at the
    # largest of many counts that fits.
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
    """Returns, by the name of each level of memory, four facts about the fused loss at ``SHAPE``. "rows": the rows of
    logits that exist at a time. "stored": the share of the gradient of the logits that an overlaid plan stores for the
    backward; 1 for other plans. "bytes": the peak memory of the call. "tokens": the largest number of tokens,
    with Llama's other sizes, for which a call fits in ``free`` bytes of this GPU's memory.
    """
    found = {}
    call = FusedLossCall.uniform(TOKENS, HIDDEN, VOCAB, DTYPE, profile_index(profile))
    for level in LEVELS:
        chosen = choose(call, level).plan
        found[level] = {
            "rows": _C.equal_chunks(TOKENS, chosen.rows),
            "stored": chosen.classes / VOCAB if chosen.gradients == int(_C.Gradients.overlaid) else 1.0,
            "bytes": fused_loss_bytes(call, level),
            "tokens": most_tokens(call, level, free),
        }
    return found
