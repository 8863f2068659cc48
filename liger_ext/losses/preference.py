"""Preference losses of language models, computed from log-probabilities of whole answers: DPO and its variants, CPO,
SimPO, ORPO, KTO.

The log-probability of an answer is the sum over its tokens (``answer_log_probs``). A pair is a chosen and a rejected
answer to the same prompt. Every loss function returns one loss for each pair (KTO: for each answer), so that a caller
can weight them, except in the types of :func:`dpo_loss` that sort. The papers minimise the mean; those of CPO and ORPO
add the negative log-likelihood of the chosen answer, which is no part of these functions. In all formulas, s is the
sigmoid.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["answer_log_probs", "cpo_loss", "dpo_loss", "kto_loss", "orpo_loss", "simpo_loss"]


def answer_log_probs(log_probs: Tensor, mask: Tensor | None = None, *, average: bool = False) -> Tensor:
    """Computes the log-probability of each answer: the sum over its tokens.

    Args:
        log_probs: ``(answers, tokens)``, the result of :func:`liger_ext.functional.linear_log_probs`: the
            log-probability of each token, 0 where the target is ignored.
        mask: the tokens to sum, in the shape of log_probs, as bool or as weights. None: all tokens.
        average: divide the sum by the answer's sum of mask (SimPO, ORPO). The result of an answer without tokens is 0.

    Returns:
        ``(answers,)``, float32, or float64 for float64.

    Raises:
        ValueError: average without a mask; a mask of another shape.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    if mask is None:
        if average:
            raise ValueError("answer_log_probs: average is True and mask is None, expected the mask of the tokens")
        return log_probs.sum(-1, dtype=dtype)
    check_shapes("answer_log_probs", log_probs=log_probs, mask=mask)
    mask = mask.detach()
    total = torch.where(mask != 0, log_probs * mask, 0.0).sum(-1, dtype=dtype)
    return total / mask.sum(-1).clamp(min=1) if average else total


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
) -> Tensor:
    """Computes the loss of direct preference optimisation (Rafailov et al., arXiv:2305.18290) or of a variant.

    With ``c = beta * (chosen - ref_chosen)``, ``r = beta * (rejected - ref_rejected)``, ``d = c - r`` and
    ``e = label_smoothing``, the loss of a pair is, by ``loss_type``:

    - sigmoid: ``-(1 - e) * log s(d) - e * log s(-d)``
    - hinge (arXiv:2309.06657): ``max(0, 1 - d)``
    - exo_pair (arXiv:2402.00856): ``s(d) * (log s(d) - log(1 - e)) + s(-d) * (log s(-d) - log e)``
    - nca_pair (arXiv:2402.05369): ``-log s(c) - log s(-c) / 2 - log s(-r) / 2``
    - robust (arXiv:2403.00409): ``(-(1 - e) * log s(d) + e * log s(-d)) / (1 - 2 * e)``
    - bco_pair (arXiv:2404.04656): ``-log s(c) - log s(-r)``
    - sppo_hard (arXiv:2405.00675): ``(c / beta - 1 / (2 * beta))^2 + (r / beta + 1 / (2 * beta))^2``
    - apo_zero, apo_down (arXiv:2408.06266): ``1 - s(c) + s(r)``, ``s(c) + 1 - s(d)``
    - discopop (arXiv:2406.08414): ``-log s(d) * (1 - m) + exp(-d) * m``, ``m = s(d / discopop_tau)``
    - ipo (arXiv:2310.12036), sigmoid_norm (TRL), of averages over tokens: ``(d / beta - 1 / (2 * beta))^2``,
      ``-log s(d)``
    - aot, aot_unpaired (arXiv:2406.05882): sigmoid with
      ``d = beta * (sort(chosen - rejected) - sort(ref_chosen - ref_rejected))``, with ``d = sort(c) - sort(r)``

    aot and aot_unpaired sort over the pairs of the call. Their losses belong to ranks and not to pairs: take the mean.

    Args:
        chosen, rejected: ``(pairs,)``, log-probabilities of the answers (:func:`answer_log_probs`). For ipo and
            sigmoid_norm these and the reference's must be averages (``answer_log_probs(..., average=True)``).
        ref_chosen, ref_rejected: the reference model's log-probabilities of the same answers, which get no gradient.
            None: 0.
        beta: more than 0. A larger beta keeps the policy closer to the reference model.
        loss_type: one of these names.
        label_smoothing: the probability that a pair's labels are swapped, in [0, 0.5); more than 0 for exo_pair.
            Formulas without ``e`` ignore it.
        discopop_tau: the range of d over which discopop changes from one of its two losses to the other, more than 0.

    Returns:
        ``(pairs,)``.

    Raises:
        ValueError: an option outside its range; one reference without the other; shapes that differ.
    """
    check_dpo_options(beta, loss_type, label_smoothing, discopop_tau)
    if (ref_chosen is None) != (ref_rejected is None):
        raise ValueError("dpo_loss: ref_chosen and ref_rejected go together, and one of them is None")
    check_shapes("dpo_loss", chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    if ref_chosen is None:
        ref_chosen, ref_rejected = torch.zeros_like(chosen), torch.zeros_like(rejected)
    ref_chosen, ref_rejected = ref_chosen.detach(), ref_rejected.detach()
    c, r = chosen - ref_chosen, rejected - ref_rejected
    policy, reference = chosen - rejected, ref_chosen - ref_rejected
    differences = (beta * t for t in (c, r, c - r, policy, reference))
    return _DPO[loss_type](_Terms(*differences, beta, label_smoothing, discopop_tau))


class _Terms(NamedTuple):
    """The terms of the formulas of :func:`dpo_loss`."""

    c: Tensor
    r: Tensor
    d: Tensor
    policy: Tensor  # beta * (chosen - rejected)
    reference: Tensor
    beta: float
    e: float
    tau: float


def _sigmoid(d: Tensor, e: float) -> Tensor:
    loss = -F.logsigmoid(d)
    return loss if e == 0 else (1 - e) * loss - e * F.logsigmoid(-d)


def _exo_pair(t: _Terms) -> Tensor:
    d, e = t.d, t.e
    return d.sigmoid() * (F.logsigmoid(d) - math.log1p(-e)) + (-d).sigmoid() * (F.logsigmoid(-d) - math.log(e))


def _robust(t: _Terms) -> Tensor:
    return (t.e * F.logsigmoid(-t.d) - (1 - t.e) * F.logsigmoid(t.d)) / (1 - 2 * t.e)


def _discopop(t: _Terms) -> Tensor:
    # exp(-d) * m is one exponential: exp(-d) by itself overflows where m underflows.
    return -F.logsigmoid(t.d) * (-t.d / t.tau).sigmoid() + (F.logsigmoid(t.d / t.tau) - t.d).exp()


def _transport(x: Tensor, y: Tensor, e: float) -> Tensor:
    # Sorting pairs the values of x and y by optimal transport.
    return _sigmoid(x.sort(0).values - y.sort(0).values, e)


_DPO: dict[str, Callable[[_Terms], Tensor]] = {
    "sigmoid": lambda t: _sigmoid(t.d, t.e),
    "hinge": lambda t: (1 - t.d).relu(),
    "ipo": lambda t: ((t.d - 0.5) / t.beta).square(),
    "exo_pair": _exo_pair,
    "nca_pair": lambda t: -F.logsigmoid(t.c) - 0.5 * F.logsigmoid(-t.c) - 0.5 * F.logsigmoid(-t.r),
    "robust": _robust,
    "bco_pair": lambda t: -F.logsigmoid(t.c) - F.logsigmoid(-t.r),
    "sppo_hard": lambda t: ((t.c - 0.5) / t.beta).square() + ((t.r + 0.5) / t.beta).square(),
    "aot": lambda t: _transport(t.policy, t.reference, t.e),
    "aot_unpaired": lambda t: _transport(t.c, t.r, t.e),
    "apo_zero": lambda t: (-t.c).sigmoid() + t.r.sigmoid(),
    "apo_down": lambda t: t.c.sigmoid() + (-t.d).sigmoid(),
    "discopop": _discopop,
    "sigmoid_norm": lambda t: -F.logsigmoid(t.d),
}
CPO_TYPES = "sigmoid", "hinge", "ipo"
AVERAGE_TYPES = "ipo", "sigmoid_norm"  # their log-probabilities are averages over tokens


def check_dpo_options(beta: float, loss_type: str, label_smoothing: float, discopop_tau: float) -> None:
    """Raises the ValueErrors of :func:`dpo_loss` for its options."""
    check_loss_type(loss_type, _DPO)
    check_positive("dpo_loss", beta=beta, discopop_tau=discopop_tau)
    if loss_type == "exo_pair" and label_smoothing == 0:
        raise ValueError("label_smoothing must be > 0 for loss_type='exo_pair', and is 0")
    if not isinstance(label_smoothing, numbers.Real) or not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing must lie in [0.0, 0.5) for loss_type={loss_type!r}, and is {label_smoothing!r}"
        )


