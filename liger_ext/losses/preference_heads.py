"""Losses of pairs as modules that take hidden states and a head's weight, with Liger-Kernel's names and arguments.

A module computes the log-probabilities by :func:`liger_ext.functional.linear_log_probs` and passes them to a function
of ``preference.py``. The head's matmuls leave out positions whose target is ignored (prompts, padding). ``compiled``
and ``chunk_size`` are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_ext.functional import CountedRows, count_rows, linear_log_probs
from liger_ext.losses.preference import (
    AVERAGE_TYPES,
    CPO_TYPES,
    answer_log_probs,
    check_dpo_options,
    check_loss_type,
    cpo_loss,
    dpo_loss,
    log_odds_ratio,
    orpo_loss,
    simpo_loss,
)

__all__ = [
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
]


class HeadLoss(nn.Module):
    """Base class of losses whose log-probabilities are computed from hidden states and a head's weight.

    Args:
        ignore_index: as in linear_log_probs.
        head_options: ``softcap``, ``logit_scale``, ``temperature``, ``memory``, ``logits_dtype`` of linear_log_probs,
            for the policy's head and the reference's.
    """

    def __init__(self, ignore_index: int, /, **head_options: Any) -> None:
        super().__init__()
        unknown = head_options.keys() - {"softcap", "logit_scale", "temperature", "memory", "logits_dtype"}
        if unknown:
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}")
        self.ignore_index, self.head_options = ignore_index, head_options

    def counted(self, target: Tensor, rows: CountedRows | None) -> CountedRows | None:
        """Returns ``rows``, or the counted rows of target if ``rows`` is None."""
        return count_rows(target, self.ignore_index) if rows is None else rows

    def log_probs(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rows: CountedRows | None
    ) -> Tensor:
        return linear_log_probs(x, weight, target, bias, ignore_index=self.ignore_index, rows=rows, **self.head_options)


class AnswersLoss(HeadLoss):
    """Base class of losses of the answers' log-probabilities, with or without a reference model."""

    average_log_prob = True

    def answers(
        self, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, rows: CountedRows | None
    ) -> Tensor:
        log_probs = self.log_probs(x, weight, target, bias, rows)
        return answer_log_probs(log_probs, target != self.ignore_index, average=self.average_log_prob)

    def reference(
        self,
        x: Tensor | None,
        weight: Tensor | None,
        target: Tensor,
        bias: Tensor | None,
        rows: CountedRows | None,
    ) -> Tensor:
        if x is None or weight is None:
            absent = "ref_input" if x is None else "ref_weight"
            raise ValueError(f"{type(self).__name__}: use_ref_model is True and {absent} is None: pass it")
        with torch.no_grad():
            return self.answers(x, weight, target, bias, rows)


def logit_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns the sums over tokens and vocabulary of the logits ``x @ weight.T + bias``, ``(answers,)``, without
    computing the logits."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    with torch.no_grad():
        sums = x.sum(1, dtype=dtype) @ _whole(weight.sum(0, dtype=dtype))
        return sums if bias is None else sums + x.shape[1] * _whole(bias.sum(dtype=dtype))


