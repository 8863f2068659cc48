"""The layers: each does what the `forward` does that it replaces, or calls it where that is not known.

`kernels` binds a layer's `forward` to the module of transformers: `self` is that module, and `type(self)` the class,
whose code `liger_ext.models.known_code` recognises. A layer may define a `forward`, and whether torch.compile takes it.
"""

import functools

import torch
from torch import nn

from liger_ext.models import known_code, mlp, norms
from liger_ext.models.calls import has_known_methods
from liger_ext.models.patch import is_plain_tensor
from liger_ext.models.rope import known_rope
from liger_ext.models.warn import warn
from liger_ext.ops._compile import assume_constant_result


class RMSNorm(nn.Module):
    """Llama's, OLMo 2's, or Gemma's with the factor 1 + weight: whichever the module's class computes."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        kind = _kind(type(self))
        if kind not in _NORMS or not (is_plain_tensor(self.weight) and has_known_methods(self)):
            return type(self).forward(self, hidden_states)
        arguments = self.weight, getattr(self, kind.EPS), float(kind.OFFSET), kind.CASTING
        return kind._normalise(hidden_states, *arguments)


class MLP(nn.Module):
    """Gate and up are projections of their own, and the activation is SiLU or GELU. The projections are called: they
    may have adapters or quantised weights."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = _kind(type(self))
        unit = kind.unit_of(self) if kind is mlp.MLP else None
        if unit is None or not mlp.only_activation_runs(getattr(self, kind.ACTIVATION)):
            return type(self).forward(self, x)
        gate, up, down = (getattr(self, name) for name in kind.PROJECTIONS)
        gate, up = gate(x), up(x)
        if gate.dtype != up.dtype or gate.shape != up.shape:  # adapters of some projections may change either
            return down(getattr(self, kind.ACTIVATION)(gate) * up)
        op, *options = unit
        return down(op(gate, up, *options))


class RotaryPosEmb(nn.Module):
    """In the layout of the function that it replaces, of which `kernels` has made a module."""

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
    """Which of `_KINDS` does what `cls` does. None of a patch's class, which does it itself."""
    number = _number(cls)
    return None if number is None else _KINDS[number]


@functools.cache
def _find_number(cls: type[nn.Module]) -> int | None:
    if cls.__module__.startswith("liger_ext."):
        return None
    patch = known_code.patch_of(cls)
    if patch is None or patch.__bases__[0] not in _KINDS:
        warn(f"{cls.__name__}: no layer of liger_ext is for this code, and its own forward runs")
        return None
    return _KINDS.index(patch.__bases__[0])


@functools.cache
def _find_rope(cls: type[nn.Module]) -> bool:
    rope = known_rope(cls())
    cls.liger_rope = staticmethod(rope)
    return rope is not None


# torch.compile can look neither into these nor past `functools.cache`, and takes numbers alone as results.
@assume_constant_result
def _number(cls: type[nn.Module]) -> int | None:
    return _find_number(cls)


@assume_constant_result
def _has_rope(cls: type[nn.Module]) -> bool:
    """Whether `cls.liger_rope` does what the function does of which `kernels` has made `cls`."""
    return _find_rope(cls)