def check_loss_type(loss_type: str, types: Iterable[str]) -> None:
    if loss_type not in (names := tuple(types)):
        raise ValueError(f"Unsupported loss_type: {loss_type!r}, expected one of {', '.join(names)}")


def cpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0, loss_type: str = "sigmoid"
) -> Tensor:
    """Computes the loss of contrastive preference optimisation (Xu et al., arXiv:2401.08417), without its term for the
    negative log-likelihood of the chosen answers.

    It is :func:`dpo_loss` without a reference; sigmoid is ``-(1 - e) * log s(d) - e * log s(-d)``,
    ``d = beta * (chosen - rejected)``, ``e = label_smoothing``.

    Args:
        chosen, rejected: ``(pairs,)``, log-probabilities of the answers (:func:`answer_log_probs`); averages for ipo.
        beta: more than 0.
        label_smoothing: the probability that a pair's labels are swapped, in [0, 0.5). hinge and ipo ignore it.
        loss_type: sigmoid, hinge or ipo.

    Returns:
        ``(pairs,)``.

    Raises:
        ValueError: an option outside its range; shapes that differ.
    """
    check_loss_type(loss_type, CPO_TYPES)
    _check_pairs("cpo_loss", chosen, rejected, beta, label_smoothing)
    return dpo_loss(chosen, rejected, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)


