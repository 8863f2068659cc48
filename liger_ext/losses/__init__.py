"""Preference and RL losses of language models, computed from :func:`liger_ext.functional.linear_log_probs`.

The functions (``dpo_loss``, ``grpo_loss``, ...) take log-probabilities and are plain PyTorch. The modules have
Liger-Kernel's names and arguments: they take hidden states and the head's weight.
"""

from liger_ext.losses.kto_heads import LigerFusedLinearKTOLoss
from liger_ext.losses.policy import GRPOOutput, grpo_loss, grpo_targets, high_entropy_mask
from liger_ext.losses.policy_heads import LigerFusedLinearGRPOLoss
from liger_ext.losses.preference import answer_log_probs, cpo_loss, dpo_loss, kto_loss, orpo_loss, simpo_loss
from liger_ext.losses.preference_heads import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

__all__ = [
    "GRPOOutput",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "answer_log_probs",
    "cpo_loss",
    "dpo_loss",
    "grpo_loss",
    "grpo_targets",
    "high_entropy_mask",
    "kto_loss",
    "orpo_loss",
    "simpo_loss",
]
