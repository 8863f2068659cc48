"""The accuracy rule: a result's error is at most PyTorch's error times a factor, plus half a unit in the last place.

Every output and every gradient is compared with a float64 reference on the same inputs, upcast. PyTorch's own functions
run on the same inputs, compute in the accumulator's dtype (fp32, or fp64 for fp64), round once, and are compared with
the same reference. Where the op stores an intermediate value in 16 bits (the logits of the fused loss, softmax's y),
they run in the inputs' dtypes instead. Element i's error is measured in units of

    u[i] = half an ulp of the output's dtype at reference[i]  +  STEPS half-ulps of the accumulator's dtype at scale[i],

where ``scale`` is the magnitude of the intermediate values from which the element is computed (by default its row's
largest value; times sqrt(terms) / 2 for a sum over ``terms`` rows, if that is above 1). In this unit the errors of the
rounding at the store are uniform in [-1, 1]. "random deviation" is the mean that such errors may have by chance, plus
0.05. Then

    largest error  <=  1                     +  FACTOR * PyTorch's largest error
    rms error      <=  rms of one rounding   +  FACTOR * PyTorch's rms error
    |mean error|   <=  random deviation      +  FACTOR * |PyTorch's mean error|

The last line, in which errors away from zero count as positive, applies to 16-bit results, except those of the
fused loss and softmax. It finds truncation, and results that are systematically too large or too small. FACTOR, STEPS
and this 0.05 are the only tolerances.

In addition, every element must keep the absolute bound of ``bounds.py``, which does not depend on PyTorch or on the
platform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_ext.bounds import half_ulp
from liger_ext.ops._checks import accumulator

FACTOR = 1.5
"""The allowed ratio of our error to PyTorch's, before the half ulp of rounding is added."""
STEPS = {torch.float32: 4, torch.float64: 32}
"""The number of allowed roundings in the accumulator's dtype. float64 has more, since its reference is rounded, too."""


@dataclass(frozen=True)
class Measurement:
    """The error of one output or gradient. ``measure`` is the measure that came closest to its bound; ``error`` and
    ``bound`` are mostly in units of u. ``share``: the largest error / bound by ``bounds.py``; above 1, the result
    fails."""

    op: str
    what: str
    dtype: torch.dtype
    measure: str
    error: float
    bound: float
    share: float = 0.0

    @property
    def ratio(self) -> float:
        """error / bound: at most 1 is a pass."""
        return self.error / self.bound if self.bound else math.inf

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        numbers = f"error {self.error:.3g}, bound {self.bound:.3g}, ratio {self.ratio:.2f}"
        return f"{self.op} {self.what} {dtype}: {self.measure} {numbers}"


def measure(
    op: str,
    what: str,
    result: Tensor,
    reference: Tensor,
    baseline: Tensor,
    *,
    compute: torch.dtype | None = None,
    scale: Tensor | float | None = None,
    terms: int = 1,
    unbiased: bool = True,
    allowed: Tensor | None = None,
) -> Measurement:
    """Applies the rule and returns the measurement, also if its ratio is above 1. ``reference`` is float64; the op
    computes in the accumulator of ``compute``, by default the result's dtype. ``allowed``: the result of ``bound``."""
    dtype = result.dtype
    if result.shape != reference.shape:
        raise AssertionError(f"{op} {what}: shape {tuple(result.shape)}, expected {tuple(reference.shape)}")
    if result.numel() == 0:
        return Measurement(op, what, dtype, "empty", 0.0, 1.0)
    ours, base, exact = (t.detach().to(torch.float64) for t in (result, baseline, reference))

    # Non-finite elements must agree; elements beyond the dtype's range must be at its end, or infinite.
    limit = torch.finfo(dtype).max * (1 - torch.finfo(dtype).eps)
    finite = exact.abs() < limit
    if not bool(finite.all()):
        special, beyond = ~exact.isfinite(), exact.isfinite() & ~finite
        same = torch.equal(*(t[special].nan_to_num(7e77, 8e88, -8e88) for t in (ours, exact)))
        if not same or not bool((ours[beyond] * exact[beyond].sign() >= limit).all()):
            return Measurement(op, what, dtype, "non-finite", math.inf, 1.0, math.inf)
        if not bool(finite.any()):
            return Measurement(op, what, dtype, "non-finite", 0.0, 1.0)

    if scale is None:
        magnitude = exact.abs().masked_fill(~finite, 0)
        scale = magnitude.amax(-1, keepdim=True) if magnitude.dim() else magnitude
    acc = accumulator(compute or dtype)
    step = STEPS[acc] * torch.finfo(acc).eps / 2 * max(1.0, math.sqrt(terms) / 2)
    floor = torch.as_tensor(scale, dtype=torch.float64, device=exact.device) * step
    away = torch.where(exact < 0, -1.0, 1.0) / (half_ulp(exact, dtype) + floor).clamp(min=1e-300)
    error, theirs = (ours - exact) * away, (base - exact) * away
    if not bool(finite.all()):
        error, theirs = error[finite], theirs[finite]
    largest, rms, mean = _statistics(error)
    if not math.isfinite(largest):
        return Measurement(op, what, dtype, "non-finite", math.inf, 1.0, math.inf)
    base_largest, base_rms, base_mean = _statistics(theirs)
    if not math.isfinite(base_largest):
        base_largest, base_rms, base_mean = _statistics(theirs[theirs.isfinite()])

    # A uniform error in [-1, 1] has mean square 1/3 +- 0.3 / sqrt(n), and mean 0 +- 0.58 / sqrt(n).
    noise = 1 / math.sqrt(error.numel())
    rounding_rms = math.sqrt(min(1.0, 1 / 3 + 5 * 0.3 * noise))
    measures = [("largest", largest, 1 + FACTOR * base_largest), ("rms", rms, rounding_rms + FACTOR * base_rms)]
    if unbiased and torch.finfo(dtype).bits == 16:
        measures.append(("mean", mean, 0.05 + 6 * rms * noise + FACTOR * base_mean))
    share = 0.0
    if allowed is not None:
        share = ((ours - exact).abs() / allowed)[finite].max().item()
        if not share <= 1:
            measures.append(("bound", share, 1.0))
    return max((Measurement(op, what, dtype, *m, share) for m in measures), key=lambda m: m.ratio)


def _statistics(error: Tensor) -> list[float]:
    """Returns the largest magnitude, the root mean square, and the magnitude of the mean; zeros for an empty tensor."""
    if error.numel() == 0:
        return [0.0, 0.0, 0.0]
    low, high = error.aminmax()
    largest = torch.maximum(-low, high)
    return torch.stack([largest, torch.linalg.vector_norm(error) / error.numel() ** 0.5, error.mean().abs()]).tolist()


def check(
    op: str,
    what: str,
    result: Tensor,
    reference: Tensor,
    baseline: Tensor,
    **options: Tensor | float | torch.dtype | None,
) -> Measurement:
    """Runs ``measure``. Raises AssertionError with op, dtype, error, bound and ratio if the result breaks the rule."""
    measured = measure(op, what, result, reference, baseline, **options)
    if not measured.ratio <= 1:
        raise AssertionError(f"further from float64 than the rule allows: {measured}")
    return measured