def simpo_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float = 0.1, gamma: float = 0.5, label_smoothing: float = 0.0
) -> Tensor:
    """Computes the loss of simple preference optimisation (Meng et al., arXiv:2405.14734).

    It is :func:`cpo_loss` with ``d = beta * (chosen - rejected) - gamma``. The log-probabilities must be averages over
    tokens (``answer_log_probs(..., average=True)``).
    """
    _check_pairs("simpo_loss", chosen, rejected, beta, label_smoothing)
    check_number("simpo_loss", "gamma", gamma, "a number", lambda _: True)
    return _sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)


def _check_pairs(function: str, chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float) -> None:
    check_positive(function, beta=beta)
    check_number(function, "label_smoothing", label_smoothing, "a number in [0, 0.5)", lambda e: 0 <= e < 0.5)
    check_shapes(function, chosen=chosen, rejected=rejected)


def orpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Computes ORPO's term for the odds ratio (Hong et al., arXiv:2403.07691), without its term for the negative
    log-likelihood of the chosen answers.

    ``-beta * log s(o)``, ``o = log_odds(chosen) - log_odds(rejected)``, ``log_odds(p) = p - log(1 - exp(p))``. The
    log-probabilities must be averages over tokens (``answer_log_probs(..., average=True)``), at most 0.

    Returns:
        ``(pairs,)``. The loss and its gradient are finite even if an average is 0, as for an answer without tokens.
    """
    check_positive("orpo_loss", beta=beta)
    check_shapes("orpo_loss", chosen=chosen, rejected=rejected)
    return -beta * F.logsigmoid(log_odds_ratio(chosen, rejected))


def log_odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def _log1mexp(x: Tensor) -> Tensor:
    """Computes log(1 - exp(x)) for x <= 0, without cancellation near 0 and finite at 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    small = x > -math.log(2)
    near, far = torch.where(small, x, -1.0), torch.where(small, -1.0, x)
    return torch.where(small, (-torch.expm1(near)).log(), torch.log1p(-far.exp()))


