"""Gated linear units: SwiGLU and GeGLU, of two tensors or of one that holds both halves."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext.ops._checks import check_device, check_rows, check_same_dtype, check_same_shape, code_of, require
from liger_ext.ops._register import register

_glu_backward = torch.ops.liger_ext.glu_backward.default
_glu_packed_backward = torch.ops.liger_ext.glu_packed_backward.default

_SILU = 0
_GELU = {"tanh": 1, "none": 2}


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
    return _glu(gate, up, code_of("approximate", approximate, _GELU), 1.0, 1.0)


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
    return _glu_packed(gate_up, code_of("approximate", approximate, _GELU), 1.0, 1.0)


def _check(op: str, gate: Tensor, up: Tensor, activation: int) -> None:
    check_device(op, up, "up", gate, "gate")
    check_same_shape(op, up, "up", gate, "gate")
    check_same_dtype(op, up, "up", gate, "gate")
    check_rows(op, gate, "gate")
    _check_activation(op, activation)


def _check_activation(op: str, code: int) -> None:
    require(0 <= code <= 2, op, ": activation is ", code, ", expected 0 (silu), 1 (gelu by tanh) or 2 (exact gelu)")


def _fake(gate, up, activation, gate_multiplier, down_multiplier):
    _check("glu", gate, up, activation)
    return gate.new_empty(gate.shape)


def _fake_backward(dh, gate, up, activation, gate_multiplier, down_multiplier):
    op = "glu_backward"
    _check(op, gate, up, activation)
    check_same_shape(op, dh, "dh", gate, "gate")
    check_same_dtype(op, dh, "dh", gate, "gate")
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup_context(ctx, inputs, output):
    gate, up, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up)
    ctx.options = options


def _backward(ctx, saved, dh):
    if dh is None:
        return None, None, None, None, None
    dgate, dup = _glu_backward(dh, *saved, *ctx.options)
    need_dgate, need_dup = ctx.needs_input_grad[:2]
    return dgate if need_dgate else None, dup if need_dup else None, None, None, None


_glu = register("glu", fake=_fake, fake_backward=_fake_backward, setup_context=_setup_context, backward=_backward)


def _check_packed(op: str, gate_up: Tensor, activation: int) -> None:
    check_rows(op, gate_up, "gate_up")
    cols = gate_up.shape[-1]
    require(cols % 2 == 0, op, ": gate_up has ", cols, " columns, expected an even number (gate, then up)")
    _check_activation(op, activation)


def _fake_packed(gate_up, activation, gate_multiplier, down_multiplier):
    _check_packed("glu_packed", gate_up, activation)
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _fake_packed_backward(dh, gate_up, activation, gate_multiplier, down_multiplier):
    op = "glu_packed_backward"
    _check_packed(op, gate_up, activation)
    require(dh.dtype == gate_up.dtype, op, ": dh has dtype ", dh.dtype, ", expected that of gate")
    return gate_up.new_empty(gate_up.shape)


def _setup_packed_context(ctx, inputs, output):
    gate_up, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate_up)
    ctx.options = options


def _packed_backward(ctx, saved, dh):
    if dh is None:
        return None, None, None, None
    return _glu_packed_backward(dh, *saved, *ctx.options), None, None, None


_glu_packed = register(
    "glu_packed",
    fake=_fake_packed,
    fake_backward=_fake_packed_backward,
    setup_context=_setup_packed_context,
    backward=_packed_backward,
)
