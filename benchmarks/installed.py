"""Which peers can be imported here: Liger-Kernel's Triton kernels, QuACK."""

from __future__ import annotations

import importlib.util

import torch


def has(module: str) -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec(module) is not None