def kto_loss(
    log_probs: Tensor,
    desirable: Tensor,
    ref_log_probs: Tensor | None = None,
    kl: Tensor | float = 0.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    loss_type: str = "kto",
) -> Tensor:
    """Computes the loss of Kahneman-Tversky optimisation (Ethayarajh et al., arXiv:2402.01306) or of a variant.

    With ``r = log_probs - ref_log_probs``, the loss is ``desirable_weight * (1 - s(beta * m))`` for a desirable answer,
    and ``undesirable_weight * (1 - s(-beta * m))`` for another, where ``m`` is, by ``loss_type``:

    - kto: ``r - kl``
    - apo_zero_unpaired (arXiv:2408.06266): ``r``

    Args:
        log_probs: ``(answers,)``, log-probabilities of the answers (:func:`answer_log_probs`).
        desirable: ``(answers,)``, bool, or numbers other than 0 for desirable answers.
        ref_log_probs: the reference model's log-probabilities of the same answers, which get no gradient. None: 0.
        kl: the estimate of the policy's divergence from the reference model: a number, or one for each answer. It gets
            no gradient. apo_zero_unpaired ignores it.
        beta: more than 0. A larger beta keeps the policy closer to the reference model.
        desirable_weight, undesirable_weight: the factors of the losses of desirable and of other answers, more than 0.
        loss_type: one of these names.

    Returns:
        ``(answers,)``.

    Raises:
        ValueError: an option outside its range; shapes that differ.
    """
    check_loss_type(loss_type, KTO_TYPES)
    check_positive("kto_loss", beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    if not isinstance(kl, Tensor):
        check_number("kto_loss", "kl", kl, "a number, or a tensor of numbers", lambda _: True)
    many = kl if isinstance(kl, Tensor) and kl.numel() != 1 else None
    check_shapes("kto_loss", log_probs=log_probs, desirable=desirable, ref_log_probs=ref_log_probs, kl=many)
    reward = log_probs if ref_log_probs is None else log_probs - ref_log_probs.detach()
    if isinstance(kl, Tensor):
        kl = kl.detach() if kl is many else kl.detach().reshape(())
    desirable, margin = desirable.bool(), KTO_TYPES[loss_type](reward, kl)
    gain = torch.where(desirable, margin, -margin)
    return torch.full_like(gain, undesirable_weight).masked_fill(desirable, desirable_weight) * (-beta * gain).sigmoid()


KTO_TYPES: dict[str, Callable[[Tensor, Tensor | float], Tensor]] = {
    "kto": lambda reward, kl: reward - kl,
    "apo_zero_unpaired": lambda reward, kl: reward,
}


def check_number(function: str, name: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    """Raises ValueError unless ``value`` is finite and ``fits(value)``; ``expected`` describes the condition."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not fits(value):
        raise ValueError(f"{function}: {name} is {value!r}, expected {expected}")


def check_positive(function: str, **options: float) -> None:
    for name, value in options.items():
        check_number(function, name, value, "a number more than 0", lambda value: value > 0)


def check_shapes(function: str, **tensors: Tensor | None) -> None:
    (first, of), *others = tensors.items()
    for name, t in tensors.items():
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{function}: {name} is {type(t).__name__}, expected a Tensor")
    for name, t in others:
        if t is not None and t.shape != of.shape:
            raise ValueError(
                f"{function}: {name} has shape {tuple(t.shape)}, expected that of {first}, {tuple(of.shape)}"
            )
