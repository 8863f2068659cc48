"""Computes the results of a model's forward with ``return_log_probs=True``: each target's log-probability, the entropy
of the distribution that predicts it (``return_entropy=True``), and the mean of the negative log-probabilities as the
loss."""

import numbers
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_ext import functional
from liger_ext.functional import LogProbsOutput
from liger_ext.models.modules.called_head import rows_at_a_time, scaled
from liger_ext.models.modules.head import loss_caller
from liger_ext.models.modules.loss import VALUE_OPTIONS, row_targets, shift, softcapped, warn_if_replaced
from liger_ext.models.patching.swap import is_plain_tensor
from liger_ext.ops._checks import accumulator

_FLAGS = "return_log_probs", "return_entropy"
# Arguments of a model's forward that change the loss or its further results, so that they contradict log-probabilities.
_OTHERS = (*VALUE_OPTIONS, "accum_dtype", "return_predicted_tokens")


class LogProbsLoss(NamedTuple):
    loss: Tensor
    log_probs: Tensor
    entropy: Tensor | None = None
    token_accuracy: Tensor | None = None


def take_options(arguments: dict[str, object], has_labels: bool, against: str | None) -> dict[str, object] | None:
    """Checks `return_log_probs` and its options, and removes them from the arguments of a model's forward.

    Args:
        against: the reason why this model cannot return log-probabilities, or None.

    Returns:
        Options for the functions below; None if log-probabilities are not requested.

    Raises:
        TypeError, ValueError: log-probabilities are requested with arguments that contradict them, or from a model that
            cannot return them.
    """
    asked = _flag("return_log_probs", arguments)
    if not asked and against is not None:
        return None  # a user's own loss may have any arguments
    entropy = _flag("return_entropy", arguments)
    if not asked:
        if entropy:
            raise ValueError("return_entropy=True is given without return_log_probs=True: pass both")
        for name in ("temperature", "logits_dtype"):
            if has_labels and arguments.get(name) is not None:
                raise ValueError(f"{name}={arguments[name]!r} is given without return_log_probs=True: pass both")
        for name in _FLAGS:
            arguments.pop(name, None)
        return None
    if against is not None:
        raise ValueError(f"return_log_probs=True: {against}")
    if not has_labels:
        raise ValueError("return_log_probs=True needs targets: pass labels or shift_labels")
    given = {name: arguments.pop(name) for name in _OTHERS if name in arguments}
    wrong = [name for name, value in given.items() if isinstance(value, Tensor) or value]
    if wrong:
        raise ValueError(
            f"return_log_probs=True is given with {', '.join(wrong)}, but output.loss is then the mean of -log_probs "
            "and nothing else: leave out return_log_probs, or the other arguments"
        )
    temperature = arguments.pop("temperature", None)
    temperature = 1.0 if temperature is None else temperature
    is_number = isinstance(temperature, numbers.Real) and not isinstance(temperature, bool)
    if not is_number or not 1e-9 <= temperature <= 1e9:
        raise ValueError(f"temperature is {temperature!r}, expected a number from 1e-9 to 1e9")
    for name in _FLAGS:
        arguments.pop(name, None)
    is_top1 = bool(arguments.pop("return_token_accuracy", None))
    options = {"entropy": entropy, "temperature": float(temperature), "is_top1": is_top1}
    return options | {"logits_dtype": arguments.pop("logits_dtype", None)}


def _flag(name: str, arguments: dict[str, object]) -> bool:
    value = arguments.get(name)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True, False or None")
    return bool(value)


def fused_log_probs(
    hidden_states: Tensor,
    lm_head: nn.Module,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    rows: functional.CountedRows | None = None,
    *,
    logit_scale: float = 1.0,
    function: Callable = functional.fused_linear_cross_entropy,
    memory: str | int = "auto",
    **options,
) -> LogProbsLoss:
    """Computes log-probabilities and loss of `lm_head(hidden_states) * logit_scale`, without keeping logits. Arguments
    are those of `fused_causal_lm_loss`, and `options` those of `_target_log_probs`.

    A head that is more than a linear layer is called chunk by chunk, and again in the backward. It is called once for
    all rows if that is necessary, or if the logits fit.
    """
    warn_if_replaced(function, "return_log_probs=True makes the loss of log-probabilities")
    call = loss_caller(lm_head)
    label_arguments = _shifted(labels, shift_labels, ignore_index), ignore_index

    def head_log_probs(x: Tensor, weight: Tensor, bias: Tensor | None) -> LogProbsOutput:
        if not is_plain_tensor(weight):
            return _target_log_probs(
                scaled(nn.functional.linear(x, weight, bias), logit_scale), *label_arguments, **options
            )
        found = functional.linear_log_probs(
            x.reshape(-1, x.shape[-1]),
            weight,
            row_targets(label_arguments[0], x),
            bias,
            ignore_index=ignore_index,
            logit_scale=logit_scale,
            memory=memory,
            rows=rows,
            **options,
        )
        return LogProbsOutput(found) if isinstance(found, Tensor) else found

    if call is None:
        found = _called_log_probs(lm_head, hidden_states, *label_arguments, logit_scale, memory, options)
    else:  # A plain tuple, because hooks unpack and rebuild tuples.
        found = LogProbsOutput(*call(hidden_states, loss=lambda *arguments: tuple(head_log_probs(*arguments))))
    return _with_loss(found, *label_arguments, num_items_in_batch)


