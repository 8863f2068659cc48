"""Mixins that patch transformers' norms, and `LayerNorm`, which replaces torch's class. There are several, since the
classes differ in how they apply the weight, where they round, and whether a gate or groups of columns take part."""

import functools

import torch
from torch import nn
from torch.nn.modules import normalization
from transformers.activations import ACT2FN

from liger_ext import functional
from liger_ext.models.patching.calls import exports_onnx, has_known_methods, only_forward_runs
from liger_ext.models.patching.swap import is_plain_tensor, replaces
from liger_ext.models.training.recompute import recomputed


class Norm:
    """A norm with one weight, or none."""

    liger_memory = "auto"
    # Arguments of functional.rms_norm. OFFSET is an int, because torch.compile(dynamic=True) turns a class's float into
    # a variable. If it does so inside a checkpoint, it does not find the variable in the next checkpoint.
    OFFSET, CASTING = 0, "llama"
    EPS = "variance_epsilon"  # the name of the module's attribute
    IS_PLAIN = False  # whether `forward` computes `functional.rms_norm` and nothing else

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        fits = _is_plain(self) and self.weight.shape == hidden_states.shape[-1:]
        if not (fits and has_known_methods(self)):
            return super().forward(hidden_states)
        return recomputed(self, self._normalise, hidden_states, *self.liger_arguments())

    def liger_arguments(self) -> tuple[torch.Tensor, float, float, str]:
        """Returns the arguments of `functional.rms_norm` after the first."""
        return self.weight, self._eps(), float(self.OFFSET), self.CASTING

    def _eps(self) -> float:
        return getattr(self, self.EPS)

    def raises_dtype(self, *summands: torch.Tensor) -> bool:
        """Returns whether the result has a wider dtype than the input, the sum of `summands`."""
        return False

    _normalise = staticmethod(functional.rms_norm)


class RMSNorm(Norm):
    """Llama's norm: rounds to the input's dtype before it multiplies by the weight."""

    IS_PLAIN = True

    def raises_dtype(self, *summands: torch.Tensor) -> bool:
        return _raises_dtype(self.weight, *summands)

    @staticmethod
    def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, casting: str) -> torch.Tensor:
        if _raises_dtype(weight, x):
            return weight * functional.rms_norm(x, None, eps, offset, casting)
        return functional.rms_norm(x, weight, eps, offset, casting)


class RMSNormInFloat(Norm):
    """OLMo 2's norm: rounds once, after it multiplies by the weight."""

    CASTING, IS_PLAIN = "gemma", True


class Gemma4RMSNorm(RMSNormInFloat):
    """Gemma 4's norm, which may have no weight."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.with_scale:
            return Norm.forward(self, hidden_states)
        if not has_known_methods(self):
            return super(Norm, self).forward(hidden_states)
        return recomputed(self, self._normalise, hidden_states, None, self._eps(), float(self.OFFSET), self.CASTING)


class WeightlessRMSNorm(RMSNormInFloat):
    """The norm of Llama 4's queries and keys, of NanoChat, and of DeepSeek V4 (whose code also rounds the reciprocal of
    the root mean square; ours does not)."""

    IS_PLAIN = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not has_known_methods(self):
            return super(Norm, self).forward(x)
        # Not in a checkpoint: attention saves the result, and torch.compile(dynamic=True) does not find the float eps
        # again when one module is called twice, for queries and for keys.
        return self._normalise(x, *self.liger_arguments())

    def liger_arguments(self) -> tuple[None, float, float, str]:
        return None, self._eps(), float(self.OFFSET), self.CASTING


class ZeroCenteredRMSNorm(Norm):
    """Gemma's norm: the factor is 1 + weight, and the result is rounded once."""

    OFFSET, CASTING, IS_PLAIN = 1, "gemma", True


class MuseSparkRMSNorm(ZeroCenteredRMSNorm):
    """Muse Spark's norm: the factor is 1 + weight, rounded to the weight's dtype."""

    def liger_arguments(self) -> tuple[torch.Tensor, float, float, str]:
        return self.weight + self.OFFSET, self._eps(), 0.0, self.CASTING


class ScaledInputRMSNorm(Norm):
    """Muse Spark's other norm: multiplies the input by 1 + weight and rounds the product before it normalises it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (_fits_fp32(self.weight) and has_known_methods(self)):
            return super(Norm, self).forward(x)
        scaled = (x.float() * (1 + self.weight).float()).type_as(x)
        return functional.rms_norm(scaled, None, self._eps(), 0.0, "gemma")


class Qwen4RMSNorm(ZeroCenteredRMSNorm):
    """Qwen 4's norm: it may normalise groups of columns separately."""

    IS_PLAIN = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group_size is None:
            return Norm.forward(self, x)
        if not _fits_fp32(self.weight):
            return super(Norm, self).forward(x)
        groups = functional.rms_norm(x.float().unflatten(-1, (-1, self.group_size)), None, self._eps())
        return (groups.flatten(-2) * (self.OFFSET + self.weight.float())).type_as(x)