def _whole(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # a DTensor if the vocabulary is sharded


def mean_or_zero(t: Tensor) -> Tensor:
    """Returns the mean, or 0 for an empty tensor."""
    return t.sum() / max(1, t.numel())


class _PairedLoss(AnswersLoss):
    """Base class of losses of pairs: the first half of a batch are the chosen answers, the second half the rejected
    answers."""

    compute_nll_loss, alpha = True, 1.0

    def _loss(
        self,
        losses: Callable[[Tensor, Tensor], Tensor],
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None,
        rows: CountedRows | None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the loss; and the log-probabilities of chosen and rejected answers, the mean logits of both, and the
        negative log-likelihood of the chosen answers (nll)."""
        name = type(self).__name__
        if target.dim() != 2 or target.shape[0] % 2 or target.shape != x.shape[:-1]:
            raise ValueError(
                f"{name}: _input has shape {tuple(x.shape)} and target {tuple(target.shape)}, expected "
                "(2 * pairs, tokens, hidden_size) and (2 * pairs, tokens)"
            )
        pairs, all_x, all_targets = target.shape[0] // 2, x, target
        if self.compute_nll_loss and nll_target is not None:  # the chosen answers once more, with the targets of nll
            if nll_target.shape not in (target.shape, target[:pairs].shape):
                raise ValueError(
                    f"{name}: nll_target has shape {tuple(nll_target.shape)}, expected that of target, "
                    f"{tuple(target.shape)}"
                )
            all_x, all_targets = torch.cat([x, x[:pairs]]), torch.cat([target, nll_target[:pairs]])
            rows = None
        log_probs = self.log_probs(all_x, weight, all_targets, bias, self.counted(all_targets, rows))
        answers = answer_log_probs(log_probs[: 2 * pairs], target != self.ignore_index, average=self.average_log_prob)
        chosen, rejected = answers[:pairs], answers[pairs:]
        loss = mean_or_zero(losses(chosen, rejected))
        nll = loss.new_zeros(())
        if self.compute_nll_loss:
            first = 0 if nll_target is None else 2 * pairs
            counted = (all_targets[first : first + pairs] != self.ignore_index).sum().clamp(min=1)
            nll = -log_probs[first : first + pairs].sum() / counted
            loss = loss + self.alpha * nll
        means = logit_sums(x, weight, bias).view(2, -1).sum(1) / max(1, pairs * target.shape[1] * weight.shape[0])
        return loss, tuple(t.detach() for t in (chosen, rejected, *means, nll))


class LigerFusedLinearDPOLoss(_PairedLoss):
    """:func:`dpo_loss` of a head: ``mean over pairs of dpo_loss + alpha * nll``.

    ``nll`` is the mean negative log-probability of the chosen answers' tokens. It is 0 without ``compute_nll_loss``.

    Args:
        ignore_index: as in linear_log_probs.
        beta, loss_type, label_smoothing, discopop_tau: as in :func:`dpo_loss`.
        alpha: weight of nll.
        compute_nll_loss: whether to add nll.
        use_ref_model: whether forward takes a reference; otherwise the reference's log-probabilities are 0.
        average_log_prob: average the tokens' log-probabilities instead of summing them (ipo, sigmoid_norm: always).
        compiled, chunk_size: without effect.
        head_options: ``softcap``, ``logit_scale``, ``temperature``, ``memory``, ``logits_dtype``, as in
            linear_log_probs.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        **head_options: Any,
    ) -> None:
        check_dpo_options(beta, loss_type, label_smoothing, discopop_tau)
        super().__init__(ignore_index, **head_options)
        self.beta, self.alpha, self.compute_nll_loss = beta, alpha, compute_nll_loss
        self.use_ref_model, self.average_log_prob = use_ref_model, average_log_prob or loss_type in AVERAGE_TYPES
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        rows: CountedRows | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the loss.

        Args:
            lin_weight: ``(vocab_size, hidden_size)``.
            _input: ``(2 * pairs, tokens, hidden_size)``, first the chosen answers, then the rejected answers.
            target: ``(2 * pairs, tokens)``, already shifted: the next token of each position, or ignore_index.
            bias: ``(vocab_size,)``.
            ref_input, ref_weight, ref_bias: the reference model's; its hidden size may differ.
            rows: ``count_rows(target)``, called before the model ran. None: counted here, and the host waits for a GPU.

        Returns:
            The loss, and a tuple without gradients: the log-probabilities of the chosen and of the rejected answers
            ``(pairs,)``, the mean logit of both, nll, and the rewards ``beta * (log-probability - reference)`` of both.

        Raises:
            ValueError: the reference is missing; shapes that do not fit together.
        """
        ref, rows = (None, None), self.counted(target, rows)
        if self.use_ref_model:
            ref = self.reference(ref_input, ref_weight, target, ref_bias, rows).chunk(2)

        def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
            return dpo_loss(
                chosen, rejected, *ref, beta=self.beta, loss_type=self.loss_type, label_smoothing=self.label_smoothing,
                discopop_tau=self.discopop_tau,
            )  # fmt: skip

        loss, aux = self._loss(losses, _input, lin_weight, target, bias, rows)
        rewards = (self.beta * (t if r is None else t - r) for t, r in zip(aux[:2], ref, strict=True))
        return loss, (*aux, *rewards)


class _LossWithoutReference(_PairedLoss):
    """Base class of losses of pairs without a reference model."""

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        rows: CountedRows | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Arguments and results as in :class:`LigerFusedLinearDPOLoss`; the rewards are ``beta * log-probability``."""
        loss, aux = self._loss(self.pair_losses, _input, lin_weight, target, bias, rows)
        return loss, (*aux, self.beta * aux[0], self.beta * aux[1])


class LigerFusedLinearCPOLoss(_LossWithoutReference):
    """:func:`cpo_loss` of a head: ``mean over pairs of cpo_loss + alpha * nll``. Arguments as in
    :class:`LigerFusedLinearDPOLoss`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        **head_options: Any,
    ) -> None:
        check_loss_type(loss_type, CPO_TYPES)
        super().__init__(ignore_index, **head_options)
        self.beta, self.alpha, self.label_smoothing, self.loss_type = beta, alpha, label_smoothing, loss_type
        self.compute_nll_loss, self.average_log_prob = compute_nll_loss, average_log_prob or loss_type in AVERAGE_TYPES

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        options = {"label_smoothing": self.label_smoothing, "loss_type": self.loss_type}
        return cpo_loss(chosen, rejected, beta=self.beta, **options)


class LigerFusedLinearSimPOLoss(_LossWithoutReference):
    """:func:`simpo_loss` of a head, with averaged log-probabilities: ``mean over pairs of simpo_loss + alpha * nll``.
    Arguments as in :class:`LigerFusedLinearDPOLoss`; ``gamma`` as in :func:`simpo_loss`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
        **head_options: Any,
    ) -> None:
        super().__init__(ignore_index, **head_options)
        self.beta, self.alpha, self.gamma, self.label_smoothing = beta, alpha, gamma, label_smoothing
        self.compute_nll_loss = compute_nll_loss

    def pair_losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return simpo_loss(chosen, rejected, beta=self.beta, gamma=self.gamma, label_smoothing=self.label_smoothing)


