"""Errors of log-probabilities, entropies and gradients, compared with a float64 reference. The reference starts from
logits as a matmul stores them, rounded to its dtype. So a provider that keeps unrounded logits is further from this
reference, though not from the truth. The reference does not round the gradient of the logits; for comparison there are
the errors of matmuls whose operand is this gradient, rounded once to the matmuls' dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CLASSES = 1024  # number of classes whose dweight is compared


@dataclass
class Errors:
    """Root mean square errors: of log-probabilities and entropies in nats, of gradients relative to their size."""

    log_probs: float | None = None
    entropy: float | None = None
    dx: float | None = None
    dweight: float | None = None

    def __str__(self) -> str:
        return ", ".join("-" if error is None else f"{error:.1e}" for error in vars(self).values())


class Exact:
    """Exact results for the loss ``-(log_probs * coefficients).sum() - (entropy * bonus).sum()``."""

    @torch.no_grad()
    def __init__(
        self, x: Tensor, w: Tensor, t: Tensor, coefficients: Tensor, bonus: Tensor | None, compute: torch.dtype
    ) -> None:
        low_x, low_w = x.to(compute), w.to(compute)
        logits = (low_x @ low_w.T).double()
        log_p = logits.log_softmax(-1)
        self.log_probs = log_p.gather(1, t[:, None])[:, 0]
        p = log_p.exp_()
        self.entropy = logits.logsumexp(-1) - (p * logits).sum(-1)
        g = p * coefficients.double()[:, None]
        g[torch.arange(len(t), device=t.device), t] -= coefficients.double()
        if bonus is not None:  # p * (log p + entropy)
            g += bonus.double()[:, None] * p * (logits - logits.logsumexp(-1)[:, None] + self.entropy[:, None])
        del logits, p, log_p
        self._classes = torch.linspace(0, len(w) - 1, min(_CLASSES, len(w)), device=w.device).long()
        self.dx = g @ low_w.double()
        self.dweight = g[:, self._classes].T @ low_x.double()
        rounded = g.to(compute)
        self._one_matmul = rounded @ low_w, rounded[:, self._classes].T @ low_x

    def matmul_errors(self) -> Errors:
        dx, dweight = self._one_matmul
        return Errors(dx=_relative(dx, self.dx), dweight=_relative(dweight, self.dweight))

    @torch.no_grad()
    def errors(self, log_probs: Tensor, entropy: Tensor | None, gradients: tuple[Tensor, ...] = ()) -> Errors:
        """``gradients``: of x, or of x and weight."""
        errors = Errors(_absolute(log_probs, self.log_probs))
        if entropy is not None:
            errors.entropy = _absolute(entropy, self.entropy)
        if gradients:
            errors.dx = _relative(gradients[0], self.dx)
        if len(gradients) > 1:
            errors.dweight = _relative(gradients[1][self._classes], self.dweight)
        return errors


def _absolute(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
