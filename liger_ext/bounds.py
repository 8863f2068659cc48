"""The error that every platform may have against float64, whatever computes there: derived, not measured.

A result is computed in the accumulator's dtype (float32; float64 for float64) and rounded once to its own. So element i
of a result may be off by

    half an ulp of the result's dtype at exact[i]                                          the rounding at the store
  + (steps + sums * sqrt(length / 16)) * max(1, sqrt(terms) / 2) * eps / 2 * scale[i]      the arithmetic
  + eps16 / 2 * |exact[i]|              where a 16-bit value is stored on the way: by definition (casting mode "llama"),
                                        or dx of the fused loss before each row's own factor (reduction "none")
  + the smallest normal float32         what approximate exponentials and reciprocals of GPUs flush to zero

with ``eps`` of the accumulator's dtype and ``scale`` the size of the values that the element is computed from (the
op's record gives it). ``steps`` counts the roundings between inputs and result (``Record.roundings``): one for each
operation; 4 for an exponential, reciprocal square root or error function, which no platform has worse than 2 ulp; 2 for
a reciprocal. A row of ``length`` elements is summed in at least 16 parts on every platform, and n roundings of a sum
add up to sqrt(n) of them (Higham and Mary, 2019), ``sums`` times in the result; ``terms`` are the rows that a
parameter's gradient is summed over.

No platform has a term of its own: bf16 is stored only, so hardware without bf16 arithmetic computes as the other does,
and the flush to zero, which only GPUs do, is allowed to all because it is smaller than anything a result is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.records import RECORDS, Roundings

__all__ = ["ROUNDINGS", "bound", "half_ulp", "roundings_of"]


ROUNDINGS: dict[str, Mapping[str, Roundings]] = {name: record.roundings for name, record in RECORDS.items()}
"""For each op and result, a gradient of input x being "dx"."""


def roundings_of(op: str, what: str) -> Roundings:
    """Raises ValueError, with the names there are, for an op or a result that has no bound."""
    found = ROUNDINGS.get(op, {}).get(what)
    if found is None:
        known = ", ".join(ROUNDINGS.get(op, ROUNDINGS))
        raise ValueError(f"no bound is stated for {what!r} of {op!r}; known: {known}")
    return found


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of ``dtype`` around each element of ``value`` (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(min=info.smallest_normal))[1] - 1
    return torch.ldexp(torch.full_like(value, info.eps / 2), exponent)


def bound(
    op: str,
    what: str,
    exact: Tensor,
    dtype: torch.dtype,
    scale: Tensor | float,
    *,
    compute: torch.dtype | None = None,
    length: int = 1,
    terms: int = 1,
    stored: torch.dtype | None = None,
) -> Tensor:
    """The largest error of each element of a result in ``dtype`` whose float64 value is ``exact``: of its shape.

    Args:
        op, what: the op, and its result ("out", "loss") or the gradient of an input ("dx").
        exact: any shape, float64.
        dtype: in which the result is stored.
        scale: the size of the values that each element is computed from; broadcasts to ``exact``.
        compute: the inputs' dtype (fused loss: the matmuls'), whose accumulator is computed in; ``dtype`` if None.
        length: elements of a row's sums: columns, or the vocabulary.
        terms: rows that a parameter's gradient is summed over.
        stored: a value as large as the result is rounded to this dtype on the way.
    """
    counted = roundings_of(op, what)
    acc = accumulator(compute or dtype)
    # float64 goes into 16 bits by way of float32; and float64 is judged by float64, which is rounded as often itself.
    both = 2 if dtype == torch.float64 else 1
    eps = torch.finfo(acc if dtype == torch.float64 else torch.float32).eps
    steps = both * (counted.steps + counted.sums * math.sqrt(max(1.0, length / 16))) * max(1.0, math.sqrt(terms) / 2)
    size = torch.as_tensor(scale, dtype=torch.float64, device=exact.device).abs()  # class weights may be negative
    arithmetic = size * (steps * eps / 2)
    allowed = half_ulp(exact, dtype) + arithmetic + torch.finfo(torch.float32).tiny
    if stored is not None and torch.finfo(stored).bits == 16:
        allowed = allowed + exact.abs() * (torch.finfo(stored).eps / 2)
    return allowed