class LigerFusedLinearORPOLoss(_PairedLoss):
    """:func:`orpo_loss` of a head, with averaged log-probabilities: ``nll + mean over pairs of orpo_loss``. Arguments
    as in :class:`LigerFusedLinearDPOLoss`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        chunk_size: int = 1,
        **head_options: Any,
    ) -> None:
        super().__init__(ignore_index, **head_options)
        self.beta, self.compute_nll_loss = beta, compute_nll_loss

    def forward(
        self,
        lin_weight: Tensor,
        _input: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        nll_target: Tensor | None = None,
        rows: CountedRows | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Arguments and results as in :class:`LigerFusedLinearCPOLoss`. After the rewards, the tuple also has the means
        of ``log s(o)`` and of the log odds ratio ``o``.

        Args:
            nll_target: the targets of nll, in the shape of target or of its chosen half. None: those of target.
        """

        def losses(chosen: Tensor, rejected: Tensor) -> Tensor:
            return orpo_loss(chosen, rejected, beta=self.beta)

        loss, aux = self._loss(losses, _input, lin_weight, target, bias, rows, nll_target)
        odds = log_odds_ratio(*aux[:2])
        odds_results = nn.functional.logsigmoid(odds), odds
        return loss, (*aux, self.beta * aux[0], self.beta * aux[1], *map(mean_or_zero, odds_results))
