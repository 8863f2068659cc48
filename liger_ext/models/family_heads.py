"""Heads that do something else to their hidden states or logits, or add something else to the loss, than those of
`liger_ext.models.causal_lm`."""

import torch
from transformers.modeling_outputs import ModelOutput

from liger_ext.models.causal_lm import CausalLM, DividedCausalLM, MoeCausalLM, MoeOfTextCausalLM, SoftcappedCausalLM
from liger_ext.models.log_probs import take_options


class BambaCausalLM(CausalLM):
    """With a coefficient, the loss has a term of the logits of all positions: then they exist."""

    def _forward(self, arguments: dict[str, object], skip_logits: bool | None) -> ModelOutput:
        if self.z_loss_coefficient > 0:
            take_options(arguments, True, "with a z_loss_coefficient its loss has another term")
            return super(CausalLM, self).forward(**arguments)
        return super()._forward(arguments, skip_logits)


class BeamCausalLM(SoftcappedCausalLM):
    LOGITS = torch.float32


class CastCausalLM(CausalLM):
    """HY V4's: the hidden states get the dtype of the head's weight."""

    def _for_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states.to(self.lm_head.weight.dtype)


class MambaCausalLM(CastCausalLM):
    LOGITS = torch.float32


class GraniteMoeCausalLM(DividedCausalLM, MoeCausalLM):
    pass


class HyperCLOVAXCausalLM(CausalLM):
    def liger_logits(self) -> tuple[float, float | None]:
        return self.config.logits_scaling, None


class JetMoeCausalLM(MoeCausalLM):
    def _balance(self) -> tuple[int, int, float]:
        return self.num_experts, self.num_experts_per_tok, self.aux_loss_coef


class MiniCPM3CausalLM(CausalLM):
    """The hidden states are divided, and not the logits."""

    def _for_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states / self.config.logits_scaling


class OmniMoeCausalLM(MoeOfTextCausalLM):
    """Qwen 3 Omni's thinker has the counts of experts, and the factor of their loss, itself."""

    _balance = MoeCausalLM._balance


class RecurrentGemmaCausalLM(CausalLM):
    def liger_logits(self) -> tuple[float, float | None]:
        return 1.0, self.config.logits_soft_cap
