"""Errors of a fused loss and of its dweight, compared with float64. The float64 reference starts from logits rounded to
the dtype of x, and rounds their gradient likewise, since a fused loss stores both in this dtype. So the errors contain
only the arithmetic of the loss, and the matmul of dweight with the roundings of its sums. For comparison there is the
error of one matmul of the stored gradient over all rows, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

MATMUL = "one matmul"
_CLASSES, _ROWS = 1024, 256  # classes whose dweight is compared; rows whose logits exist in float64 at a time


@dataclass
class Errors:
    dweight: float  # root mean square error, relative to that of dweight
    loss: float | None  # relative

    def __str__(self) -> str:
        return f"{self.dweight:.1e}" + (f", {self.loss:.0e}" if self.loss is not None else "")


class Exact:
    def __init__(self, x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> None:
        self._arguments = x, w, t
        self._classes = torch.linspace(0, len(w) - 1, min(_CLASSES, len(w)), device=w.device).long()
        self._stored = torch.empty(len(x), len(self._classes), device=x.device, dtype=x.dtype)
        losses = []
        with torch.no_grad():
            all_logits = x @ w.T
            for first in range(0, len(x), _ROWS):
                rows = slice(first, first + _ROWS)
                logits, target = all_logits[rows].double(), t[rows]
                counts = target >= 0
                lse = torch.logsumexp(logits, 1)
                at_target = logits.gather(1, target.clamp(min=0)[:, None])[:, 0]
                losses.append((lse - at_target)[counts])
                class_gradients = (logits[:, self._classes] - lse[:, None]).exp() - (
                    self._classes == target[:, None]
                ).double()
                self._stored[rows] = (class_gradients * counts[:, None]).to(x.dtype)
            self._count = int((t >= 0).sum())
            self._loss = float(torch.cat(losses).sum()) / self._count
            self._dweight = self._stored.double().T @ x.double() / self._count

    def matmul_errors(self) -> Errors:
        x, *_ = self._arguments
        with torch.no_grad():
            found = torch.addmm(x.new_zeros(()), self._stored.T, x, beta=0, alpha=1 / self._count)
        return Errors(self._off(found), None)

    def errors(self, loss_function: Callable) -> Errors:
        loss = loss_function(*self._arguments)
        (dweight,) = torch.autograd.grad(loss, self._arguments[1])
        off = abs(float(loss.detach().double()) - self._loss) / abs(self._loss)
        return Errors(self._off(dweight[self._classes]), off)

    def _off(self, found: torch.Tensor) -> float:
        return float((found.double() - self._dweight).norm() / self._dweight.norm())
