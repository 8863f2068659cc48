"""Row ops: norms, gated linear units, rotary embedding, softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.references._sizes import Tensors, peak, stored_steps

# Norms -----------------------------------------------------------------------------------------------


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """t as it is when stored in ``dtype``; gradients pass through unrounded."""
    return t if dtype is None else t + (t.detach().to(dtype).to(t.dtype) - t.detach())


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


def torch_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> Tensor:
    n = F.rms_norm(x, x.shape[-1:], None, eps)
    factor = 1 if weight is None else weight + offset
    y = n * factor
    if casting_mode != "llama" or stored is None:
        return y
    return y + (n.to(stored).to(n.dtype) * factor - y).detach()


def _norm_gradient_scale(n: Tensor, rstd: Tensor, dy: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    return rstd * peak(dy if weight is None else dy * (weight + offset)) * (1 + peak(n))


def rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    if "out" not in grads:
        return {}
    x = inputs["x"]
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    weight, offset = inputs.get("weight"), inputs.get("offset", 0.0)
    return {"dx": _norm_gradient_scale(x * rstd, rstd, grads["out"], weight, offset)}


def _of_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The norm sees the sum as it is stored."""

    def add_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        stored: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(_rounded(total, stored), weight, eps, offset, casting_mode, stored), total

    return add_norm


add_rms_norm = _of_sum(rms_norm)
torch_add_rms_norm = _of_sum(torch_rms_norm)


def add_rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    total = _rounded(inputs["x"] + inputs["residual"], inputs["stored"])
    scales = {"out1": peak(inputs["x"]) + peak(inputs["residual"])}
    dx = torch.zeros_like(peak(total))
    if "out0" in grads:
        options = {k: v for k, v in inputs.items() if k in ("weight", "eps", "offset")}
        dx = dx + rms_norm_scales({"x": total, **options}, outputs, {"out": grads["out0"]})["dx"]
    if "out1" in grads:
        dx = dx + peak(grads["out1"])
    return scales | {"dx": dx, "dresidual": dx}


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def torch_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def layer_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    centred = x - x.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    w = torch.ones_like(x) if weight is None else weight.expand_as(x)
    scales = {"out": rstd * peak(x) * w.abs() + (0 if bias is None else bias.abs())}
    if "out" in grads:
        dy = grads["out"]
        scales["dx"] = _norm_gradient_scale(centred * rstd, rstd, dy, weight, 0.0) * (1 + rstd * peak(x))
        # dweight sums dy * n, and n carries the error of x - mean.
        scales["dweight"] = (dy.abs() * rstd * peak(x)).sum(tuple(range(x.dim() - 1)))
    return scales


# Gated linear units ----------------------------------------------------------------------------------


def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    a = gate * gate_multiplier
    return a * torch.sigmoid(a) * up * down_multiplier


def torch_swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    h = F.silu(gate if gate_multiplier == 1 else gate * gate_multiplier) * up
    return h if down_multiplier == 1 else h * down_multiplier


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    if approximate == "tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    return 0.5 * gate * torch.erfc(-gate / 2**0.5) * up


def torch_geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def swiglu_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    gate, up = inputs["gate"], inputs["up"]
    factor = abs(inputs.get("gate_multiplier", 1.0)), abs(inputs.get("down_multiplier", 1.0))
    scales = {"out": (gate * up).abs() * (factor[0] * factor[1])}
    if "out" in grads:
        dh = grads["out"].abs() * factor[1]
        scales["dgate"] = dh * up.abs() * factor[0] * (1 + gate.abs() * factor[0])
        scales["dup"] = dh * gate.abs() * factor[0]
    return scales


geglu_scales = swiglu_scales


def swiglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return swiglu(*gate_up.chunk(2, -1), **options)


def torch_swiglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return torch_swiglu(*gate_up.chunk(2, -1), **options)


def geglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return geglu(*gate_up.chunk(2, -1), **options)


def torch_geglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return torch_geglu(*gate_up.chunk(2, -1), **options)


def swiglu_packed_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    gate, up = inputs["gate_up"].chunk(2, -1)
    scales = swiglu_scales({**inputs, "gate": gate, "up": up}, outputs, grads)
    if "dgate" in scales:
        scales["dgate_up"] = torch.cat((scales.pop("dgate"), scales.pop("dup")), -1)
    return scales


geglu_packed_scales = swiglu_packed_scales


# Rotary position embedding ---------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    r = cos.shape[-1]
    first, second = x[..., : r // 2], x[..., r // 2 : r]
    rotated = x[..., :r] * cos + torch.cat((-second, first), -1) * sin
    return rotated if r == x.shape[-1] else torch.cat((rotated, x[..., r:].to(rotated.dtype)), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    if cos.dim() == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


torch_rope = rope


def rope_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    table = max((t.abs().amax().item() for t in (inputs["cos"], inputs["sin"]) if t.numel()), default=1.0)
    named = {"out0": inputs["q"], "out1": inputs["k"], "dq": grads.get("out0"), "dk": grads.get("out1")}
    return {name: 2 * max(1.0, table) * peak(t) for name, t in named.items() if t is not None}


# Softmax ---------------------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


torch_softmax = softmax


def softmax_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    """The backward reads y as it is stored: dx carries a rounding of y in each factor of y * (dy - sum(dy * y))."""
    if "out" not in grads:
        return {}
    compute, y, dy = inputs["compute_dtype"], outputs["out"], grads["out"]
    if torch.finfo(compute).bits == 16:  # below its normal range a dtype rounds to steps of one size
        y = y.clamp(min=torch.finfo(compute).smallest_normal)
    rounding_of_y = y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
    return {"dx": stored_steps(compute) * rounding_of_y + peak(rounding_of_y)}
