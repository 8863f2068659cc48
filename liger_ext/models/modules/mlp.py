"""Mixins for feed-forward layers. Most have a gate: `down(act(gate(x)) * up(x))`. One of our ops computes the input of
the last projection, `down`; the class of the module's activation selects the op. With an activation that has no op, the
module runs transformers' code."""

import math
import types
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from transformers import activations

from liger_ext import functional
from liger_ext.models.modules.stand_in import project
from liger_ext.models.patching.calls import exports_onnx, only_forward_runs
from liger_ext.models.recognise.known import find
from liger_ext.models.recognise.reading import Form, build_form
from liger_ext.models.training.recompute import recompute_when_saved, recomputed


def _known_as(cls: type[nn.Module]) -> str | None:
    """Returns the activation that a transformers class computes, by the code of its `__init__` and `forward`."""
    forms = [build_form(vars(cls)[name], cls) for name in ("__init__", "forward") if name in vars(cls)]
    entry = None if None in forms else find("activation", Form("\n".join(form.text for form in forms)))
    return entry and entry.replacement


_DEFINED = [cls for cls in vars(activations).values() if getattr(cls, "__module__", None) == activations.__name__]
_KNOWN = {c: _known_as(c) for c in _DEFINED if isinstance(c, type) and issubclass(c, nn.Module)}


def _classes(activation: str) -> tuple[type, ...]:
    return tuple(cls for cls, known in _KNOWN.items() if known == activation)


_SILU = (nn.SiLU, *_classes("silu"))
_GELU = _classes("gelu")
_GELU_TANH = _classes("gelu_tanh")
_RELU_SQUARED = _classes("relu_squared")


