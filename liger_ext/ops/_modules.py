"""What the modules of several ops share."""

from __future__ import annotations

import torch
from torch import nn

from liger_ext.ops._checks import REDUCTIONS, code_of

_INITIALISERS = {"ones": torch.ones, "zeros": torch.zeros}


def parameter(init_fn: str, hidden_size: int) -> nn.Parameter:
    if init_fn not in _INITIALISERS:
        raise ValueError(f"init_fn is {init_fn!r}, expected 'ones' or 'zeros'")
    return nn.Parameter(_INITIALISERS[init_fn](hidden_size))


def check_loss_options(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    """When a module is made, rather than at its first call."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number in [0, 1]")
    code_of("reduction", reduction, REDUCTIONS)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, expected None or a number greater than 0")