class GatedRMSNorm(Norm):
    """Qwen3-Next's norm: Llama's, times the SiLU of a gate."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        alike = gate.dtype == hidden_states.dtype and gate.shape == hidden_states.shape
        known = alike and getattr(self, "activation", "silu") == "silu" and has_known_methods(self)
        if not known or _raises_dtype(self.weight, hidden_states):
            return super(Norm, self).forward(hidden_states, gate)
        return functional.swiglu(gate, Norm.forward(self, hidden_states))


class GroupedGatedRMSNorm(Norm):
    """Mamba 2's norm: multiplies the input by the SiLU of a gate, and normalises groups of columns separately. It
    computes in fp32, and rounds before it multiplies by the weight."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if not self._takes(hidden_states, gate):
            return super(Norm, self).forward(hidden_states, gate)
        return self._weighted(self._gated(hidden_states.float(), gate), hidden_states.dtype)

    def _takes(self, x: torch.Tensor, gate: torch.Tensor | None) -> bool:
        return _fits_fp32(self.weight) and (gate is None or gate.shape == x.shape)

    def _count_groups(self) -> int:
        columns = self.weight.shape[0]
        return columns // getattr(self, "group_size", columns)

    def _weighted(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Normalises `x`, in fp32, rounds to `dtype`, and multiplies by the weight."""
        eps, groups = self._eps(), self._count_groups()
        if groups == 1 and dtype == x.dtype:
            return functional.rms_norm(x, self.weight, eps)
        return self.weight * functional.rms_norm(x.unflatten(-1, (groups, -1)), None, eps).flatten(-2).to(dtype)

    @staticmethod
    def _gated(x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return x if gate is None else functional.swiglu(gate.float(), x)


class FalconGatedRMSNorm(GroupedGatedRMSNorm):
    """Falcon-H1's norm: the gate may follow the norm, and the result is rounded once, at the end."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if not self._takes(hidden_states, gate):
            return super(Norm, self).forward(hidden_states, gate)
        before, behind = (None, gate) if self.norm_before_gate else (gate, None)
        normed = self._weighted(self._gated(hidden_states.float(), before), torch.float32)
        return self._gated(normed, behind).to(hidden_states.dtype)

    def _count_groups(self) -> int:
        return self.n_groups


class GatedRMSNormInFloat(Norm):
    """Kimi Linear's norm: rounds once, after a gate with any activation."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        if not _fits_fp32(self.weight):
            return super(Norm, self).forward(hidden_states, gate)
        normed = functional.rms_norm(hidden_states.float(), self.weight, self._eps())
        return (normed * ACT2FN[self.activation](gate.float())).to(hidden_states.dtype)


class UnbiasedLayerNorm(Norm):
    """Cohere's norm: a LayerNorm without a bias, rounded once."""

    _normalise = staticmethod(functional.layer_norm)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight.dim() > 1:  # a weight for each head
            return super(Norm, self).forward(hidden_states)
        return Norm.forward(self, hidden_states)

    def liger_arguments(self) -> tuple[torch.Tensor, None, float]:
        return self.weight, None, self._eps()


class WeightlessLayerNorm(Norm):
    """The norm of the first OLMo: a LayerNorm without weight and bias."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not has_known_methods(self):
            return super(Norm, self).forward(hidden_states)
        return functional.layer_norm(hidden_states, None, None, 1e-5)


class LayerNorm1P(Norm):
    """Nemotron's norm: a LayerNorm with the factor 1 + weight, rounded to the weight's dtype."""

    OFFSET = 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Under autocast transformers casts all arguments.
        plain = is_plain_tensor(self.weight) and is_plain_tensor(self.bias) and self.weight.dtype == input.dtype
        if torch.is_autocast_enabled(input.device.type) or not plain:
            return super(Norm, self).forward(input)
        return recomputed(self, functional.layer_norm, input, self.weight + self.OFFSET, self.bias, self._eps())


@replaces(normalization)
class LayerNorm(nn.LayerNorm):
    """torch's own LayerNorm, which vision towers have."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        parameters = [p for p in (self.weight, self.bias) if p is not None]
        if len(self.normalized_shape) > 1 or not all(map(is_plain_tensor, parameters)) or exports_onnx():
            return super().forward(input)
        if input.is_cuda and torch.is_autocast_enabled("cuda"):
            input = input.float()  # as torch does
        elif any(p.dtype != input.dtype for p in parameters):
            return super().forward(input)
        return functional.layer_norm(input, self.weight, self.bias, self.eps)


def is_plain_rms_norm(norm: nn.Module) -> bool:
    """Returns whether `functional.add_rms_norm` computes what `norm` computes for a sum."""
    if not (isinstance(norm, Norm) and norm.IS_PLAIN and only_forward_runs(norm)):
        return False  # without reading the weight, which ZeRO 3 may have partitioned
    # A weight of one number applies to all columns, which the op does not support.
    return hasattr(norm, "weight") and _is_plain(norm) and norm.weight.dim() == 1 and norm.weight.numel() > 1


def _is_plain(norm: nn.Module) -> bool:
    """Returns whether the weight is a plain tensor, and eps is a number: a tensor might need a gradient."""
    return is_plain_tensor(norm.weight) and not isinstance(norm._eps(), torch.Tensor)


def _fits_fp32(weight: torch.Tensor) -> bool:
    """Returns whether a norm in fp32 keeps the weight's precision. (No GPU kernel takes float64.)"""
    return is_plain_tensor(weight) and weight.dtype != torch.float64


def _raises_dtype(weight: torch.Tensor, *summands: torch.Tensor) -> bool:
    """Returns whether transformers' norm returns a wider dtype than its input's (16-bit input, fp32 weight)."""
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in summands])
    return torch.promote_types(dtype, weight.dtype) != dtype
