"""KTO's loss as a module that takes hidden states and a head's weight, with Liger-Kernel's name and arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_ext.functional import CountedRows
from liger_ext.losses.preference import KTO_TYPES, check_loss_type, kto_loss
from liger_ext.losses.preference_heads import AnswersLoss, logit_sums, mean_or_zero

__all__ = ["LigerFusedLinearKTOLoss"]


class LigerFusedLinearKTOLoss(AnswersLoss):
    """The mean of :func:`kto_loss` over a batch's answers. Arguments as in :class:`LigerFusedLinearDPOLoss`;
    ``loss_type`` as in :func:`kto_loss`."""

    def __init__(
        self,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = False,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "kto",
        **head_options: Any,
    ) -> None:
        check_loss_type(loss_type, KTO_TYPES)
        super().__init__(ignore_index, **head_options)
        self.beta, self.use_ref_model, self.average_log_prob = beta, use_ref_model, average_log_prob
        self.loss_type = loss_type

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        preference_labels: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
        rows: CountedRows | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the loss.

        Args:
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, rows: as in
                :class:`LigerFusedLinearDPOLoss`, with ``answers`` in place of ``2 * pairs``.
            preference_labels: ``(answers,)``, bool, True for desirable answers.
            kl: the divergence from the reference, a number or one for each answer; None: 0.

        Returns:
            The loss, and a tuple of sums without gradients: of the log-probabilities of the desirable and of the other
            answers, of the logits of both (over positions and vocabulary), and of the rewards of both.
        """
        if preference_labels is None or preference_labels.shape != target.shape[:1]:
            found = None if preference_labels is None else tuple(preference_labels.shape)
            raise ValueError(
                f"{type(self).__name__}: preference_labels has shape {found}, expected ({target.shape[0]},): one label "
                "for each answer"
            )
        ref, rows = None, self.counted(target, rows)
        if self.use_ref_model:
            ref = self.reference(ref_input, ref_weight, target, ref_bias, rows)
        answers = self.answers(_input, lin_weight, target, bias, rows)
        options = {"beta": self.beta, "loss_type": self.loss_type}
        loss = mean_or_zero(kto_loss(answers, preference_labels, ref, 0.0 if kl is None else kl, **options))
        rewards = self.beta * (answers.detach() if ref is None else answers.detach() - ref)
        logits = logit_sums(_input, lin_weight, bias)
        desirable = preference_labels.bool()
        return loss, tuple(
            torch.where(which, values, 0.0).sum()
            for values in (answers.detach(), logits, rewards)
            for which in (desirable, ~desirable)
        )
