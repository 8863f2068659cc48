"""Experts whose weights are one tensor each (transformers 5 on): the gated unit between their two grouped matmuls."""

import torch
from torch import nn

from liger_ext.models.mlp import PackedMLP
from liger_ext.models.patch import only_forward_runs
from liger_ext.models.recompute import recomputed


class Experts:
    """Mixtral's.

    transformers' implementations sort the tokens by expert and run the matmuls; the "eager" one, a loop over the
    experts, has no use for this.
    """

    liger_memory = "auto"

    @classmethod
    def unit_of(cls, experts: nn.Module) -> tuple | None:
        return PackedMLP.UNITS.get(type(getattr(experts, "act_fn", None))) if experts.has_gate else None

    def _apply_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor:
        unit = self.unit_of(self)
        if unit is None or not only_forward_runs(self.act_fn):
            return super()._apply_gate(gate_up_out)
        return recomputed(self, unit[0], gate_up_out, *unit[1:])
