"""The language-model head and its cross entropy in one op: functions and module. The logits exist in chunks, or all at
once if they fit in the memory of the level.

``_fused_loss.py`` prepares the call of the op.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_ext.ops._fused_loss import fused_loss
from liger_ext.ops._modules import check_loss_options
from liger_ext.ops.count_rows import CountedRows
from liger_ext.ops.cross_entropy import CrossEntropyOutput, results

__all__ = ["LigerFusedLinearCrossEntropyLoss", "fused_linear_cross_entropy", "liger_fused_linear_cross_entropy"]

_OP = "fused_linear_cross_entropy"


def fused_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    *,
    memory: str | int = "auto",
    normalizer: Tensor | float | None = None,
    rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | CrossEntropyOutput:
    """Computes ``cross_entropy(x @ weight.T + bias, target)`` in one op. The logits exist in chunks, or all at once
    if they fit in the memory of the level.

    The formula is that of :func:`cross_entropy`. The matmuls run in the promoted dtype of x and weight, or in the dtype
    of autocast; everything else is computed in float32 (float64 for float64). A gradient is computed only if its input
    requires one: none under ``no_grad``, none of a frozen head, none of a frozen backbone.

    Args:
        x: ``(..., hidden_size)``, the hidden states: float32, bfloat16 or float16 (float64 on the CPU).
        weight: ``(vocab_size, hidden_size)``, the head's weight; its dtype may differ from that of x.
        target: the shape of x without its last dimension, int64 or uint8, each in ``[0, vocab_size)`` or
            ``ignore_index``.
        bias: ``(vocab_size,)`` or None.
        ce_weight: ``(vocab_size,)``, a weight for each class, or None.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap: as in :func:`cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in :func:`cross_entropy`.
        accum_dtype: the dtype in which the weight's gradient is summed over chunks: None (float32, or float64 for
            float64), or the dtype of the matmuls. If this is a 16-bit dtype, and that of weight, the sum takes half the
            memory and is rounded after each chunk.
        use_token_scaling: multiply each token's loss by the probability of its target, as a constant.
        memory: the memory that forward and backward may take in addition to the arguments, gradients included: a level,
            or a number of bytes. A level selects a plan by its memory and an estimate of its time on this device
            (``python -m liger_ext doctor --loss`` prints both). ``"fast"``: of the plans that take at most 1 % more
            than the least time, the one with the least memory. ``"auto"``: the same with 4 %, among plans that run no
            matmul twice. ``"low"``: the same as ``"fast"`` with 20 %. ``"min"``: the least memory. All levels except
            ``"min"`` take at most an eighth of a GPU's memory in addition to the gradients, if a plan fits. A number of
            bytes: the fastest plan that fits, including copies of arguments in a layout or dtype that matmuls can read.
            If a second backward may follow, or hooks see saved tensors (those of a checkpoint, for example), eager mode
            takes the memory of one more gradient of weight. A graph of torch.compile always takes it, and at a level
            cuts rows into the chunks of a call with 16,384 rows. A level changes results by rounding only.
        normalizer: replaces the denominators of ``"mean"``, and divides the sum of ``"sum"``; for example the number of
            tokens in all accumulated batches (``num_items_in_batch`` in Hugging Face). A number or a tensor of one
            element, which is a constant. Not with ``"none"``. If it is 0, loss and gradients are 0, not inf or NaN.
        rows: the rows on which the matmuls run; all other rows must be ignored. From :func:`count_rows`, called with
            this target and this ignore_index; or int64, ``(n,)``, each row at most once. Results have the same shapes
            as without ``rows``.
        process_group: the processes over which the vocabulary is sharded (tensor parallelism). weight and bias have
            this process's classes, in the order of ranks. x, target, ce_weight (of all classes) and the options must be
            the same in all processes. The loss, bitwise, and the gradient of x, which is that of all classes, are then
            the same in all processes. If weight is a DTensor, ``Shard(0)`` on a mesh of one dimension, pass no
            process_group; its gradient is a DTensor. With another weight, its first call gathers the shards' sizes and
            waits for them. With shards, ``"auto"`` and ``"fast"`` store the shard's logits, within an eighth of a GPU's
            memory; the other levels recompute them in chunks of rows, ``"low"`` with the least memory within 20 % of
            the fastest such plan. Within a number of bytes, a chunk has at least 128 rows.

    Returns:
        The loss in float32 (float64 for float64), or a :class:`CrossEntropyOutput` if a ``return_*`` option is set.
        Only the loss is differentiable, with respect to x, weight and bias.

    Raises:
        ValueError: an option outside its range, shapes, dtypes or devices that do not fit together, fewer bytes of
            ``memory`` than the call needs, or rows of :func:`count_rows` without a row that is not ignored (on a GPU
            the loss is NaN, and the error is raised later, like that of a target out of range).
        IndexError: a target out of range, as in :func:`cross_entropy`, or a row out of range, reported likewise.
    """
    outputs = fused_loss(
        _OP, x, weight, target, bias, ce_weight, ignore_index=ignore_index, lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing, reduction=reduction, softcap=softcap, return_z_loss=return_z_loss,
        accum_dtype=accum_dtype, use_token_scaling=use_token_scaling, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, memory=memory, normalizer=normalizer, rows=rows,
        process_group=process_group,
    )  # fmt: skip
    return results(outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """:func:`liger_ext.functional.fused_linear_cross_entropy` as a module with its options.

    ``forward(lin_weight, _input, target, bias=None)``, in this order. Class weights are a buffer that follows ``.to()``
    and is not part of the state dict.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
        *,
        memory: str | int = "auto",
    ):
        super().__init__()
        check_loss_options(type(self).__name__, ignore_index, label_smoothing, reduction, softcap)
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens
        self.memory = memory

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, self.ignore_index, self.lse_square_scale,
            self.label_smoothing, self.reduction, self.softcap, self.return_z_loss, self.accum_dtype,
            self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens, memory=self.memory,
        )  # fmt: skip


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
    *,
    memory: str | int = "auto",
    normalizer: Tensor | float | None = None,
    rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | CrossEntropyOutput:
    """Calls :func:`liger_ext.functional.fused_linear_cross_entropy`; ``chunk_mem_const`` has no effect."""
    return fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        memory=memory, normalizer=normalizer, rows=rows, process_group=process_group,
    )  # fmt: skip
