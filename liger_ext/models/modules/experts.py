"""Mixins that patch mixture-of-experts modules which store the weights of all experts in one tensor per projection.
They replace the gated activation between the experts' two matmuls by one of our ops; the matmuls stay."""

import math

import torch
from torch import nn

from liger_ext import functional
from liger_ext.models.modules.mlp import MLP, Clamps, PackedMLP, only_activation_runs
from liger_ext.models.patching.swap import is_plain_tensor
from liger_ext.models.training.recompute import recompute_when_saved, recomputed


class Experts:
    """Mixtral's experts.

    transformers' implementations (5.0 on) sort the tokens by expert, and call `_apply_gate` between the matmuls. The
    "eager" one, a loop over the experts, calls it only in classes that define their own.
    """

    liger_memory = "auto"

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple | None:
        return PackedMLP.ACTIVATION_OPS.get(type(getattr(experts, "act_fn", None))) if experts.has_gate else None

    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor:
        op = self.activation_op(self)
        if op is None or not only_activation_runs(self.act_fn):
            return super()._apply_gate(gate_up_out)
        return recomputed(self, op[0], gate_up_out, *op[1:])


class ClampedExperts(Clamps, Experts):
    """DeepSeek V4's experts: gate and up are clamped."""

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple | None:
        return MLP.ACTIVATION_OPS.get(type(getattr(experts, "act_fn", None)))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        op = self.activation_op(self)
        if op is None or not only_activation_runs(getattr(self, "act_fn", None)) or not is_plain_tensor(gate_up):
            return super(Experts, self)._apply_gate(gate_up)
        return recomputed(self, op[0], *self._clamped(*self._halves(gate_up)), *op[1:])

    @staticmethod
    def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up.chunk(2, dim=-1)


class SiluExperts(ClampedExperts):
    """The experts of GLM 5 and HY V4: the SiLU is a function, not a module."""

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple:
        return functional.swiglu, 1, 1


class SteepExperts(ClampedExperts):
    """The experts of OpenAI Privacy Filter and MiniMax M3: clamped, with a steeper SiLU."""

    ALPHA = "alpha"

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple | None:
        return cls.steep_activation_op(experts)


class GptOssExperts(SteepExperts):
    """GPT-OSS's experts: gate and up are alternate columns."""

    @staticmethod
    def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gate_up[..., ::2], gate_up[..., 1::2]


class Step3p7Experts(Experts):
    """Step 3.7's experts. A layer with a limit clamps the activation's result, not its input, and stays unpatched; most
    layers have no limit."""

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple | None:
        return PackedMLP.ACTIVATION_OPS.get(type(experts.act_fn)) if experts.limit == math.inf else None


class BatchedExperts(Experts):
    """Llama 4's experts: each processes all tokens, scaled by the router's weights."""

    @classmethod
    def activation_op(cls, experts: nn.Module) -> tuple | None:
        return PackedMLP.ACTIVATION_OPS.get(type(experts.act_fn))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        op = self.activation_op(self)
        plain = is_plain_tensor(self.gate_up_proj) and is_plain_tensor(self.down_proj)
        if op is None or not plain or not only_activation_runs(self.act_fn):
            return super(Experts, self).forward(hidden_states)
        x = hidden_states.view(self.gate_up_proj.shape[0], -1, self.hidden_size)
        gate_up = torch.bmm(x, self.gate_up_proj)
        h = recomputed(self, op[0], gate_up, *op[1:])
        with recompute_when_saved(self, h, op[0], gate_up, *op[1:]):
            return torch.bmm(h, self.down_proj).view(-1, self.hidden_size)
