"""Cross entropy of logits and integer targets: functions, module, fake implementation and autograd formula."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import _reduction

from liger_ext import _C
from liger_ext.ops._checks import (
    REDUCTIONS,
    accumulator,
    check_classes,
    check_integer,
    check_tensors,
    class_targets,
    condition_holds,
    mode_code,
    require,
    shape_text,
)
from liger_ext.ops._modules import check_loss_options
from liger_ext.ops._register import register

__all__ = ["CrossEntropyOutput", "LigerCrossEntropyLoss", "cross_entropy", "liger_cross_entropy"]


_NONE = REDUCTIONS["none"]


class CrossEntropyOutput(NamedTuple):
    """The result of a loss with a ``return_*`` option. A field without its option is None."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


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
) -> Tensor | CrossEntropyOutput:
    """Computes the cross entropy between rows of logits and integer targets.

    Per row with target ``y``, ``x' = softcap * tanh(x / softcap)`` (or x), ``lse = log(sum(exp(x')))``,
    ``e = label_smoothing`` and class weights ``w`` (or ones)::

        ce = (1 - e) * w[y] * (lse - x'[y]) + e / V * sum_j w[j] * (lse - x'[j])
        z  = lse_square_scale * lse ** 2

    and the loss is their sum (z-loss: de Brebisson and Vincent, 2015, arXiv:1604.08859; PaLM, arXiv:2204.02311).
    ``"mean"`` divides the sum of ``ce`` by the sum of ``w[y]``, and the sum of ``z`` by the number of targets that
    are not ignored. If a divisor is 0 (all targets are ignored, or have weight 0), that part of the loss and its
    gradient are 0; ``torch.nn.functional.cross_entropy`` returns NaN. Losses are computed and returned in float32
    (float64 for float64 logits). The logits are never written.

    Args:
        logits: ``(..., vocab_size)``, float32, bfloat16 or float16 (float64 on the CPU). Classes are the last
            dimension; in ``torch.nn.functional.cross_entropy`` they are dimension 1. Logits that fit target with either
            dimension, such as ``(N, 8, 8)``, are an error, whose message names the arguments to pass for each.
        target: the shape of logits without its last dimension, int64 or uint8, each in ``[0, vocab_size)`` or
            ``ignore_index``.
        weight: ``(vocab_size,)``, a weight for each class, or None.
        ignore_index: rows with this target are ignored: their loss and gradient are 0. If all rows are, the mean is 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` (the losses in the shape of target).
        label_smoothing: in [0, 1] (Szegedy et al., 2015, arXiv:1512.00567).
        lse_square_scale: factor of the z-loss, which is added to the loss.
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118), greater than 0 (1e-18 to 1e18), or None.
        return_z_loss: also return the z-loss, which is part of the loss.
        return_token_accuracy: also return the share of targets that are predicted (per token with ``"none"``).
        return_predicted_tokens: also return the index of the largest logit in the shape of target, -1 for ignored rows.
            As in ``torch.argmax``, the first of equal logits counts, and NaN is larger than any number. The logits are
            compared before the softcap.

    Returns:
        The loss, or a :class:`CrossEntropyOutput` if a ``return_*`` option is set. Only the loss is differentiable.

    Raises:
        ValueError: an option outside its range, or shapes, dtypes or devices that do not fit together.
        IndexError: a target outside ``[0, vocab_size)`` on the CPU. On a GPU nothing waits for the check: that row's
            loss and gradient are NaN, and the error is raised by the next liger_ext call on the device or by
            :func:`liger_ext.check_errors`.
    """
    check_tensors("cross_entropy", logits=logits, target=target)
    check_integer("cross_entropy", ignore_index=ignore_index)
    check_classes("cross_entropy", "logits", logits)
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"cross_entropy: target has shape {shape_text(target)}, expected that of logits {shape_text(logits)} "
            "but for the last"
        )
    if logits.dim() > 2 and all(condition_holds(n == logits.shape[-1], guards=False) for n in logits.shape[1:-1]):
        raise ValueError(
            f"cross_entropy: logits has shape {shape_text(logits)}, which fits target {shape_text(target)} whether "
            "classes are the last dimension, as here, or dimension 1, as in torch.nn.functional.cross_entropy. Pass "
            "target.flatten(), with logits.flatten(0, -2) if classes are the last dimension, with "
            "logits.movedim(1, -1).flatten(0, -2) if they are dimension 1"
        )
    target = class_targets(target)
    if weight is not None:
        weight = class_weight("cross_entropy", weight, "weight", logits.dtype)
    outputs = _cross_entropy(
        logits if logits.dim() == 2 else logits.reshape(target.numel(), logits.shape[-1]),
        target if target.dim() == 1 else target.reshape(-1),
        weight,
        ignore_index,
        mode_code("cross_entropy", "reduction", reduction, REDUCTIONS),
        label_smoothing,
        lse_square_scale,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )
    return results(outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)