class MLP:
    """Llama's MLP, ``down(act(gate(x)) * up(x))``: gate and up are separate projections.

    The attributes in capitals hold names of the module's attributes. None: the module has no such attribute.
    """

    liger_memory = "auto"
    GATE, UP, DOWN, ACTIVATION = "gate_proj", "up_proj", "down_proj", "act_fn"
    BEFORE_DOWN: str | None = None  # a module before the last projection: dropout, or a norm
    FACTOR: str | None = None  # a factor of the result
    # By the activation's class: the op, and its arguments after gate and up.
    ACTIVATION_OPS: ClassVar[dict[type, tuple]] = {
        **dict.fromkeys(_SILU, (functional.swiglu, 1, 1)),
        **dict.fromkeys(_GELU, (functional.geglu, "none")),
        **dict.fromkeys(_GELU_TANH, (functional.geglu, "tanh")),
    }

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple | None:
        """Returns the op for the activation that `mlp` has now, since users replace it, and the op's options. None if
        there is no op."""
        return cls.ACTIVATION_OPS.get(type(getattr(mlp, cls.ACTIVATION, None)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Since the patch, the activation may have been replaced, or have got a hook.
        if not (self.activation_op(self) and only_activation_runs(getattr(self, self.ACTIVATION, None))):
            return super().forward(x)
        return recomputed(self, self._run, x) if self.liger_memory in ("low", "min") else self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_and_up(x)
        if gate.dtype != up.dtype or gate.shape != up.shape:  # adapters of some projections may change either
            return self._run_stock_activation(gate, up)
        return self._run_down(gate, up)

    def _gate_and_up(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Returns the inputs of the gated activation. Projections without a node run in transformers' order, in which
        dropout in adapters draws its random numbers."""
        return project(self, x, self.GATE, self.UP)

    def _run_stock_activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._down(getattr(self, self.ACTIVATION)(gate) * up)

    def _run_down(self, *gate_up: torch.Tensor) -> torch.Tensor:
        op, *options = self.activation_op(self)
        h = recomputed(self, op, *gate_up, *options)
        with recompute_when_saved(self, h, op, *gate_up, *options):
            return self._down(h)

    def _down(self, h: torch.Tensor) -> torch.Tensor:
        if self.BEFORE_DOWN is not None:
            h = getattr(self, self.BEFORE_DOWN)(h)
        (result,) = project(self, h, self.DOWN)
        return result if self.FACTOR is None else result * getattr(self, self.FACTOR)


class PackedMLP(MLP):
    """Phi 3's MLP: gate and up are the halves of one projection's result."""

    GATE_UP, ACTIVATION = "gate_up_proj", "activation_fn"
    ACTIVATION_OPS: ClassVar[dict[type, tuple]] = {
        **dict.fromkeys(_SILU, (functional.swiglu_packed, 1, 1)),
        **dict.fromkeys(_GELU, (functional.geglu_packed, "none")),
        **dict.fromkeys(_GELU_TANH, (functional.geglu_packed, "tanh")),
    }

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_down(*project(self, x, self.GATE_UP))


class SiluMLP(MLP):
    """LFM 2's MLP: the SiLU is a function, not a module."""

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple:
        return functional.swiglu, 1, 1

    def _run_stock_activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return self._down(nn.functional.silu(gate) * up)


class SparseMLP(MLP):
    """Gemma 3n's MLP: some layers set most columns of the gate to zero. These layers stay unpatched."""

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple | None:
        return None if mlp.activation_sparsity > 0 else super().activation_op(mlp)


class DropoutMLP(MLP):
    """Seed-OSS's MLP: dropout follows the last projection."""

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super()._run(x), p=self.residual_dropout, training=self.training)


class ScaledMLP(MLP):
    """Falcon-H1's MLP: the gate and the result have factors, and the projection of up runs first."""

    ACTIVATION_OPS: ClassVar[dict[type, tuple]] = dict.fromkeys(_SILU, (functional.swiglu,))

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple | None:
        op = super().activation_op(mlp)
        return op and (*op, mlp.gate_multiplier, 1)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return super()._run(x) * self.down_multiplier

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up, gate = project(self, x, self.UP, self.GATE)
        return gate, up

    def _run_stock_activation(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return super()._run_stock_activation(gate * self.gate_multiplier, up)


class VectorScaledMLP(MLP):
    """Dory's MLP: gate and up have a learned factor for each column, and a norm precedes the last projection."""

    GATE_VECTOR, UP_VECTOR, VECTOR_SCALE = "suv_gate", "suv_up", "suv_scale"

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = super()._gate_and_up(x)
        scale = getattr(self, self.VECTOR_SCALE)
        return gate * (getattr(self, self.GATE_VECTOR) * scale), up * (getattr(self, self.UP_VECTOR) * scale)


class Clamps:
    """Clamps gate and up before the gated activation, by torch's own op. The attributes in capitals hold names of the
    module's attributes."""

    LIMIT = "limit"  # bounds the gate from above, and up from both sides
    ALPHA: str | None = None  # if set, the gate's SiLU is x * sigmoid(alpha * x), and up is shifted by 1

    @classmethod
    def steep_activation_op(cls, module: nn.Module) -> tuple | None:
        alpha = float(getattr(module, cls.ALPHA))
        return (functional.swiglu, alpha, 1 / alpha) if alpha else None

    def _clamped(self, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        limit = getattr(self, self.LIMIT)
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        return gate, up if self.ALPHA is None else up + 1


class ClampedMLP(Clamps, MLP):
    """DeepSeek V4's MLP: gate and up are clamped."""

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._clamped(*super()._gate_and_up(x))


class SteepMLP(Clamps, MLP):
    """MiniMax M3's MLP: gate and up are the halves of one projection's result, and the SiLU is steeper."""

    GATE_UP, ALPHA = "gate_up_proj", "swiglu_alpha"

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple | None:
        return cls.steep_activation_op(mlp)

    def _gate_and_up(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._clamped(*project(self, x, self.GATE_UP)[0].chunk(2, dim=-1))


class Step3p7MLP(MLP):
    """Step 3.7's MLP. A layer with a limit clamps the activation's result, not its input, and stays unpatched; most
    layers have no limit."""

    @classmethod
    def activation_op(cls, mlp: nn.Module) -> tuple | None:
        return super().activation_op(mlp) if mlp.limit == math.inf else None


class UngatedMLP(MLP):
    """Nemotron's MLP: the square of a ReLU, without a gate."""

    ACTIVATION_OPS: ClassVar[dict[type, tuple]] = dict.fromkeys(_RELU_SQUARED, (functional.relu_squared,))

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self._run_down(*project(self, x, self.UP))


def only_activation_runs(act_fn: nn.Module | None) -> bool:
    """Returns whether a call of `act_fn`, of a class in `ACTIVATION_OPS`, computes only the activation of that class.
    None: the activation is a function, not a module."""
    if act_fn is None:
        return not exports_onnx()
    return only_forward_runs(act_fn) and _has_class_gelu(act_fn)


def _has_class_gelu(act_fn: nn.Module) -> bool:
    """Returns whether `act_fn` calls the GELU of its class. Some of transformers' classes store this function in an
    attribute, which other code may replace."""
    function = vars(act_fn).get("act")
    if function is None:
        return True
    if isinstance(function, types.MethodType):  # the class's method that computes the same by simpler ops
        return function.__func__ in vars(type(act_fn)).values()
    given = {"approximate": "tanh"} if type(act_fn) in _GELU_TANH else {}
    return getattr(function, "func", function) is nn.functional.gelu and getattr(function, "keywords", {}) == given


def has_silu(mlp: nn.Module) -> bool:
    return type(getattr(mlp, mlp.ACTIVATION, None)) in _SILU
