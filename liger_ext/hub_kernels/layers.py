"""Layers with which the package `kernels` replaces the `forward` of transformers' modules.

`kernels` binds a layer's `forward` to a module of transformers: `self` is that module, and `type(self)` is its class.
If `liger_ext.models.recognise` finds the class's code, the layer computes the same with liger_ext's ops; otherwise it
calls the class's `forward`. `kernels` permits two members in a layer: `forward`, and `can_torch_compile`.
"""

import functools

import torch
from torch import nn

from liger_ext.models.modules import mlp, norms
from liger_ext.models.modules.rope import known_rope
from liger_ext.models.patches import find_patch
from liger_ext.models.patching.calls import has_known_methods
from liger_ext.models.patching.swap import is_plain_tensor
from liger_ext.models.patching.warn import warn
from liger_ext.ops._compile import assume_constant_result


class RMSNorm(nn.Module):
    """RMSNorm as the module's class computes it: Llama's, OLMo 2's, or Gemma's with the factor 1 + weight."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        cls = type(self)
        kind = _kind(cls)
        if kind not in _NORMS or not (is_plain_tensor(self.weight) and has_known_methods(self)):
            return cls.forward(self, hidden_states)
        arguments = self.weight, getattr(self, cls.liger_patch.EPS), float(kind.OFFSET), kind.CASTING
        return kind._normalise(hidden_states, *arguments)


class MLP(nn.Module):
    """An MLP with separate gate and up projections and SiLU or GELU. It calls the projections' modules, which may have
    adapters or quantised weights."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cls = type(self)
        patch = cls.liger_patch if _kind(cls) is mlp.MLP else None
        activation = patch and patch.activation_op(self)
        if activation is None or not mlp.only_activation_runs(getattr(self, patch.ACTIVATION)):
            return cls.forward(self, x)
        gate, up, down = getattr(self, patch.GATE), getattr(self, patch.UP), getattr(self, patch.DOWN)
        gate, up = gate(x), up(x)
        if gate.dtype != up.dtype or gate.shape != up.shape:  # adapters of some projections may change either
            return down(getattr(self, patch.ACTIVATION)(gate) * up)
        op, *options = activation
        return down(op(gate, up, *options))


class RotaryPosEmb(nn.Module):
    """The rotary embedding, in the layout of the replaced function, which `kernels` has wrapped in a module."""

    can_torch_compile = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cls = type(self)
        if not _has_rope(cls):
            return cls.forward(self, q, k, cos, sin, unsqueeze_dim)
        return cls.liger_rope(q, k, cos, sin, unsqueeze_dim)


_NORMS = norms.RMSNorm, norms.RMSNormInFloat, norms.ZeroCenteredRMSNorm
_KINDS = (*_NORMS, mlp.MLP)


def _kind(cls: type[nn.Module]) -> type | None:
    """Returns the class of `_KINDS` that computes the same as `cls`, and sets `cls.liger_patch` to the patch of `cls`.
    None if there is no such class, or if `cls` is itself a patch of liger_ext."""
    number = _number(cls)
    return None if number is None else _KINDS[number]


@functools.cache
def _find_number(cls: type[nn.Module]) -> int | None:
    if cls.__module__.startswith("liger_ext."):
        return None
    patch = find_patch(cls)
    is_ours = patch is not None and patch.__bases__[0] in _KINDS
    if not is_ours or getattr(patch, "BEFORE_DOWN", None) or getattr(patch, "FACTOR", None):
        warn(f"{cls.__name__}: liger_ext has no layer for this code, so the class's own forward runs")
        return None
    cls.liger_patch = patch
    return _KINDS.index(patch.__bases__[0])


@functools.cache
def _find_rope(cls: type[nn.Module]) -> bool:
    rope = known_rope(cls())
    cls.liger_rope = staticmethod(rope)
    return rope is not None


# torch.compile cannot trace these functions or `functools.cache`, and it accepts only numbers as constant results.
@assume_constant_result
def _number(cls: type[nn.Module]) -> int | None:
    return _find_number(cls)


@assume_constant_result
def _has_rope(cls: type[nn.Module]) -> bool:
    """Sets `cls.liger_rope` to the op for the function that `kernels` has wrapped in `cls`. Returns whether there is
    one."""
    return _find_rope(cls)
