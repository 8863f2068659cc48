"""The names of ``liger_kernel.chunked_loss``: losses as classes with ``apply``, and as functions.

Each takes Liger-Kernel's positional arguments, calls a module of ``liger_ext.losses``, and returns that module's
results: the loss and a tuple of further results.
"""

from torch import Tensor

from liger_ext import losses
from liger_ext.losses import (  # noqa: F401
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_ext.ops._checks import check_constants

_Results = tuple[Tensor, tuple[Tensor, ...]]


class LigerFusedLinearDPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
        loss_type: str = "sigmoid",
        label_smoothing: float = 0.0,
        discopop_tau: float = 0.05,
        alpha: float = 1.0,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearDPOLoss`."""
        loss = losses.LigerFusedLinearDPOLoss(
            ignore_index, beta, alpha, compute_nll_loss, compiled, use_ref_model, average_log_prob, chunk_size,
            loss_type, label_smoothing, discopop_tau,
        )  # fmt: skip
        return loss(weight, _input, target, bias, ref_input, ref_weight, ref_bias)


class LigerFusedLinearORPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compute_nll_loss: bool = True,
        nll_target: Tensor | None = None,
        compiled: bool = True,
        chunk_size: int = 1,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearORPOLoss`."""
        loss = losses.LigerFusedLinearORPOLoss(ignore_index, beta, compute_nll_loss, compiled, chunk_size)
        return loss(weight, _input, target, bias, nll_target)


class LigerFusedLinearCPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = True,
        compiled: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearCPOLoss`."""
        loss = losses.LigerFusedLinearCPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, average_log_prob, chunk_size
        )
        return loss(weight, _input, target, bias)


class LigerFusedLinearSimPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        alpha: float = 1.0,
        label_smoothing: float = 0.0,
        compute_nll_loss: bool = False,
        compiled: bool = True,
        gamma: float = 0.5,
        chunk_size: int = 1,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearSimPOLoss`, where compute_nll_loss has another default."""
        loss = losses.LigerFusedLinearSimPOLoss(
            ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, gamma, chunk_size
        )
        return loss(weight, _input, target, bias)


class LigerFusedLinearKTOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        preference_labels: Tensor,
        bias: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        kl: Tensor | float | None = None,
        ignore_index: int = -100,
        beta: float = 0.1,
        compiled: bool = True,
        use_ref_model: bool = True,
        average_log_prob: bool = False,
        chunk_size: int = 1,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearKTOLoss`, where use_ref_model has another default."""
        loss = losses.LigerFusedLinearKTOLoss(ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size)
        return loss(_input, weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl)


class LigerFusedLinearGRPOFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        beta: float = 0.04,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        vllm_is_ratio: Tensor | None = None,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
        num_items_in_batch: Tensor | float | None = None,
    ) -> _Results:
        """Calls :class:`liger_ext.losses.LigerFusedLinearGRPOLoss`."""
        check_constants("liger_fused_linear_grpo", temperature=temperature)
        loss = losses.LigerFusedLinearGRPOLoss(
            beta, compiled, use_ref_model, chunk_size, epsilon_low, epsilon_high, loss_type, max_completion_length,
            importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, float(temperature), delta,
            use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg,
        )  # fmt: skip
        return loss(
            _input, weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio, num_items_in_batch,
        )  # fmt: skip


liger_fused_linear_dpo = LigerFusedLinearDPOFunction.apply
liger_fused_linear_orpo = LigerFusedLinearORPOFunction.apply
liger_fused_linear_cpo = LigerFusedLinearCPOFunction.apply
liger_fused_linear_simpo = LigerFusedLinearSimPOFunction.apply
liger_fused_linear_kto = LigerFusedLinearKTOFunction.apply
liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply
