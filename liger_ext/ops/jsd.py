"""The generalised Jensen-Shannon divergence of a student's and a teacher's log-probabilities: functions and module."""

from __future__ import annotations

from torch import Tensor, nn

from liger_ext import _C
from liger_ext.ops._checks import accumulator, check_classes, check_integer, check_tensors, shape_text
from liger_ext.ops._modules import check_number
from liger_ext.ops._register import register

__all__ = ["LigerJSD", "jsd", "liger_jsd"]


def jsd(
    log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Computes the generalised Jensen-Shannon divergence between rows of log-probabilities, for distillation (Agarwal
    et al., 2023, arXiv:2306.13649; Lin, 1991).

    With the student's ``x = log_q``, ``Q = exp(x)``, the teacher's ``y = log_p``, ``P = exp(y)`` and the mixture
    ``M = beta * P + (1 - beta) * Q``, the loss is the mean over rows of the sum over columns of::

        0 < beta < 1:  beta * P * (y - log M) + (1 - beta) * Q * (x - log M)
        beta = 0:      P * (y - x), the forward KL divergence
        beta = 1:      Q * (x - y), the reverse KL divergence

    A probability of 0 (a log-probability of -inf, for example of a masked class) contributes 0. So the divergence with
    ``0 < beta < 1`` is always finite. The forward KL divergence is infinite if only the student excludes a class, the
    reverse KL divergence if only the teacher does. For contiguous inputs, the gradient is the only allocated
    tensor of their size. The result is computed and returned in float32 (float64 for float64 inputs).

    Args:
        log_q: the student's log-probabilities, ``(..., vocab_size)``, float32, bfloat16 or float16 (float64 on the
            CPU).
        log_p: the teacher's, in the shape and dtype of log_q. It has no gradient.
        shift_labels: the shape of log_q without its last dimension, int64, or None. Rows whose label is ignore_index
            are ignored and not read: their loss and gradient are 0. If all rows are ignored, the mean is 0. Other
            labels have no effect.
        beta: the teacher's weight in the mixture, in [0, 1]; a number, not a tensor.
        ignore_index: the label of ignored rows.

    Returns:
        The loss, a scalar tensor, differentiable with respect to log_q.

    Raises:
        ValueError: beta outside its range, shapes, dtypes or devices that do not fit together, or log_p requires a
            gradient.
    """
    check_tensors("jsd", log_q=log_q, log_p=log_p)
    check_integer("jsd", ignore_index=ignore_index)
    check_classes("jsd", "log_q", log_q)
    if log_p.shape != log_q.shape:
        raise ValueError(f"jsd: log_p has shape {shape_text(log_p)}, expected that of log_q, {shape_text(log_q)}")
    if shift_labels is not None:
        check_tensors("jsd", shift_labels=shift_labels)
        if shift_labels.shape != log_q.shape[:-1]:
            raise ValueError(
                f"jsd: shift_labels has shape {shape_text(shift_labels)}, expected that of log_q {shape_text(log_q)} "
                "but for the last"
            )
        shift_labels = shift_labels if shift_labels.dim() == 1 else shift_labels.reshape(-1)
    if log_q.dim() != 2:
        rows = log_q.shape[:-1].numel()
        log_q, log_p = (t.reshape(rows, t.shape[-1]) for t in (log_q, log_p))
    return _jsd(log_q, log_p, shift_labels, beta, ignore_index)[0]


class LigerJSD(nn.Module):
    """:func:`liger_ext.functional.jsd` as a module with its options; ``forward(log_q, log_p, shift_labels=None)``."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__()
        check_number("LigerJSD", "beta", beta, 0, 1)
        check_integer("LigerJSD", ignore_index=ignore_index)
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Calls :func:`liger_ext.functional.jsd` with the student's log-probabilities, ``input``, and the teacher's."""
    return jsd(input, target, shift_labels, beta, ignore_index)


def _fake(log_q):
    dtype = accumulator(log_q.dtype)
    return log_q.new_empty((), dtype=dtype), log_q.new_empty(_C.cross_entropy_counts, dtype=dtype)


_jsd = register("jsd", fake=_fake)
