"""Gated linear units: SwiGLU and GeGLU, of two tensors or of one that holds both halves."""

from __future__ import annotations

from torch import Tensor, nn

from liger_ext import _C
from liger_ext.ops._checks import code_of
from liger_ext.ops._register import register_row_op, register_without_derivative

__all__ = [
    "LigerGEGLUMLP",
    "LigerSwiGLUMLP",
    "geglu",
    "geglu_packed",
    "liger_geglu",
    "liger_swiglu",
    "swiglu",
    "swiglu_packed",
]

_SILU = int(_C.Activation.silu)
_GELU = {"tanh": int(_C.Activation.gelu_tanh), "none": int(_C.Activation.gelu)}


def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """``down_multiplier * silu(gate_multiplier * gate) * up`` (Shazeer, 2020, arXiv:2002.05202).

    Computed in float32 (float64 for float64) with one rounding. The backward recomputes the activation: only the inputs
    are kept, and they are not written.

    Args:
        gate, up: ``(..., intermediate_size)``, one shape and dtype: float32, bfloat16 or float16 (float64 on the CPU),
            any strides.
        gate_multiplier, down_multiplier: constant factors (Falcon-H1 uses them).

    Returns:
        The shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: gate and up differ in shape, dtype or device, or the dtype is not supported.
    """
    return _glu(gate, up, _SILU, gate_multiplier, down_multiplier)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up`` (Shazeer, 2020, arXiv:2002.05202; GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415).

    Args:
        gate, up: as in :func:`swiglu`.
        approximate: ``"tanh"``, ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``, or ``"none"``, the exact one by
            erf.

    Returns:
        The shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: as :func:`swiglu`, or another value of ``approximate``.
    """
    return _glu(gate, up, code_of("geglu", "approximate", approximate, _GELU), 1.0, 1.0)


def swiglu_packed(gate_up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """:func:`swiglu` of the halves of one tensor, ``gate, up = gate_up.chunk(2, -1)``, as one projection gives them.

    The backward writes one gradient tensor; nothing is split or concatenated.

    Args:
        gate_up: ``(..., 2 * intermediate_size)``.
        gate_multiplier, down_multiplier: as in :func:`swiglu`.

    Returns:
        ``(..., intermediate_size)``, contiguous.

    Raises:
        ValueError: an odd number of columns, or a dtype that is not supported.
    """
    return _glu_packed(gate_up, _SILU, gate_multiplier, down_multiplier)


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """:func:`geglu` of the halves of one tensor; see :func:`swiglu_packed`."""
    return _glu_packed(gate_up, code_of("geglu_packed", "approximate", approximate, _GELU), 1.0, 1.0)


class _GatedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)


class LigerSwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, Llama's feed-forward layer.

    Args:
        config: has ``hidden_size``, ``intermediate_size`` and ``hidden_act``, and may have ``mlp_bias``.

    Raises:
        ValueError: ``hidden_act`` is neither silu nor swish.
    """

    def __init__(self, config):
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"LigerSwiGLUMLP: config.hidden_act is {config.hidden_act!r}, expected 'silu' or 'swish'")
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, Gemma's feed-forward layer, with GELU by tanh.

    Args:
        config: has ``hidden_size`` and ``intermediate_size``, and may have ``mlp_bias`` and ``hidden_activation`` or
            ``hidden_act``; its value ``"gelu"`` means the tanh form too, as in Gemma's first configurations.

    Raises:
        ValueError: the activation is no GELU.
    """

    def __init__(self, config):
        activation = (
            getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        )
        if activation not in ("gelu_pytorch_tanh", "gelu_new", "gelu"):
            raise ValueError(
                f"LigerGEGLUMLP: the configuration's activation is {activation!r}, expected 'gelu_pytorch_tanh'"
            )
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_ext.functional.swiglu`."""
    return swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_ext.functional.geglu`, by tanh."""
    return geglu(a, b)


_glu = register_row_op("glu")
register_without_derivative(
    "glu_backward_with_h_", lambda dh, gate, up, *_: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
_glu_packed = register_row_op(
    "glu_packed", fake=lambda gate_up, *_: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
)
