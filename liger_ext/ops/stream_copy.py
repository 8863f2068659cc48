"""What torch has to know of ``torch.ops.liger_ext.stream_copy``, the benchmarks' measuring stick: it has no public
function, and no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import check_dtype, require
from liger_ext.ops._register import LIBRARY


def _fake(x: Tensor, per_thread: int) -> Tensor:
    op = "stream_copy"
    check_dtype(x.dtype, "x", x.device)
    require(
        x.is_contiguous() and x.numel() * x.element_size() % 16 == 0,
        op, ": x must be contiguous and a multiple of 16 bytes long",
    )  # fmt: skip
    require(per_thread in (1, 2, 4, 8), op, ": per_thread is ", per_thread, ", expected 1, 2, 4 or 8")
    return x.new_empty(x.shape)


def _without_gradient(keyset: torch._C.DispatchKeySet, x: Tensor, per_thread: int) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        overload = torch.ops.liger_ext.stream_copy.default
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, x, per_thread)


torch.library.register_fake("liger_ext::stream_copy", _fake, lib=LIBRARY)
LIBRARY.impl("stream_copy", _without_gradient, "Autograd", with_keyset=True)
