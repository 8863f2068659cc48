"""Liger-Kernel's function names and argument orders. New code wants :mod:`liger_ext.functional`.

``in_place`` arguments are accepted and have no effect: nothing is ever written over.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import _reduction

from liger_ext import functional as F

__all__ = [
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_layer_norm",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_rotary_pos_emb",
    "liger_softmax",
    "liger_swiglu",
]

liger_relu_squared = F.relu_squared
liger_softmax = F.softmax


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_ext.functional.swiglu`."""
    return F.swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """:func:`liger_ext.functional.geglu`, by tanh."""
    return F.geglu(a, b)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """:func:`liger_ext.functional.layer_norm`."""
    return F.layer_norm(X, W, B, eps)


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor | None,
    affine_shifting_bias: Tensor | None,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """:func:`liger_ext.functional.group_norm`; ``num_channels`` has no effect, X has so many."""
    return F.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """:func:`liger_ext.functional.rms_norm`."""
    return F.rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> tuple[Tensor, Tensor]:
    """:func:`liger_ext.functional.add_rms_norm`."""
    return F.add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`liger_ext.functional.rope`.

    ``position_ids`` has no effect: cos and sin are those of the positions already, as in Hugging Face.
    """
    return F.rope(q, k, cos, sin, unsqueeze_dim)


liger_rope = liger_rotary_pos_emb


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
) -> Tensor | F.CrossEntropyOutput:
    """:func:`liger_ext.functional.cross_entropy`.

    ``size_average`` and ``reduce`` mean what they mean in ``torch.nn.functional.cross_entropy``.
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    return F.cross_entropy(
        input,
        target,
        weight,
        ignore_index,
        reduction,
        label_smoothing,
        lse_square_scale,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
    )


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, *options, **named_options
) -> Tensor | F.CrossEntropyOutput:
    """:func:`liger_ext.functional.fused_linear_cross_entropy`, whose options have upstream's names and order."""
    return F.fused_linear_cross_entropy(input, weight, target, *options, **named_options)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """:func:`liger_ext.functional.jsd` of the student's log-probabilities, ``input``, and the teacher's."""
    return F.jsd(input, target, shift_labels, beta, ignore_index)
