"""The language-model head and its loss in one op, so that the logits never exist as a whole.

The C++ op cannot ask a tensor whether it requires a gradient, so the public function says which gradients are wanted
and how they come about (``_fused_linear_op.py``).
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn

from liger_ext import _C
from liger_ext.ops._checks import (
    REDUCTIONS,
    accumulator,
    check_integer,
    check_tensors,
    class_targets,
    code_of,
    holds,
    require,
    shape_text,
)
from liger_ext.ops._fused_linear_op import LossArguments, autocast_dtype, call_op
from liger_ext.ops._loss_devices import device_of
from liger_ext.ops._loss_plan import Call, Plan, plan, shard_rows
from liger_ext.ops._modules import check_loss_options
from liger_ext.ops._sharded_vocabulary import is_dtensor, local_tensors, sharded_loss
from liger_ext.ops.count_rows import CountedRows, for_all_rows, gather, listed_rows
from liger_ext.ops.cross_entropy import CrossEntropyOutput, class_weight, results

__all__ = ["LigerFusedLinearCrossEntropyLoss", "fused_linear_cross_entropy", "liger_fused_linear_cross_entropy"]

_OP = "fused_linear_cross_entropy"
_ACCUMULATED = int(_C.Gradients.accumulated)


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
    """``cross_entropy(x @ weight.T + bias, target)`` in chunks of rows, without the logits as a whole.

    The formula is that of :func:`cross_entropy`. The matmuls run in the promoted dtype of x and weight, or under
    autocast in its dtype; everything else in float32 (float64 for float64). Gradients that nobody wants are not
    computed: neither under ``no_grad``, nor of a frozen head or a frozen backbone.

    Args:
        x: ``(..., hidden_size)``, the hidden states: float32, bfloat16 or float16 (float64 on the CPU).
        weight: ``(vocab_size, hidden_size)``, the head's weight; its dtype may differ from that of x.
        target: the shape of x without its last dimension, int64 or uint8, each in ``[0, vocab_size)`` or
            ``ignore_index``.
        bias: ``(vocab_size,)`` or None.
        ce_weight: ``(vocab_size,)``, a weight for each class, or None.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap: as in :func:`cross_entropy`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: as in :func:`cross_entropy`.
        accum_dtype: in which the weight's gradient is summed over chunks: float32 if None (float64 for float64), or the
            dtype of the matmuls, which takes half the memory and rounds after each chunk.
        use_token_scaling: multiply each token's loss by the probability of its target, as a constant.
        memory: what a forward and its backward may take beside the arguments, gradients included: a level, or a number
            of bytes. Levels compare plans by their memory and an estimate of their time on this device
            (``python -m liger_ext doctor --loss`` prints both). ``"fast"``: the least memory within 1 % of the least
            time. ``"auto"``: no matmul runs twice, and the least memory within 4 %. ``"low"``: the least memory within
            20 %. ``"min"``: the least memory. All but ``"min"`` take at most an eighth of a GPU's memory beside the
            gradients. A number of bytes: the least time that fits; copies of arguments that no matmul can read, or not
            in its dtype, count. Where a second backward may follow, or hooks see saved tensors (a checkpoint's, say),
            eager mode takes another gradient of weight beside. A graph of torch.compile always does, and cuts rows into
            chunks, as it would for 16,384 rows. A level changes results by rounding only.
        normalizer: replaces the denominators of ``"mean"``, and with ``"sum"`` divides the sum: the number of tokens in
            all accumulated batches, say (``num_items_in_batch`` in Hugging Face). A number or a tensor of one element,
            which is taken as a constant. Not with ``"none"``. If it is 0, loss and gradients are 0, while a division by
            0 would give inf or NaN.
        rows: the rows that count, on which alone the matmuls run, the others being ignored: from :func:`count_rows`, or
            ``(n,)``, int64, each at most once. Results have the shapes that they have without. Rows from
            :func:`count_rows` must be of this target and this ignore_index.
        process_group: shards the vocabulary over its processes (tensor parallelism): weight and bias have this
            process's classes, in the order of ranks; x, target, ce_weight and the options are those of all classes, and
            the same everywhere. So are the loss, to the bit, and the gradient of x, which is that of all classes. A
            weight that is a DTensor, ``Shard(0)`` on a mesh of one dimension, needs none; its gradient is a DTensor.
            Of other tensors the sizes are gathered, and waited for, in the first call with each. ``"auto"`` and
            ``"fast"`` keep the shard's logits then, within an eighth of a GPU's memory; the other levels recompute
            them in chunks of rows, ``"low"`` in the least memory within 20 % of the fastest such plan; and a number is
            never less than 128 rows of the shard.

    Returns:
        The loss in float32 (float64 for float64), or a :class:`CrossEntropyOutput` if a ``return_*`` option is set.
        Only the loss is differentiable, with respect to x, weight and bias.

    Raises:
        ValueError: an option outside its range, shapes, dtypes or devices that do not fit together, fewer bytes of
            ``memory`` than the call can do with, or rows of :func:`count_rows` that leave out a row that counts (on a
            GPU the loss is NaN, and the error comes later, as that of a target out of range).
        IndexError: a target out of range, as in :func:`cross_entropy`, or a row, which a GPU reports likewise.
    """
    op = _OP
    check_tensors(op, x=x, weight=weight, target=target)
    check_integer(op, ignore_index=ignore_index)
    if not (accum_dtype is None or isinstance(accum_dtype, torch.dtype)):
        raise TypeError(f"{op}: accum_dtype is {accum_dtype!r}, expected a torch.dtype or None")
    require(x.dim() >= 1, op, ": x has no dimensions, expected (..., hidden_size)")
    if target.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: target has shape {shape_text(target)}, expected that of x {shape_text(x)} but for the last"
        )
    if normalizer is not None and reduction == "none":
        raise ValueError(f"{op}: normalizer is {normalizer}, expected None: reduction 'none' has no denominator")
    if bias is not None:
        check_tensors(op, bias=bias)
    shard = None
    if process_group is not None or is_dtensor(weight):
        shard, x, weight, target, bias, ce_weight = local_tensors(process_group, x, weight, target, bias, ce_weight)
        memory = "fast" if memory == "auto" else memory
    flat = x if x.dim() == 2 else x.reshape(target.numel(), x.shape[-1])
    targets = class_targets(target if target.dim() == 1 else target.reshape(-1))
    listed = None
    if rows is not None and weight.dim() == 2:
        vocab_size = weight.shape[0] if shard is None else shard.vocab_size
        listed = listed_rows(op, rows, targets, vocab_size, ignore_index)
        if listed is not None:
            flat, targets = gather(flat, listed[0]), listed[1]
    compute_dtype = autocast_dtype(x.device.type, x, weight)
    dtype = torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype
    if ce_weight is not None:
        ce_weight = class_weight(op, ce_weight, "ce_weight", dtype)
    grad = torch.is_grad_enabled()
    need_dweight = grad and weight.requires_grad
    need_dx, need_dbias = grad and x.requires_grad, grad and bias is not None and bias.requires_grad
    way = Plan(_ACCUMULATED if need_dx or need_dweight or need_dbias else 0, 1, 1)
    if weight.dim() == 2 and (shard is not None or weight.shape[0] > 0):  # else the op says what is wrong
        call = Call(
            rows=flat.shape[0],
            hidden=weight.shape[1],
            vocab=weight.shape[0] if shard is None else max(1, *shard.sizes),
            compute=dtype,
            x=x.dtype,
            weight=weight.dtype,
            device=device_of(x.device),
            bias=None if bias is None else bias.dtype,
            class_weight=None if ce_weight is None else ce_weight.dtype,
            sum=weight.dtype if weight.dtype == accum_dtype else None,
            dx=need_dx,
            dweight=need_dweight,
            dbias=need_dbias,
            per_row=reduction == "none",
            label_smoothing=holds(label_smoothing != 0),
            softcap=softcap is not None,
            token_scaling=bool(use_token_scaling),
            z_loss=holds(lse_square_scale != 0) or bool(return_z_loss),
            token_accuracy=bool(return_token_accuracy),
            predicted_tokens=bool(return_predicted_tokens),
            # Nothing is overlaid in graphs, where nobody writes what an op returned.
            overlays=shard is None and not torch.compiler.is_compiling(),
            all_rows=0 if listed is None else target.numel(),
            copies=_copies(x, flat, weight, bias, ce_weight),
        )
        way = plan(call, memory) if shard is None else way._replace(rows=shard_rows(call, memory))
    arguments = LossArguments(
        x=flat,
        weight=weight,
        target=targets,
        bias=bias,
        ce_weight=ce_weight,
        normalizer=None if normalizer is None else _normalizer(normalizer, accumulator(dtype), x.device),
        ignore_index=ignore_index,
        reduction=code_of(op, "reduction", reduction, REDUCTIONS),
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        softcap=softcap,
        use_token_scaling=use_token_scaling,
        return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        accum_dtype=accum_dtype,
        compute_dtype=compute_dtype,
        gradients=way.gradients,
        chunk_rows=way.rows,
        chunk_classes=way.classes,
        need_dx=need_dx,
        need_dweight=need_dweight,
        need_dbias=need_dbias,
    )
    outputs = call_op(*arguments) if shard is None else sharded_loss(shard, arguments)
    if listed is not None:
        wanted = reduction == "none", return_z_loss, return_token_accuracy, return_predicted_tokens
        outputs = for_all_rows(outputs, listed[0], target.numel(), *wanted)
    return results(outputs, target, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens)


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """:func:`liger_ext.functional.fused_linear_cross_entropy` with its options.

    ``forward(lin_weight, _input, target, bias=None)``, in this order. Class weights are a buffer, so that they follow
    ``.to()``, and not part of the state dict.
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


def _copies(x: Tensor, flat: Tensor, weight: Tensor, *vectors: Tensor | None) -> int:
    """Bytes of the arguments in memory where a kernel can read them, which may not be their own."""
    if torch.compiler.is_compiling():
        return 0
    copied = [t for t in (flat, weight) if t.dim() == 2 and (t.stride(1) != 1 or t.stride(0) < t.shape[1])]
    if x.dim() > 2 and not x.is_contiguous():
        copied.append(flat)  # reshape() may have made it
    copied += [t for t in vectors if t is not None]
    return sum(t.numel() * t.element_size() for t in copied)


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
    """:func:`liger_ext.functional.fused_linear_cross_entropy`; ``chunk_mem_const`` has no effect."""
    return fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        memory=memory, normalizer=normalizer, rows=rows, process_group=process_group,
    )  # fmt: skip


def _normalizer(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Neither way waits for the device.
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{_OP}: normalizer has shape {shape_text(value)}, expected one number")
        if value.is_meta and device.type != "meta":
            raise ValueError(f"{_OP}: normalizer is on meta and has no value, expected it on {device}, as x is")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_OP}: normalizer requires a gradient, but the loss takes it as a constant: detach() it")
        return value.detach().reshape(1).to(device=device, dtype=dtype, non_blocking=True)
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{_OP}: normalizer must be a number or a Tensor, not {type(value).__name__}")
    if abs(value) > torch.finfo(dtype).max:
        raise ValueError(f"{_OP}: normalizer is {value}, expected a number that {dtype} can hold")
    return torch.full((1,), value if abs(value) < 1 << 62 else float(value), dtype=dtype, device=device)
