"""Random memory layouts of tensors, guards that detect writes to inputs and beside them, and comparisons of bits.

A layout is a stride for each dimension and an offset into a buffer. The strides are drawn from the innermost dimension
outwards, the dimensions in any order. Each one either continues what lies inside it (dense), leaves a gap (slices,
padded rows, a last stride of 2), overlaps it, or is 0 (expanded). So the draws include contiguous, transposed,
permuted, sliced, padded, offset, expanded and overlapping tensors, and all mixtures. torch has no negative strides.

Draws come from a ``random.Random``. hypothesis tests pass ``st.randoms(use_true_random=False)``, whose draws shrink.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

AROUND = 16  # elements before and after a tensor: whole vectors of 16 bytes in every dtype, which keeps the alignment


@dataclass(frozen=True)
class Layout:
    strides: tuple[int, ...]
    offset: int = 0

    def span(self, shape: Sequence[int]) -> int:
        """Returns the number of buffer elements from the first element to the last."""
        if 0 in shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides, strict=True))


def contiguous(shape: Sequence[int], offset: int = 0) -> Layout:
    strides, inside = [], 1
    for size in reversed(shape):
        strides.append(inside)
        inside *= max(size, 1)
    return Layout(tuple(reversed(strides)), offset)


ALL = ("dense", "gap", "aligned gap", "expanded", "overlapping")
KINDS = [
    ("dense",),
    ("dense", "gap"),
    ("dense", "gap", "aligned gap"),
    ("dense", "expanded"),
    ("dense", "overlapping"),
    ALL,
]


def draw_layout(rng: Random, shape: Sequence[int]) -> Layout:
    kinds = rng.choice(KINDS)
    order = list(range(len(shape)))
    if rng.randrange(10) < 6:  # row-major order, for which most paths are designed
        order.reverse()
    else:
        rng.shuffle(order)
    strides, inside = [0] * len(shape), 1
    for dim in order:
        kind = rng.choice(kinds)
        if kind == "gap":
            strides[dim] = inside * rng.choice([1, 2]) + rng.choice([0, 1, 3])
        elif kind == "aligned gap":
            strides[dim] = (inside + 7) // 8 * 8 + rng.choice([0, 8])
        elif kind == "overlapping" and inside > 1:
            strides[dim] = rng.randint(1, inside - 1)
        elif kind == "expanded":
            strides[dim] = 0
        else:
            strides[dim] = inside
        inside += (max(shape[dim], 1) - 1) * strides[dim]
    return Layout(tuple(strides), rng.choice([0, 0, 0, 1, 3, 8]))


class Guarded:
    """Places tensors inside larger buffers whose other values are invalid (NaN, and targets far out of range), and
    detects any changed byte of a buffer."""

    def __init__(self) -> None:
        self._buffers: list[tuple[str, Tensor, Tensor]] = []

    def place(self, name: str, values: Tensor, layout: Layout) -> Tensor:
        """Returns the values in that layout. Elements that share memory take one of their values."""
        span = layout.span(values.shape)
        unused = float("nan") if values.dtype.is_floating_point else 1 << 40
        buffer = torch.full((2 * AROUND + layout.offset + span,), unused, dtype=values.dtype, device=values.device)
        first = AROUND + layout.offset
        if values.numel():
            where = torch.arange(len(buffer), device=values.device).as_strided(values.shape, layout.strides, first)
            buffer[where.flatten()] = values.detach().flatten()
        self._buffers.append((name, buffer, bits(buffer).clone()))
        return buffer.as_strided(values.shape, layout.strides, first)

    def changed(self) -> list[str]:
        """Returns the names of tensors whose buffers have changed, inside or outside of the tensor."""
        return [name for name, buffer, before in self._buffers if not torch.equal(bits(buffer), before)]


@contextlib.contextmanager
def unwritten_memory(byte: int) -> Iterator[None]:
    """Fills new CPU memory with this byte, or with its complement (glibc's M_PERTURB; a no-op with other C libraries).
    If a call has equal results under two different bytes, it wrote every element. Reused memory that holds the results
    of an equal call would hide a missing write."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    mallopt(-6, byte)
    try:
        yield
    finally:
        mallopt(-6, 0)


def bits(t: Tensor) -> Tensor:
    """Returns the bytes of a tensor, for a comparison that includes NaN and the sign of zero."""
    flat = t.detach().contiguous().flatten()  # a tensor of one element may have any stride
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether shape, dtype and bits are equal; all NaNs count as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(bits(a.masked_fill(nan, 0)), bits(b.masked_fill(nan, 0)))


def rows_are_aligned(op: str, t: Tensor) -> bool:
    """Returns whether the op's kernels may read the rows of t in vectors of 16 bytes. Kernels read rows of the last
    dimension that have one common stride in place, and all others from a contiguous copy, which is aligned (``as_rows``
    in csrc/ops/tensor.cpp). A row of GroupNorm spans several dimensions: its kernels read every tensor that is not
    contiguous from such a copy. Of a contiguous tensor only the address of the first element counts."""
    if t.dim() == 0 or not t.numel() or (t.shape[-1] > 1 and t.stride(-1) != 1):
        return True
    if t.is_contiguous():
        return t.data_ptr() % 16 == 0
    if op == "group_norm":
        return True
    leading = [(t.stride(i), t.shape[i]) for i in reversed(range(t.dim() - 1)) if t.shape[i] > 1]
    inside = leading[0][0] * leading[0][1] if leading else 0
    for stride, size in leading[1:]:
        if stride != inside:
            return True
        inside = stride * size
    row = leading[0][0] if leading else t.shape[-1]
    return t.data_ptr() % 16 == 0 and row * t.element_size() % 16 == 0


def significant_strides(t: Tensor) -> tuple[int, ...]:
    """Returns the strides that determine the addresses of elements: those of dimensions longer than 1, in a tensor that
    is not empty."""
    return tuple(s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1) if t.numel() else ()


def shares_memory(outputs: Iterable[Tensor], inputs: Iterable[Any]) -> bool:
    def storages(tensors: Iterable[Any]) -> list[int]:
        found = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
        return [s.data_ptr() for s in found if s.nbytes()]

    made = storages(outputs)
    return len(set(made)) < len(made) or not set(made).isdisjoint(storages(inputs))
