"""The record of cross entropy: the formula of the loss with all options, Hugging Face's computation as the baseline,
the magnitudes of intermediate values (the scales of rounding errors), and the shapes to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    use_token_scaling: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and the z-loss of each row, 0 for ignored rows."""
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    vocab = logits.shape[1]
    valid = target != ignore_index
    index = torch.where(valid, target, 0)[:, None]
    # An ignored row has no gradient, even if it contains NaN.
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
    return torch.where(valid, ce, zero), torch.where(valid, z, zero)


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
    """Returns the results by name. If all targets are ignored, they are 0."""
    ce, z = cross_entropy_rows(
        logits, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap, use_token_scaling
    )
    valid = target != ignore_index
    predicted = logits.detach().argmax(1) if logits.shape[0] else target.clone()  # softcap may make logits equal
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
    """Computes the loss as Hugging Face does: logits in fp32, then ``F.cross_entropy`` if it has the options, otherwise
    the formula in fp32."""
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
    """Returns the scales. A loss is lse - x[target], a difference of numbers as large as the logits. A gradient is a
    sum of terms: of p - [target], of label smoothing and of the z-loss. Each term has the error of an exponential of a
    number as large as the logits."""
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
        grad = (valid * grads["loss"].abs())[:, None]
        hard, soft = (1 - smoothing) * w[index][:, None], smoothing / vocab
        p_factor = (hard + soft * w.sum()) * by_ce + 2 * s * by_z * size[:, None]
        terms = p_factor * p + (hard * F.one_hot(index, vocab) + soft * w) * by_ce
        # A capped logit has the roundings of a quotient, a tanh and a product, each as large as itself.
        steps = 1 + size / (2 if softcap else 4)
        scales["dlogits"] = terms * steps[:, None] * grad
        # The derivative of a class's gradient by its own logit. It is at most as large as the gradient, unless label
        # smoothing subtracts nearly p from p.
        slope = 1 - (capped / softcap).square() if softcap else 1
        scales["dlogits by its logit"] = p_factor * p * (1 - p) * slope * grad
    return scales


# Exponential 4, logarithm 4, the sum, the differences, and the reduction's factor.
LOSS_ROUNDINGS = {"loss": Roundings(12, 1), "z_loss": Roundings(16, 1), "token_accuracy": Roundings(2)}


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    return {"logits": make.leaf(size.rows, size.cols, scale=3), "target": make.targets(size.rows, size.cols)}


_COSTLY = ("softcap", "label_smoothing", "return_token_accuracy", "return_predicted_tokens")


def costly(options: Mapping[str, Any]) -> bool:
    """Whether options need additional instructions for each logit."""
    return any(options.get(name) for name in _COSTLY)


CROSS_ENTROPY = Record(
    name="cross_entropy",
    reference=cross_entropy,
    baseline=torch_cross_entropy,
    scales=cross_entropy_scales,
    roundings={**LOSS_ROUNDINGS, "dlogits": Roundings(16, 1)},
    inputs=_inputs,
    example=lambda tokens, hidden, vocab: Size(tokens, vocab),
    llama=Size(8192, 128_256),
    moved=matrices(1, 2),
    timed=(
        Timed(
            sizes((4096, 128256), (8192, 32000), (2500, 152064), (8192, 152064), (8192, 32001)), sizes((1024, 49152))
        ),
    ),
    outputs=("loss",),
    constants=("weight",),
)