def log_probs_from_logits(
    logits: Tensor,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    *,
    memory: object = None,
    max_rows: object = None,
    **options,
) -> LogProbsLoss:
    """Computes `fused_log_probs` from logits [..., vocab_size]. Ignores `memory` and `max_rows`."""
    label_arguments = _shifted(labels, shift_labels, ignore_index), ignore_index
    return _with_loss(_target_log_probs(logits, *label_arguments, **options), *label_arguments, num_items_in_batch)


def _shifted(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    return shift(labels, ignore_index) if shift_labels is None else shift_labels


def _called_log_probs(
    lm_head: nn.Module,
    hidden_states: Tensor,
    shift_labels: Tensor,
    ignore_index: int,
    logit_scale: float,
    memory: str | int,
    options: dict[str, object],
) -> LogProbsOutput:
    def chunk_log_probs(x: Tensor, targets: Tensor) -> LogProbsOutput:
        return _target_log_probs(scaled(lm_head(x), logit_scale), targets, ignore_index, **options)

    flat = hidden_states.reshape(-1, hidden_states.shape[-1])
    chunk = rows_at_a_time(lm_head, flat, memory)
    if chunk is None:
        return chunk_log_probs(hidden_states, shift_labels)
    chunks = zip(flat.split(chunk), row_targets(shift_labels, flat).split(chunk), strict=True)
    made = [checkpoint(chunk_log_probs, *rows, use_reentrant=False) for rows in chunks]
    return LogProbsOutput(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*made, strict=True)))


def _target_log_probs(
    logits: Tensor,
    shift_labels: Tensor,
    ignore_index: int,
    *,
    temperature: float,
    softcap: float | None = None,
    entropy: bool,
    is_top1: bool,
    logits_dtype: torch.dtype | None = None,
) -> LogProbsOutput:
    """Computes `functional.linear_log_probs` from logits, with the same options and results; [rows]."""
    if logits_dtype not in (None, logits.dtype):
        raise ValueError(
            f"return_log_probs=True: logits_dtype is {logits_dtype!r}, but here the head itself computes the logits, "
            f"in {logits.dtype}: leave it out (with skip_logits=False, or a head that is more than a linear layer)"
        )
    if not is_plain_tensor(logits):
        raise ValueError(
            f"return_log_probs=True: the head's logits are of type {type(logits).__name__}, expected a plain tensor: "
            "tensor parallelism must not shard the vocabulary"
        )
    targets = row_targets(shift_labels, logits)
    z = logits.reshape(-1, logits.shape[-1])
    z = z.to(accumulator(z.dtype))
    z = (z if softcap is None else softcapped(z, softcap)) / temperature
    log_p, counts = z.log_softmax(-1), targets != ignore_index
    return LogProbsOutput(
        0 - nn.functional.nll_loss(log_p, targets, ignore_index=ignore_index, reduction="none"),
        torch.where(counts, -(log_p.exp() * log_p).sum(-1), 0) if entropy else None,
        is_top1=(z.argmax(-1) == targets) & counts if is_top1 else None,
    )


def _with_loss(
    found: LogProbsOutput, shift_labels: Tensor, ignore_index: int, num_items: int | Tensor | None
) -> LogProbsLoss:
    log_probs, entropy = (t if t is None else t.view(shift_labels.shape) for t in found[:2])
    count = (shift_labels != ignore_index).sum().clamp(min=1).to(log_probs.device)
    total = count if num_items is None else num_items
    if isinstance(total, Tensor):
        total = total.to(log_probs.device)
    accuracy = None if found.is_top1 is None else found.is_top1.sum() / count
    return LogProbsLoss((0 - log_probs.sum()) / total, log_probs, entropy, accuracy)
