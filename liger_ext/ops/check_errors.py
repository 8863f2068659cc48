"""``check_errors`` raises errors that kernels found on a GPU after the host had left the call."""

from __future__ import annotations

import torch

from liger_ext import _load
from liger_ext.ops.softmax import softmax

__all__ = ["check_errors"]


def check_errors() -> None:
    """Waits for every CUDA device in use, and raises the first error that liger_ext's kernels found.

    A target out of range on a GPU makes its row's loss and gradient NaN. ``rows`` that do not fit the targets make all
    losses and gradients NaN. The next liger_ext call on a GPU raises the error. Call this function if no such call
    follows (after replays of a CUDA graph, or at the end of a run). Without a GPU it does nothing.

    Raises:
        IndexError: a target was outside ``[0, vocab_size)``. The message names op, row and value.
        ValueError: the fused loss's ``rows`` lacked a row that is not ignored: they were counted for other
            targets, or with too few ``max_rows``.
    """
    if not (_load.gpu_available() and torch.cuda.is_initialized()):
        return
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device) > 0:
            torch.cuda.synchronize(device)
    # Every op reads the error record, which all devices share, before it starts.
    with torch.no_grad():
        softmax(torch.zeros(1, device="cuda"))
