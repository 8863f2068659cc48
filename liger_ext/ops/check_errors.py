"""Errors that a GPU found out while the host was ahead."""

from __future__ import annotations

import torch

from liger_ext import _load
from liger_ext.ops.softmax import softmax

__all__ = ["check_errors"]


def check_errors() -> None:
    """Waits for every CUDA device in use, and raises what liger_ext's kernels found on them.

    A target out of range on a GPU makes its row's loss and gradient NaN; ``rows`` that do not fit the targets make all
    losses and gradients NaN. The error is raised by the next liger_ext call on that device. Where no call comes (CUDA
    graphs replayed, or the end of a run), this function asks. Without a GPU it does nothing.

    Raises:
        IndexError: a target was outside ``[0, vocab_size)``; names op, row and value.
        ValueError: the fused loss's ``rows`` left out a row that counts: they were counted for other targets.
    """
    if not (_load.gpu_available() and torch.cuda.is_initialized()):
        return
    for device in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(device) > 0:
            torch.cuda.synchronize(device)
    # Every op looks at the record before it starts.
    with torch.no_grad():
        softmax(torch.zeros(1, device="cuda"))
