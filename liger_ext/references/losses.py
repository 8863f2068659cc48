"""Cross entropy, of logits and fused with the head's matmul."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.references._sizes import Tensors, stored_steps


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
            count_z = divisor = torch.as_tensor(normalizer, dtype=logits.dtype, device=logits.device).reshape(())
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
    logits = logits.to(accumulator(logits.dtype))
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
        return cross_entropy(logits, target, weight, **options)
    options = {k: v for k, v in options.items() if k not in extra}
    return {"loss": F.cross_entropy(logits, target, None if weight is None else weight.to(logits.dtype), **options)}


def cross_entropy_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor | float]:
    """A loss is lse - x[target], a difference of numbers as large as the logits; a gradient the sum of the terms of
    p - [target] and of what smoothing and z-loss add, each with the error of an exponential of such numbers."""
    logits, target = inputs["logits"].detach(), inputs["target"]
    if not logits.numel():
        return {}
    softcap, s, smoothing = (inputs.get(k) or 0.0 for k in ("softcap", "lse_square_scale", "label_smoothing"))
    capped = logits.masked_fill(~logits.isfinite(), 0)
    capped = softcap * torch.tanh(capped / softcap) if softcap else capped
    vocab, p = logits.shape[1], torch.softmax(capped, 1)
    w = inputs.get("weight")
    w = capped.new_ones(vocab) if w is None else w.to(capped.dtype)
    valid = target != inputs.get("ignore_index", -100)
    index = torch.where(valid, target, 0)
    reduction, normalizer = inputs.get("reduction", "mean"), inputs.get("normalizer")
    by_ce = by_z = capped.new_ones(())
    if reduction != "none" and normalizer is not None:
        by_ce = by_z = by_ce / normalizer
    elif reduction == "mean":
        by_ce, by_z = 1 / (w[index] * valid).sum().clamp(min=1e-30), 1 / valid.sum().clamp(min=1)

    size = (capped.abs().amax(1) + capped.new_tensor(vocab).log()) * valid
    loss, z_loss = 2 * size * w.amax() * by_ce + s * size.square() * by_z, s * size.square() * by_z
    if reduction != "none":
        loss, z_loss = loss.sum(), z_loss.sum()
    scales: dict[str, Tensor | float] = {"loss": loss, "z_loss": z_loss}
    if "loss" in grads:
        chosen = p + F.one_hot(index, vocab)
        terms = (1 - smoothing) * w[index][:, None] * chosen + smoothing / vocab * (w.sum() * p + w)
        terms = terms * by_ce + 2 * s * by_z * size[:, None] * p
        # A capped logit has the roundings of a quotient, a tanh and a product, each as large as itself.
        steps = 1 + size / (2 if softcap else 4)
        scales["dlogits"] = terms * (valid * steps * grads["loss"].abs())[:, None]
    return scales


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _loss_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without the options that change how the fused loss computes, not what."""
    return {k: v for k, v in options.items() if k not in ("accum_dtype", "memory", "compute_dtype", "stored")}


def _with_head(loss: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def fused(
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        **options: Any,
    ) -> dict[str, Tensor]:
        return loss(_logits(x, weight, bias), target, ce_weight, **_loss_options(options))

    return fused


fused_linear_cross_entropy = _with_head(cross_entropy)
torch_fused_linear_cross_entropy = _with_head(torch_cross_entropy)


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
    scales = cross_entropy_scales({**options, "logits": logits, "target": target}, outputs, grads)
    stored = stored_steps(inputs["compute_dtype"])
    rows, vocab = logits.shape
    # A logit is off by its own rounding, and by those of the products that it sums.
    off = logits.detach().abs().amax(1) * stored + (x.abs() @ weight.abs().T).amax(1)
    # Classes whose logits may be the largest, roundings being what they are.
    largest = logits.detach().amax(1, keepdim=True)
    step = 2 * torch.finfo(accumulator(inputs["compute_dtype"])).eps  # four roundings, as stored_steps counts them
    scales["predicted_tokens"] = logits.detach() >= largest - 2 * step * off[:, None]
    if options.get("reduction", "mean") == "none":
        scales["loss"] = scales["loss"] + off
    else:
        share = scales["loss"] / (logits.detach().abs().amax(1).sum() + rows).clamp(min=1)
        scales["loss"] = scales["loss"] + share * off.square().sum().sqrt()
    square = (g * stored).square() + scales.get("dlogits", g).square()
    scales["dx"] = 2 * (square @ weight.square()).sqrt() * max(1.0, vocab**0.5 / stored)
    scales["dweight"] = 2 * (square.T @ x.square()).sqrt() * max(1.0, rows**0.5 / stored)
    scales["dbias"] = 2 * square.sum(0).sqrt() * max(1.0, rows**0.5 / stored)
    if stored > 1:
        # A logit's own rounding, relative to 1, is a relative error of its exponential, and so of the gradient; and
        # squared it is the z-loss's.
        reach = 1 + logits.detach().abs().amax()
        scales |= {f"{name} bound": reach * scales[name] for name in ("dx", "dweight", "dbias")}
        # The largest logits' roundings move a whole row of the gradient at once, by way of lse: these do not cancel.
        scales["dx bound"] = scales["dx bound"] + reach * stored * (g.abs() @ weight.abs())
        by_rows = off if options.get("reduction", "mean") == "none" else scales["loss"] / reach
        scales["z_loss bound"] = scales["z_loss"] + 2 * (options.get("lse_square_scale") or 0.0) * reach * by_rows
    return scales
