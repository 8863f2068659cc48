"""The record of the generalised Jensen-Shannon divergence: its formula, TRL's computation as the baseline, the
magnitudes of intermediate values (the scales of rounding errors), and the shapes to time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors

# Replaces -inf: exp(_FLOOR) is 0 in float64, and differences with _FLOOR are finite.
_FLOOR = -1e4


def _finite(log: Tensor) -> Tensor:
    return log.masked_fill(log == -math.inf, _FLOOR)


def _log_mixture(log_q: Tensor, log_p: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(math.log(beta) + _finite(log_p), math.log1p(-beta) + _finite(log_q))


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Returns ``a * log(a / b)``, and 0 where ``a`` is 0."""
    there = log_a != -math.inf
    log_a, log_b = torch.where(there, log_a, _FLOOR), torch.where(there, log_b, _FLOOR)
    return torch.exp(log_a) * (log_a - log_b)


def _counted(log_q: Tensor, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    every = torch.ones(log_q.shape[:-1], dtype=torch.bool, device=log_q.device)
    return every if shift_labels is None else shift_labels != ignore_index


def _mean(columns: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted[..., None], columns, 0).sum() / counted.sum().clamp(min=1)


def jsd(
    log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> dict[str, Tensor]:
    counted = _counted(log_q, shift_labels, ignore_index)
    # An ignored row has no gradient, even if it contains NaN.
    log_q, log_p = (torch.where(counted[..., None], t, 0) for t in (log_q, log_p))
    if beta == 0:
        columns = _kl(log_p, log_q)
    elif beta == 1:
        columns = _kl(log_q, log_p)
    else:
        log_m = _log_mixture(log_q, log_p, beta)
        columns = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return {"loss": _mean(columns, counted)}


def torch_jsd(
    log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> dict[str, Tensor]:
    """Computes the divergence with the functions that TRL uses."""
    if beta == 0:
        columns = F.kl_div(log_q, log_p, reduction="none", log_target=True)
    elif beta == 1:
        columns = F.kl_div(log_p, log_q, reduction="none", log_target=True)
    else:
        log_m = torch.logsumexp(torch.stack([log_p + math.log(beta), log_q + math.log1p(-beta)]), 0)
        p_terms = F.kl_div(log_m, log_p, reduction="none", log_target=True)
        q_terms = F.kl_div(log_m, log_q, reduction="none", log_target=True)
        columns = beta * p_terms + (1 - beta) * q_terms
    return {"loss": _mean(columns, _counted(log_q, shift_labels, ignore_index))}


def jsd_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    """Returns the sizes of the terms of both sums and of the gradient. Each term has the error of its exponentials, and
    that of the float64 reference, which subtracts numbers that may be nearly equal. For 16-bit inputs, GPUs compute
    logarithms near 0 with the absolute error of numbers near 1."""
    log_q, log_p, beta = inputs["log_q"].detach(), inputs["log_p"].detach(), inputs.get("beta", 0.5)
    counted = _counted(log_q, inputs.get("shift_labels"), inputs.get("ignore_index", -100))
    x, y = (torch.where(counted[..., None], _finite(t), 0) for t in (log_q, log_p))
    q, p = x.exp() * (1 + x.abs() / 4), y.exp() * (1 + y.abs() / 4)
    none = torch.zeros(())
    compute = inputs["compute_dtype"]
    rounded = 16 * torch.finfo(torch.float64).eps / torch.finfo(accumulator(compute)).eps
    if torch.finfo(compute).bits == 16:
        rounded = 0.25
    if beta in (0, 1):
        p_terms, q_terms = (p * (y - x).abs(), none) if beta == 0 else (none, q * ((x - y).abs() + 1))
        slopes = p if beta == 0 else q_terms
    else:
        # log M is the larger of x and y, plus a number with a rounding error of its own size.
        log_m = _log_mixture(x, y, beta)
        from_m = torch.maximum(x, y) - log_m
        p_terms, q_terms = (
            w * ((log_z - log_m).abs() + 2 * from_m.abs() + rounded)
            for w, log_z in ((beta * p, y), ((1 - beta) * q, x))
        )
        slopes = q_terms
    by_rows = 1 / counted.sum().clamp(min=1)
    scales = {"loss": _mean(p_terms + q_terms, counted)}
    if "loss" in grads:
        scales["dlog_q"] = slopes * counted[..., None] * by_rows * grads["loss"].abs()
    return scales


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    student, teacher = (make.leaf(size.rows, size.cols, scale=2) for _ in range(2))
    log_softmax = functools.partial(torch.log_softmax, dim=-1)
    log_q, log_p = (make.computed(log_softmax, t.detach().float()) for t in (student, teacher))
    return {"log_q": log_q.requires_grad_(), "log_p": log_p, "shift_labels": make.targets(size.rows, size.cols)}


JSD = Record(
    name="jsd",
    reference=jsd,
    baseline=torch_jsd,
    scales=jsd_scales,
    # Two exponentials 8, the logarithm 4, products and the sum of two terms.
    roundings={"loss": Roundings(18, 1), "dlog_q": Roundings(18)},
    inputs=_inputs,
    example=lambda tokens, hidden, vocab: Size(tokens, vocab),
    llama=Size(4096, 128_256),
    moved=matrices(2, 3),
    timed=(
        Timed(sizes((4096, 128_256), (8192, 32_000), (4096, 151_936)), sizes((256, 49_152))),
        Timed(sizes((4096, 128_256)), sizes((256, 49_152)), {"beta": 0.0}, "forward KL", peers=False),
    ),
    outputs=("loss",),
    constants=("log_p",),
)
