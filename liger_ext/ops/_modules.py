"""What the modules of several ops share."""

from __future__ import annotations

import numbers

import torch
from torch import nn

from liger_ext.ops._checks import REDUCTIONS, check_integer, code_of

_INITIALISERS = {"ones": torch.ones, "zeros": torch.zeros}


def parameter(init_fn: str, hidden_size: int) -> nn.Parameter:
    if not isinstance(init_fn, str) or init_fn not in _INITIALISERS:
        raise ValueError(f"init_fn is {init_fn!r}, expected 'ones' or 'zeros'")
    return nn.Parameter(_INITIALISERS[init_fn](hidden_size))


def check_number(module: str, name: str, value: object, least: float, most: float, expected: str = "a number") -> None:
    """When a module is made, rather than at its first call."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{module}: {name} is {value!r}, expected {expected}")
    if not least <= value <= most:
        raise ValueError(f"{module}: {name} is {value}, expected {expected} in [{least}, {most}]")


def check_loss_options(
    module: str, ignore_index: int, label_smoothing: float, reduction: str, softcap: float | None
) -> None:
    check_integer(module, ignore_index=ignore_index)
    check_number(module, "label_smoothing", label_smoothing, 0, 1)
    code_of(module, "reduction", reduction, REDUCTIONS)
    if softcap is not None:
        check_number(module, "softcap", softcap, 1e-18, 1e18, "None or a number")
