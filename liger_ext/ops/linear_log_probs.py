"""Log-probabilities of tokens from a language-model head, for preference and RL losses. The logits exist in chunks, or
all at once if they fit in the memory of the level.

The op can also return the entropy, the mean logit, whether the token is the most probable one, and the logarithm of the
sum of squared probabilities.
"""

from __future__ import annotations

import numbers
from typing import NamedTuple

import torch
from torch import Tensor

from liger_ext.ops._checks import shape_text
from liger_ext.ops._fused_loss import fused_loss
from liger_ext.ops.count_rows import CountedRows

__all__ = ["LogProbsOutput", "linear_log_probs"]

_OP = "linear_log_probs"


class LogProbsOutput(NamedTuple):
    """Results of :func:`linear_log_probs`, each in the shape of target. A field whose option is False is None."""

    log_probs: Tensor
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    ignore_index: int = -100,
    entropy: bool = False,
    mean_logits: bool = False,
    is_top1: bool = False,
    log_sum_sq_probs: bool = False,
    memory: str | int = "auto",
    logits_dtype: torch.dtype | None = None,
    rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | LogProbsOutput:
    """Computes the log-probability of each target under the softmax of a head's logits.

    ``z = softcap * tanh(logit_scale * (x @ weight.T + bias) / softcap) / temperature``, or without a softcap
    ``logit_scale * (x @ weight.T + bias) / temperature``; ``p = softmax(z)``; ``log_probs = log p[target]``. The
    matmuls run as in :func:`fused_linear_cross_entropy`; everything else is in float32 (float64 for float64).

    The matmul rounds ``x @ weight.T + bias`` to ``logits_dtype``. Rounding to bfloat16 changes a logit by up to 2^-8 of
    its size, and so the log-probabilities. With float32 logits, the log-probabilities differ by about 1e-5 at most from
    those of exact products of the matmul's operands. The gradient of the logits is then computed in float32, too, and
    rounded to the dtype of the matmuls. Float32 logits exist for one chunk of rows at a time.

    ``log_probs`` and ``entropy`` are differentiable with respect to x, weight and bias. With an upstream gradient of
    the entropy, the backward may recompute the logits.

    Args:
        x: ``(..., hidden_size)``, the hidden states: float32, bfloat16 or float16 (float64 on the CPU).
        weight: ``(vocab_size, hidden_size)``, the head's weight; its dtype may differ from that of x.
        target: the shape of x without its last dimension, int64 or uint8: the tokens, each in ``[0, vocab_size)`` or
            ``ignore_index``.
        bias: ``(vocab_size,)`` or None.
        temperature: a number from 1e-9 to 1e9, or a tensor of such numbers in the shape of target. A tensor must not
            require a gradient, and its values are not checked, since a check would wait for the device.
        softcap: bound of the logits (Gemma 2), a number from 1e-18 to 1e18, or None.
        logit_scale: a number from 1e-9 to 1e9 (Cohere).
        ignore_index: the results of rows with this target are 0 (``is_top1``: False), and so are their gradients.
        entropy: also return ``-sum(p * log(p))``.
        mean_logits: also return the mean of z over the vocabulary, without gradient.
        is_top1: also return whether the target has the largest logit before the softcap (of equal logits, the first
            counts).
        log_sum_sq_probs: also return ``log(sum(p ** 2))``, without gradient.
        logits_dtype: the dtype of the logits. None: the dtype of the matmuls. ``torch.float32`` with matmuls in
            bfloat16 or float16, also under autocast: logits that are not rounded to 16 bits.
        memory, rows, process_group: as in :func:`fused_linear_cross_entropy`. With a sharded vocabulary, temperature
            must be the same in all processes, too.

    Returns:
        ``log_probs``, or a :class:`LogProbsOutput` if another result is requested: float32 (float64 for float64) in the
        shape of target; ``is_top1`` is bool.

    Raises:
        ValueError: an option outside its range; a logits_dtype other than float32 or the dtype of the matmuls (with
            float64 matmuls: other than float64); shapes, dtypes or devices that do not fit together.
        IndexError: a target out of range, as in :func:`cross_entropy`.
    """
    flags = {"entropy": entropy, "mean_logits": mean_logits, "is_top1": is_top1, "log_sum_sq_probs": log_sum_sq_probs}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{_OP}: {name} is {flag!r}, expected True or False")
    logit_scale = _factor("logit_scale", logit_scale)
    per_token = None
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(
                f"{_OP}: temperature has shape {shape_text(temperature)}, expected a number or that of target, "
                f"{shape_text(target)}"
            )
        per_token = temperature.reshape(-1).to(x.device)
    elif softcap is None:
        logit_scale = logit_scale / _factor("temperature", temperature)
    elif _factor("temperature", temperature) != 1:
        wide = torch.float64 in (x.dtype, weight.dtype)
        dtype = torch.float64 if wide else torch.float32
        per_token = torch.full((target.numel(),), float(temperature), dtype=dtype, device=x.device)
    outputs = fused_loss(
        _OP, x, weight, target, bias, ignore_index=ignore_index, memory=memory, rows=rows, softcap=softcap,
        logit_scale=logit_scale, temperature=per_token, return_token_accuracy=is_top1, return_entropy=entropy,
        return_mean_logits=mean_logits, return_log_sum_sq=log_sum_sq_probs, logits_dtype=logits_dtype,
        process_group=process_group,
    )  # fmt: skip
    log_probs = (0 - outputs[0]).view(target.shape)
    if not (entropy or mean_logits or is_top1 or log_sum_sq_probs):
        return log_probs
    return LogProbsOutput(
        log_probs,
        outputs[4].view(target.shape) if entropy else None,
        outputs[5].view(target.shape) if mean_logits else None,
        outputs[2].view(target.shape) > 0 if is_top1 else None,
        outputs[6].view(target.shape) if log_sum_sq_probs else None,
    )


def _factor(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 1e-9 <= value <= 1e9:
        raise ValueError(f"{_OP}: {name} is {value!r}, expected a number from 1e-9 to 1e9")
    return float(value)
