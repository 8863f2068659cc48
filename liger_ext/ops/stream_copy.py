"""Registers the fake implementation of ``torch.ops.liger_ext.stream_copy``, with which the benchmarks and `liger_ext
tune` measure memory bandwidth, and an Autograd kernel that computes no gradient. The op has no public
function."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._register import LIBRARY, register_fake

__all__: list[str] = []


def _without_gradient(keyset: torch._C.DispatchKeySet, x: Tensor, per_thread: int) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        overload = torch.ops.liger_ext.stream_copy.default
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, x, per_thread)


register_fake("stream_copy", lambda args: args[0].new_empty(args[0].shape))
LIBRARY.impl("stream_copy", _without_gradient, "Autograd", with_keyset=True)