class LigerCrossEntropyLoss(nn.Module):
    """:func:`liger_ext.functional.cross_entropy` as a module with its options; ``forward(_input, target)``.

    Class weights are a buffer that follows ``.to()`` and is not part of the state dict.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__()
        check_loss_options(type(self).__name__, ignore_index, label_smoothing, reduction, softcap)
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return cross_entropy(
            _input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, self.lse_square_scale,
            self.softcap, self.return_z_loss, self.return_token_accuracy, self.return_predicted_tokens,
        )  # fmt: skip


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput:
    """Calls :func:`liger_ext.functional.cross_entropy`.

    ``size_average`` and ``reduce`` are as in ``torch.nn.functional.cross_entropy``.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return cross_entropy(
        input, target, weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def class_weight(op: str, weight: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Returns the class weights in the accumulator's dtype, which the op requires."""
    check_tensors(op, **{name: weight})
    require(weight.dtype.is_floating_point, op, ": ", name, " has dtype ", weight.dtype, ", expected a floating one")
    return weight.to(accumulator(dtype))


def results(
    outputs, target: Tensor, reduction: str, z_loss: bool, accuracy: bool, predicted: bool
) -> Tensor | CrossEntropyOutput:
    """Converts an op's outputs to a public function's result: per-token outputs in the shape of target, and only the
    outputs whose option is set."""
    flat = target.dim() == 1
    per_token = reduction == "none" and not flat
    loss = outputs[0].view(target.shape) if per_token else outputs[0]
    if not (z_loss or accuracy or predicted):
        return loss
    return CrossEntropyOutput(
        loss,
        (outputs[1].view(target.shape) if per_token else outputs[1]) if z_loss else None,
        (outputs[2].view(target.shape) if per_token else outputs[2]) if accuracy else None,
        (outputs[3] if flat else outputs[3].view(target.shape)) if predicted else None,
    )


def fake_results(like: Tensor, rows, dtype: torch.dtype, reduction: int, z_loss: bool, accuracy: bool, predicted: bool):
    """Returns loss, z_loss, token_accuracy and predicted_tokens without data. A result whose option is off has no
    elements."""
    shape = (rows,) if reduction == _NONE else ()
    return (
        like.new_empty(shape, dtype=dtype),
        like.new_empty(shape if z_loss else 0, dtype=dtype),
        like.new_empty(shape if accuracy else 0, dtype=torch.float32),
        like.new_empty(rows if predicted else 0, dtype=torch.int64),
    )


def _fake(logits, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens):
    rows, dtype = logits.shape[0], accumulator(logits.dtype)
    losses = fake_results(logits, rows, dtype, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)
    lse, counts = (logits.new_empty(shape, dtype=dtype) for shape in ((2, rows), _C.cross_entropy_counts))
    return *losses, lse, counts


_cross_entropy = register("cross_entropy", fake=_fake)
