"""The largest error against float64 that a result may have, on every platform: derived, not measured.

A result is computed in the accumulator's dtype (float32; float64 for float64) and rounded once to its own dtype.
``exact`` is the result in float64. So the error of element i of a result is at most

    half an ulp of the result's dtype at exact[i]                                          the rounding at the store
  + (steps + sums * sqrt(length / 16)) * max(1, sqrt(terms) / 2) * eps / 2 * scale[i]      the arithmetic
  + eps16 / 2 * |exact[i]|              if an intermediate value is stored in 16 bits: in casting mode "llama", or dx of
                                        the fused loss before the factor of its row (reduction "none")
  + the smallest normal float32         approximate exponentials and reciprocals of GPUs flush smaller values to zero

with ``eps`` of float32 (float64 for float64), and ``eps16`` of the dtype of the intermediate value. ``scale`` is the
magnitude of the intermediate values from which the element is computed (``Record.scales``). ``steps`` counts the
roundings between inputs and result (``Record.roundings``): 1 for each operation; 4 for an exponential, reciprocal
square root or error function, whose error is at most 2 ulp on every platform; 2 for a reciprocal. Every platform sums a
row of ``length`` elements in at least 16 partial sums, and the n roundings of a sum add up to sqrt(n) roundings (Higham
and Mary, 2019); ``sums`` is the number of row sums in the result. ``terms`` is the number of rows over which a
parameter's gradient is summed.

No platform has a term of its own. bf16 is a storage format only, so hardware without bf16 arithmetic has the same
error. Only GPUs flush to zero, but the bound allows it everywhere, since it is too small to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.records import RECORDS, Roundings

__all__ = ["ROUNDINGS", "bound", "half_ulp", "result_roundings"]


ROUNDINGS: dict[str, Mapping[str, Roundings]] = {name: record.roundings for name, record in RECORDS.items()}
"""The roundings of each result, by op and name of the result. The gradient of input x is called "dx"."""


def result_roundings(op: str, what: str) -> Roundings:
    """Returns the roundings of a result. Raises ValueError, with the known names, if the op or result has no bound."""
    found = ROUNDINGS.get(op, {}).get(what)
    if found is None:
        known = ", ".join(ROUNDINGS.get(op, ROUNDINGS))
        raise ValueError(f"no bound is stated for {what!r} of {op!r}; known: {known}")
    return found


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns half the distance between neighbours of ``dtype`` around each element of ``value`` (float64)."""
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
    """Returns the largest allowed error of each element of a result, in the shape of ``exact``.

    Args:
        op, what: the op, and its result ("out", "loss") or the gradient of an input ("dx").
        exact: the result in float64, of any shape.
        dtype: the dtype in which the result is stored.
        scale: the magnitude of the values from which each element is computed; broadcasts to ``exact``.
        compute: the inputs' dtype (fused loss: the matmuls'), which determines the accumulator; ``dtype`` if None.
        length: the number of elements in a row's sums: columns, or the vocabulary size.
        terms: the number of rows over which a parameter's gradient is summed.
        stored: the dtype to which an intermediate value as large as the result is rounded, or None.
    """
    counted = result_roundings(op, what)
    acc = accumulator(compute or dtype)
    # A float64 accumulator is converted to 16 bits through float32, so eps is float32's unless the result is float64.
    # A float64 result has twice the roundings: its float64 reference is rounded as often as the result.
    both = 2 if dtype == torch.float64 else 1
    eps = torch.finfo(acc if dtype == torch.float64 else torch.float32).eps
    steps = both * (counted.steps + counted.sums * math.sqrt(max(1.0, length / 16))) * max(1.0, math.sqrt(terms) / 2)
    size = torch.as_tensor(scale, dtype=torch.float64, device=exact.device).abs()  # class weights may be negative
    arithmetic = size * (steps * eps / 2)
    allowed = half_ulp(exact, dtype) + arithmetic + torch.finfo(torch.float32).tiny
    if stored is not None and torch.finfo(stored).bits == 16:
        allowed = allowed + exact.abs() * (torch.finfo(stored).eps / 2)
    return allowed
