"""What every op means, in plain differentiable PyTorch, and what PyTorch's own functions make of it.

For each op: ``<op>`` is the formula (called in float64), ``torch_<op>`` a composition of PyTorch's own functions,
and ``<op>_scales`` the sizes of intermediate values, for outputs and gradients that are small differences of large
numbers. ``stored`` names the dtype of a value that the op itself rounds on the way (the sum of add_rms_norm; x *
rstd in casting mode "llama").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stored_steps(dtype: torch.dtype) -> float:
    """How many roundings of the accumulator (in fours, as the rule counts them) one rounding to ``dtype`` is worth."""
    return max(1.0, torch.finfo(dtype).eps / torch.finfo(_wide(dtype)).eps / 4)


def _peak(t: Tensor) -> Tensor:
    """The largest magnitude of each row, kept as a column."""
    return t.abs().amax(-1, keepdim=True) if t.shape[-1] else t.new_zeros(*t.shape[:-1], 1)


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
    return rstd * _peak(dy if weight is None else dy * (weight + offset)) * (1 + _peak(n))


def rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    if "out" not in grads:
        return {}
    x = inputs["x"]
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    weight, offset = inputs.get("weight"), inputs.get("offset", 0.0)
    return {"dx": _norm_gradient_scale(x * rstd, rstd, grads["out"], weight, offset)}


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm sees the sum as it is stored."""
    total = x + residual
    return rms_norm(_rounded(total, stored), weight, eps, offset), total


def torch_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return torch_rms_norm(_rounded(total, stored), weight, eps, offset, casting_mode, stored), total


def add_rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    total = _rounded(inputs["x"] + inputs["residual"], inputs["stored"])
    scales = {"out1": _peak(inputs["x"]) + _peak(inputs["residual"])}
    dx = torch.zeros_like(_peak(total))
    if "out0" in grads:
        options = {k: v for k, v in inputs.items() if k in ("weight", "eps", "offset")}
        dx = dx + rms_norm_scales({"x": total, **options}, outputs, {"out": grads["out0"]})["dx"]
    if "out1" in grads:
        dx = dx + _peak(grads["out1"])
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
    scales = {"out": rstd * _peak(x) * w.abs() + (0 if bias is None else bias.abs())}
    if "out" in grads:
        dy = grads["out"]
        scales["dx"] = _norm_gradient_scale(centred * rstd, rstd, dy, weight, 0.0) * (1 + rstd * _peak(x))
        # dweight sums dy * n, and n carries the error of x - mean.
        scales["dweight"] = (dy.abs() * rstd * _peak(x)).sum(tuple(range(x.dim() - 1)))
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
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


torch_rope = rope


def rope_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    table = max((t.abs().amax().item() for t in (inputs["cos"], inputs["sin"]) if t.numel()), default=1.0)
    named = {"out0": inputs["q"], "out1": inputs["k"], "dq": grads.get("out0"), "dk": grads.get("out1")}
    return {name: 2 * max(1.0, table) * _peak(t) for name, t in named.items() if t is not None}


# Softmax and cross entropy ---------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


torch_softmax = softmax


