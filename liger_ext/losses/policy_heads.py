"""GRPO's loss as a module that takes hidden states and a head's weight, with Liger-Kernel's name and arguments."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from liger_ext.functional import CountedRows
from liger_ext.losses.policy import grpo_loss, grpo_targets
from liger_ext.losses.preference import check_number
from liger_ext.losses.preference_heads import HeadLoss

__all__ = ["LigerFusedLinearGRPOLoss"]

_IGNORED = -100
_OPTIONS = (
    "loss_type", "beta", "epsilon_low", "epsilon_high", "delta", "importance_sampling_level", "use_bias_correction_kl",
    "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
    "vespo_lambda_neg", "max_completion_length",
)  # fmt: skip


class LigerFusedLinearGRPOLoss(HeadLoss):
    """:func:`grpo_loss` computed from hidden states and a head's weight, with every ``loss_type``.

    The head's matmuls leave out masked tokens and, if ``beta`` is 0, tokens with advantage 0.

    Args:
        beta, epsilon_low, epsilon_high, loss_type, max_completion_length: as in :func:`grpo_loss`.
        importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, delta: as in :func:`grpo_loss`.
        use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: likewise.
        temperature: of the logits, as in linear_log_probs.
        use_ref_model: whether forward takes a reference; otherwise the policy itself is the reference, with divergence
            0.
        compiled, chunk_size: without effect.
        head_options: ``softcap``, ``logit_scale``, ``memory``, ``logits_dtype``, as in linear_log_probs.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        **head_options: Any,
    ) -> None:
        super().__init__(_IGNORED, temperature=temperature, **head_options)
        self.beta, self.use_ref_model, self.temperature, self.loss_type = beta, use_ref_model, temperature, loss_type
        self.importance_sampling_level = importance_sampling_level
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.use_bias_correction_kl = max_completion_length, use_bias_correction_kl
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def targets(self, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor) -> Tensor:
        """Returns :func:`grpo_targets` with this loss's options. Pass them to ``count_rows`` before the model runs, and
        its result to forward as ``rows``."""
        return grpo_targets(
            selected_token_ids, attention_mask, advantages, loss_type=self.loss_type,
            importance_sampling_level=self.importance_sampling_level, every_token=self.beta != 0,
        )  # fmt: skip

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        rows: CountedRows | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Computes the loss.

        Args:
            _input: ``(sequences, tokens, hidden_size)``.
            lin_weight: ``(vocab_size, hidden_size)``.
            selected_token_ids, attention_mask: ``(sequences, tokens)``, the tokens, and a mask that is 0 for tokens to
                leave out.
            advantages: ``(sequences,)`` or ``(sequences, tokens)``.
            bias: ``(vocab_size,)``.
            ref_per_token_logps, old_per_token_logps: ``(sequences, tokens)``.
            ref_input, ref_weight, ref_bias: the reference model's, used if ref_per_token_logps is None.
            vllm_is_ratio: ``sampling_ratio`` of grpo_loss.
            num_items_in_batch: for dapo, cispo and vespo, the number of tokens of the step in all processes, a number
                or a tensor of one element: ``normalizer`` of grpo_loss is this number divided by the number of
                processes. Other types ignore it. None: the sum of attention_mask over all processes of the default
                group, if there is one, by a collective, at least 1.
            rows: ``count_rows(self.targets(...))``, called before the model ran. None: the rows are counted here, and
                the host waits for the GPU.

        Returns:
            The loss, and a tuple without gradients: the mean divergence from the reference, if beta is not 0, and the
            share of clipped tokens.

        Raises:
            ValueError: the reference is missing; shapes that do not fit together.
        """
        target = self.targets(selected_token_ids, attention_mask, advantages)
        rows = self.counted(target, rows)
        log_probs = self.log_probs(_input, lin_weight, target, bias, rows)
        reference = log_probs.detach()
        if self.use_ref_model and ref_per_token_logps is not None:
            if ref_input is not None:
                warnings.warn(
                    "LigerFusedLinearGRPOLoss: ref_per_token_logps and ref_input are given, and ref_input is not used",
                    stacklevel=2,
                )
            reference = ref_per_token_logps
        elif self.use_ref_model and self.beta != 0:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    "LigerFusedLinearGRPOLoss: use_ref_model is True, ref_per_token_logps is None, and ref_input or "
                    "ref_weight is None: pass ref_per_token_logps, or both of the others, or use_ref_model=False"
                )
            with torch.no_grad():
                reference = self.log_probs(ref_input, ref_weight, target, ref_bias, rows)
        loss, kl, clip_ratio = grpo_loss(
            log_probs, advantages, attention_mask, old_log_probs=old_per_token_logps, ref_log_probs=reference,
            sampling_ratio=vllm_is_ratio, normalizer=self._normalizer(attention_mask, num_items_in_batch),
            **{name: getattr(self, name) for name in _OPTIONS},
        )  # fmt: skip
        return loss, (clip_ratio,) if kl is None else (kl, clip_ratio)

    def _normalizer(self, mask: Tensor, num_items: Tensor | float | None) -> Tensor | float | None:
        if self.loss_type not in ("dapo", "cispo", "vespo"):
            return None
        processes = 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            processes = torch.distributed.get_world_size()
        if num_items is None:
            num_items = mask.sum(dtype=torch.float32)
            if processes > 1:
                torch.distributed.all_reduce(num_items)
            num_items = num_items.clamp(min=1)
        elif not isinstance(num_items, Tensor):
            check_number(type(self).__name__, "num_items_in_batch", num_items, "a number, at least 0", lambda n: n >= 0)
        return num_items / processes
