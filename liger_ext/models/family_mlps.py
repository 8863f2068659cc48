"""Feed-forward layers that differ from those of `liger_ext.models.mlp` in names, or do something else before their last
projection or behind it."""

import torch
from torch import nn

from liger_ext import functional
from liger_ext.models.mlp import MLP, PackedMLP


class Lfm2MLP(MLP):
    """The SiLU is no module."""

    PROJECTIONS = "w1", "w3", "w2"

    @classmethod
    def unit_of(cls, mlp: nn.Module) -> tuple:
        return functional.swiglu, 1, 1

    def _run_stock_unit(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(gate) * up)


class GraniteMoeMLP(PackedMLP):
    ACTIVATION, PROJECTIONS = "activation", ("input_linear", None, "output_linear")


class T5GemmaMLP(MLP):
    """With dropout."""

    def _down(self, h: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.dropout(h))


class ModernBertMLP(PackedMLP):
    """With dropout."""

    ACTIVATION, PROJECTIONS = "act", ("Wi", None, "Wo")

    def _down(self, h: torch.Tensor) -> torch.Tensor:
        return self.Wo(self.drop(h))


class BitNetMLP(MLP):
    """With a norm."""

    def _down(self, h: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.ffn_sub_norm(h))


class InklingMLP(MLP):
    """The result has a factor."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return super()._run(x) * self.global_scale


class Gemma3nMLP(MLP):
    """In some layers most columns of the gate are set to zero: these stay."""

    @classmethod
    def unit_of(cls, mlp: nn.Module) -> tuple | None:
        return None if mlp.activation_sparsity > 0 else super().unit_of(mlp)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)