def softmax_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    """The backward reads y as it is stored: dx carries a rounding of y in each factor of y * (dy - sum(dy * y))."""
    if "out" not in grads:
        return {}
    y, dy = outputs["out"], grads["out"]
    rounding_of_y = y * (dy.abs() + (dy * y).abs().sum(-1, keepdim=True))
    return {"dx": _stored_steps(inputs["compute_dtype"]) * rounding_of_y + _peak(rounding_of_y)}


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    use_token_scaling: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Unreduced losses and z-losses of each row (0 where ignored), and the softcapped logits."""
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    vocab = logits.shape[1]
    valid = target != ignore_index
    index = torch.where(valid, target, 0)[:, None]
    # A row that is ignored takes no part in any gradient, whatever is in it.
    rows = torch.where(valid[:, None], capped, torch.zeros_like(capped))
    lse = torch.logsumexp(rows, 1)
    chosen = lse - rows.gather(1, index)[:, 0]
    class_weight = logits.new_ones(vocab) if weight is None else weight.to(logits.dtype)
    ce = (1 - label_smoothing) * class_weight[index[:, 0]] * chosen
    if label_smoothing:
        ce = ce + label_smoothing / vocab * ((lse[:, None] - rows) * class_weight).sum(1)
    z = lse_square_scale * lse.square()
    if use_token_scaling:
        probability = torch.exp(-chosen).detach()
        ce, z = ce * probability, z * probability
    zero = torch.zeros_like(ce)
    return torch.where(valid, ce, zero), torch.where(valid, z, zero), capped


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    use_token_scaling: bool = False,
    normalizer: Tensor | float | None = None,
) -> dict[str, Tensor]:
    """The named results; all targets ignored gives 0."""
    ce, z, capped = cross_entropy_rows(
        logits, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap, use_token_scaling
    )
    valid = target != ignore_index
    predicted = capped.detach().argmax(1) if logits.shape[0] else target.clone()
    predicted = torch.where(valid, predicted, -1)
    hit = ((predicted == target) & valid).to(torch.float32)
    if reduction == "none":
        loss, z_loss, accuracy = ce + z, z, hit
    else:
        count = valid.sum().to(logits.dtype)
        divisor = (
            count
            if weight is None
            else torch.where(valid, weight.to(logits.dtype)[torch.where(valid, target, 0)], 0).sum()
        )
        if reduction == "sum":
            count_z = divisor = torch.ones_like(count)
        else:
            count_z = count
        if normalizer is not None:
            count_z = divisor = torch.as_tensor(normalizer, dtype=logits.dtype, device=logits.device)
        ce_sum, z_sum = ce.sum() / divisor, z.sum() / count_z
        nothing = torch.zeros_like(ce_sum)
        some = count > 0
        ce_sum, z_loss = torch.where(some, ce_sum, nothing), torch.where(some, z_sum, nothing)
        loss, accuracy = ce_sum + z_loss, hit.sum() / valid.sum().clamp(min=1)
    out = {"loss": loss}
    if return_z_loss:
        out["z_loss"] = z_loss
    if return_token_accuracy:
        out["token_accuracy"] = accuracy
    if return_predicted_tokens:
        out["predicted_tokens"] = predicted
    return out


def torch_cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """What Hugging Face does: logits to fp32, then ``F.cross_entropy`` where it knows the options, else the formula
    in fp32."""
    wide = logits.to(_wide(logits.dtype))
    extra = (
        "lse_square_scale",
        "softcap",
        "use_token_scaling",
        "normalizer",
        "return_z_loss",
        "return_token_accuracy",
        "return_predicted_tokens",
    )
    ignore_index = options.get("ignore_index", -100)
    if any(options.get(name) for name in extra) or not bool((target != ignore_index).any()):
        return cross_entropy(wide, target, weight, **options)
    options = {k: v for k, v in options.items() if k not in extra}
    return {"loss": F.cross_entropy(wide, target, None if weight is None else weight.to(wide.dtype), **options)}


def cross_entropy_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor | float]:
    """A loss is lse - x[target]: a difference of numbers as large as the logits. A gradient is p - 1 or smoother,
    times its scale."""
    logits, target = inputs["logits"], inputs["target"]
    if not logits.numel():
        return {}
    softcap, s, smoothing = (inputs.get(k) or 0.0 for k in ("softcap", "lse_square_scale", "label_smoothing"))
    finite = logits.masked_fill(~logits.isfinite(), 0)
    capped = softcap * torch.tanh(finite / softcap) if softcap else finite
    size = capped.abs().amax(1) + torch.tensor(float(logits.shape[1])).log().item()
    weight = inputs.get("weight")
    heaviest = 1.0 if weight is None else weight.abs().amax()
    rows = 2 * size * heaviest + s * size.square()
    gradient = (heaviest * (1 + smoothing) + 2 * s * size)[:, None] * (1 + size[:, None] / 4)
    if inputs.get("reduction", "mean") == "none":
        scales: dict[str, Tensor | float] = {"loss": rows, "z_loss": s * size.square()}
        return scales | ({"dlogits": gradient * grads["loss"].abs()[:, None]} if "loss" in grads else {})
    valid = target != inputs.get("ignore_index", -100)
    count = valid.sum() if inputs.get("reduction", "mean") == "mean" else torch.ones_like(target.sum())
    divisor = (
        count
        if weight is None or inputs.get("reduction") == "sum"
        else torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()
    )
    if inputs.get("normalizer") is not None:
        count = divisor = inputs["normalizer"]
    lesser = torch.minimum(
        torch.as_tensor(count, dtype=torch.float64), torch.as_tensor(divisor, dtype=torch.float64)
    ).clamp(min=1e-30)
    scales = {"loss": rows[valid].sum() / lesser, "z_loss": s * size[valid].square().sum() / lesser}
    return scales | ({"dlogits": gradient * grads["loss"].abs() / lesser} if "loss" in grads else {})


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _loss_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the options that change how the fused loss computes, not what."""
    return {k: v for k, v in options.items() if k not in ("accum_dtype", "memory", "compute_dtype", "stored")}


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    return cross_entropy(_logits(x, weight, bias), target, ce_weight, **_loss_options(options))


def torch_fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    return torch_cross_entropy(_logits(x, weight, bias), target, ce_weight, **_loss_options(options))


def fused_linear_cross_entropy_scales(
    inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors
) -> dict[str, Tensor | float]:
    """As cross entropy's. Logits and their gradient G may be stored in the matmuls' dtype: independent roundings of
    every element, so a loss carries eps * |logits| / sqrt(rows), dx carries eps * sqrt(G^2 @ W^2), and dweight and
    dbias likewise."""
    x, weight, bias, target = (inputs.get(name) for name in ("x", "weight", "bias", "target"))
    if not x.numel():
        return {}
    options = _loss_options(
        {k: v for k, v in inputs.items() if k not in ("x", "weight", "bias", "target", "ce_weight")}
    )
    options["weight"] = inputs.get("ce_weight")
    with torch.enable_grad():
        logits = _logits(x, weight, bias).detach().requires_grad_()
        loss = cross_entropy(logits, target, **options)["loss"]
        g = torch.autograd.grad(loss, logits, grads["loss"])[0] if "loss" in grads else torch.zeros_like(logits)
    logits = logits.detach()
    scales = cross_entropy_scales({**options, "logits": logits, "target": target}, outputs, grads)
    stored = _stored_steps(inputs["compute_dtype"])
    size = x.abs() @ weight.abs().T
    loss_scale = scales["loss"]
    size = logits.abs().amax(1) * stored + size.amax(1)
    if options.get("reduction", "mean") == "none":
        scales["loss"] = loss_scale + size
    else:
        scales["loss"] = loss_scale * (1 + (stored - 1) / x.shape[0] ** 0.5) + size.mean() * (
            loss_scale / loss_scale.clamp(min=1)
        )
    square, rows, vocab = g.square(), *g.shape
    scales["dx"] = (square @ weight.square()).sqrt() * (2 * max(stored, vocab**0.5))
    scales["dweight"] = (square.T @ x.square()).sqrt() * (2 * max(stored, rows**0.5))
    scales["dbias"] = square.sum(0).sqrt() * (2 * max(stored, rows**0.5))
    return scales
