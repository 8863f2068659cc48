"""The language-model head and its loss in one op, so that the logits never exist as a whole.

The C++ op cannot ask a tensor whether it requires a gradient, so the public function says which gradients are wanted,
how many rows and classes of logits may exist at a time, and how the gradients come about (``_C.Gradients``):

* deferred: all logits exist at once. The forward saves their gradient (without loss scale and denominator), and the
  backward runs the two matmuls.
* overlaid: the same, where that gradient waits in the memory that becomes dweight.
* accumulated: several chunks. The forward adds up dx and dweight, also without scale; the backward scales them.
* recomputed: several chunks and reduction "none", where each row's gradient has a factor of its own: the backward runs
  the chunks again.

Where a second backward may follow, and where others see what is saved (hooks, graphs of torch.compile), saved tensors
are read, never written. Else the backward makes dweight in the memory that the forward has prepared for it.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor, nn
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)
from torch.utils.flop_counter import register_flop_formula

from liger_ext import _C
from liger_ext.ops._checks import (
    REDUCTIONS,
    accumulator,
    check_integer,
    check_tensors,
    code_of,
    require,
    shape_text,
)
from liger_ext.ops._chunks import Call, Plan, gpu_memory, padded_vocab, plan, shard_rows
from liger_ext.ops._modules import check_loss_options
from liger_ext.ops._register import register, register_without_derivative
from liger_ext.ops._sharded_vocabulary import is_dtensor, local_tensors, sharded_loss
from liger_ext.ops.count_rows import CountedRows, for_all_rows, gather, listed_rows
from liger_ext.ops.cross_entropy import CrossEntropyOutput, class_weight, fake_results, results

__all__ = ["LigerFusedLinearCrossEntropyLoss", "fused_linear_cross_entropy", "liger_fused_linear_cross_entropy"]

_forward_op = torch.ops.liger_ext.fused_linear_cross_entropy.default
_backward_op = torch.ops.liger_ext.fused_linear_cross_entropy_backward.default
_backward_in_place = torch.ops.liger_ext.fused_linear_cross_entropy_backward_.default

_OP = "fused_linear_cross_entropy"
_DEFERRED, _ACCUMULATED, _RECOMPUTED, _OVERLAID = map(
    int, (_C.Gradients.deferred, _C.Gradients.accumulated, _C.Gradients.recomputed, _C.Gradients.overlaid)
)
_COMPUTE_DTYPE = [argument.name for argument in _forward_op._schema.arguments].index("compute_dtype")


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
        target: the shape of x without its last dimension, int64, each in ``[0, vocab_size)`` or ``ignore_index``.
        bias: ``(vocab_size,)`` or None.
        ce_weight: ``(vocab_size,)``, a weight for each class, or None.
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, return_token_accuracy,
            return_predicted_tokens: as in :func:`cross_entropy`.
        accum_dtype: in which the weight's gradient is summed over chunks: float32 if None (float64 for float64), or the
            dtype of the matmuls, which takes half the memory and rounds after each chunk.
        use_token_scaling: multiply each token's loss by the probability of its target, as a constant.
        memory: what a forward and its backward may take beside the arguments, gradients included. ``"fast"``: the
            gradient of all logits, up to 1/32 of a GPU's memory. ``"auto"``: that gradient lies where the weight's will
            be, for 1 to 3 % of the time. ``"low"``, ``"min"``: part of it, down to what fits there, is stored, and the
            rest made again, for up to 12 and 30 %. A number of bytes is kept to by the fastest way that fits (under
            ``torch.compile``, where chunks of 128 rows of logits fit). It changes results by rounding only.
        normalizer: replaces the denominators of ``"mean"``, and with ``"sum"`` divides the sum: the number of tokens in
            all accumulated batches, say (``num_items_in_batch`` in Hugging Face). A number or a tensor of one element,
            which is taken as a constant. Not with ``"none"``. If it is 0, loss and gradients are 0, while a division by
            0 would give inf or NaN.
        rows: the rows that count, on which alone the matmuls run, the others being ignored: from :func:`count_rows`, or
            ``(n,)``, int64, each at most once. Results have the shapes that they have without.
        process_group: shards the vocabulary over its processes (tensor parallelism): weight and bias have this
            process's classes, in the order of ranks; x, target, ce_weight and the options are those of all classes, and
            the same everywhere. So are the loss, to the bit, and the gradient of x, which is that of all classes. A
            weight that is a DTensor, ``Shard(0)`` on a mesh of one dimension, needs none; its gradient is a DTensor.
            Of other tensors the sizes are gathered, and waited for, in the first call with each. ``"auto"`` is
            ``"fast"`` then, and a number never less than 128 rows of the shard.

    Returns:
        The loss in float32 (float64 for float64), or a :class:`CrossEntropyOutput` if a ``return_*`` option is set.
        Only the loss is differentiable, with respect to x, weight and bias.

    Raises:
        ValueError: an option outside its range, shapes, dtypes or devices that do not fit together, or fewer bytes of
            ``memory`` than the call can do with.
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
    targets = target if target.dim() == 1 else target.reshape(-1)
    listed = None
    if rows is not None and weight.dim() == 2:
        vocab_size = weight.shape[0] if shard is None else shard.vocab_size
        listed = listed_rows(op, rows, targets, vocab_size, ignore_index)
        if listed is not None:
            flat, targets = gather(flat, listed[0]), listed[1]
    compute_dtype = _autocast_dtype(x.device.type, x, weight)
    dtype = torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype
    if ce_weight is not None:
        ce_weight = class_weight(op, ce_weight, "ce_weight", dtype)
    grad = torch.is_grad_enabled()
    need_dweight = grad and weight.requires_grad
    need_dx, need_dbias = grad and x.requires_grad, grad and bias is not None and bias.requires_grad
    needs = need_dx, need_dweight, need_dbias
    of = None
    if weight.dim() == 2 and (shard is not None or weight.shape[0] > 0):  # else the op says what is wrong
        most_classes = weight.shape[0] if shard is None else max(1, *shard.sizes)
        # Nothing is overlaid in graphs, where nobody writes what an op returned.
        overlays = shard is None and weight.dtype == dtype and not torch.compiler.is_compiling()
        sums = weight.dtype if weight.dtype == accum_dtype else None
        of = Call(
            flat.shape[0], weight.shape[1], most_classes, dtype, gpu_memory(x.device), *needs, reduction == "none",
            overlays, sums,
        )  # fmt: skip
    arguments = (
        flat, weight, targets, bias, ce_weight,
        None if normalizer is None else _normalizer(normalizer, accumulator(dtype), x.device),
        ignore_index, code_of(op, "reduction", reduction, REDUCTIONS), label_smoothing, lse_square_scale, softcap,
        use_token_scaling, return_z_loss, return_token_accuracy, return_predicted_tokens, accum_dtype, compute_dtype,
    )  # fmt: skip
    if shard is None:
        way = Plan(_ACCUMULATED if any(needs) else 0, 1, 1) if of is None else plan(of, memory)
        outputs = _call(*arguments, *way, *needs)
    else:
        outputs = sharded_loss(shard, needs, 1 if of is None else shard_rows(of, memory), *arguments)
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

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return fused_linear_cross_entropy(
            _input, lin_weight, target, bias, self.ce_weight, self.ignore_index, self.lse_square_scale,
            self.label_smoothing, self.reduction, self.softcap, self.return_z_loss, self.accum_dtype,
            self.use_token_scaling, self.return_token_accuracy, self.return_predicted_tokens,
        )  # fmt: skip


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, *options, **named_options
) -> Tensor | CrossEntropyOutput:
    """:func:`liger_ext.functional.fused_linear_cross_entropy`, whose options have upstream's names and order."""
    return fused_linear_cross_entropy(input, weight, target, *options, **named_options)


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


def _autocast_dtype(device_type: str, x: Tensor, weight: Tensor) -> torch.dtype | None:
    # As torch's own matmuls: float64 is left alone. Of other devices (meta) torch knows no autocast.
    if device_type not in ("cpu", "cuda"):
        return None
    if x.dtype == torch.float64 or weight.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(device_type, *args):
    if args[_COMPUTE_DTYPE] is not None:
        return args
    return *args[:_COMPUTE_DTYPE], _autocast_dtype(device_type, args[0], args[1]), *args[_COMPUTE_DTYPE + 1 :]


def _dtypes(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Of the matmuls and of the losses."""
    compute = torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype
    return compute, accumulator(compute)


def _fake(
    x, weight, target, bias, ce_weight, normalizer, ignore_index, reduction, label_smoothing, lse_square_scale, softcap,
    use_token_scaling, return_z_loss, return_token_accuracy, return_predicted_tokens, accum_dtype, compute_dtype,
    gradients, chunk_rows, chunk_classes, need_dx, need_dweight, need_dbias,
):  # fmt: skip
    compute, acc = _dtypes(x, weight, compute_dtype)
    rows, hidden = x.shape
    vocab = weight.shape[0]
    need_dbias = need_dbias and bias is not None
    accumulated, overlaid, kept = gradients == _ACCUMULATED, gradients == _OVERLAID, 0
    summed = weight.dtype if weight.dtype == accum_dtype else acc
    saved, dweight = x.new_empty(0, dtype=summed), x.new_empty(0, dtype=summed)
    if gradients == _DEFERRED:
        saved = x.new_empty((rows, padded_vocab(vocab)), dtype=compute)
    elif overlaid:  # csrc/launch/chunks.h: overlaid_rest
        inside = vocab * hidden // rows // 64 * 64 if rows >= hidden else 0
        saved = x.new_empty(rows * padded_vocab(min(chunk_classes, vocab) - inside), dtype=compute)
        dweight = weight.new_empty(vocab * hidden)
        kept = rows * (3 if use_token_scaling else 2) if chunk_classes < vocab else 0
    elif accumulated and need_dweight:  # csrc/checks/head.h: SumSizes
        ratio = summed.itemsize // weight.dtype.itemsize
        rest = 0 if summed == weight.dtype else vocab - vocab // ratio // 64 * 64
        saved = x.new_empty(rest * hidden, dtype=summed)
        dweight = x.new_empty((vocab * hidden + ratio - 1) // ratio, dtype=summed)
    return (
        *fake_results(x, rows, acc, reduction, return_z_loss, return_token_accuracy, return_predicted_tokens),
        x.new_empty(_C.cross_entropy_counts + kept, dtype=acc),
        saved,
        x.new_empty((rows, hidden) if accumulated and need_dx else 0, dtype=compute),
        dweight,
        x.new_empty(vocab if accumulated and need_dbias else 0, dtype=acc),
    )


def _fake_backward(dloss, x, weight, target, bias, *others):
    *_, compute_dtype, _, _, _, need_dx, need_dweight, need_dbias = others
    _, acc = _dtypes(x, weight, compute_dtype)
    need_dbias = need_dbias and bias is not None
    return (
        x.new_empty(x.shape if need_dx else 0),
        weight.new_empty(weight.shape if need_dweight else 0),
        x.new_empty(weight.shape[0] if need_dbias else 0, dtype=acc if bias is None else bias.dtype),
    )


def _fake_backward_in_place(dweight, saved, dloss, x, weight, target, bias, *others):
    dx, _, dbias = _fake_backward(dloss, x, weight, target, bias, *others)
    return dx, dbias


def _setup_context(ctx, inputs, output):
    x, weight, target, bias, ce_weight, _, *options = inputs
    *_, need_dx, need_dweight, need_dbias = options
    for index, name, need in ((0, "x", need_dx), (1, "weight", need_dweight), (3, "bias", need_dbias)):
        if ctx.needs_input_grad[index] and not need:
            raise RuntimeError(
                f"liger_ext::fused_linear_cross_entropy was called with need_d{name}=False, but {name} requires a "
                f"gradient. Pass need_d{name}=True, or {name}.detach()"
            )
    if ctx.needs_input_grad[4]:
        raise RuntimeError(
            "liger_ext::fused_linear_cross_entropy has no gradient for ce_weight: pass ce_weight.detach()"
        )
    _, *others = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*others)
    ctx.save_for_backward(x, weight, target, bias, ce_weight, *others[3:])
    dweight = others[6]
    # Nobody else sees it: neither who called the op itself, nor hooks, nor a graph that is being made.
    unseen = getattr(ctx, "unseen", False) and type(dweight) is Tensor and _saved_tensors_hooks_is_enabled()
    ctx.own_dweight = unseen and dweight.numel() > 0 and _top_saved_tensors_default_hooks(False) is None
    ctx.options = options[:6] + options[9:]  # without return_*


def _backward(ctx, saved, dloss, *_):
    gradients = [None] * 23
    if dloss is not None:
        target, (ignore_index, reduction) = saved[2], ctx.options[:2]
        if reduction == REDUCTIONS["none"]:  # ignored rows count for nothing, not even a NaN
            dloss = torch.where(target == ignore_index, 0.0, dloss)
        # The same flags as in the forward, since what it saved follows from them.
        batched = torch._C._functorch.is_legacy_batchedtensor(dloss)  # torch.autograd.grad(is_grads_batched=True)
        if ctx.own_dweight and not batched and not _get_current_graph_task_keep_graph():
            *inputs, rest, dx, memory, dbias = saved
            dx, dbias = _backward_in_place(memory, rest, dloss, *inputs, dx, dbias, *ctx.options)
            torch.autograd.graph.increment_version((memory, rest))
            weight = saved[1]
            dweight = memory.view(weight.dtype)[: weight.numel()].view(weight.shape)
        else:
            dx, dweight, dbias = _backward_op(dloss, *saved, *ctx.options)
        for index, gradient in ((0, dx), (1, dweight), (3, dbias)):
            if ctx.needs_input_grad[index]:
                gradients[index] = gradient
    return tuple(gradients)


_call = register(
    "fused_linear_cross_entropy",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)


register_without_derivative("fused_linear_cross_entropy_backward_", _fake_backward_in_place)


# What torch.utils.flop_counter counts: the matmuls that run in forward and backward. Tensors are their shapes.
def _matmul_flops(x_shape, weight_shape, matmuls: int) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0] * matmuls


@register_flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy)
def _forward_flops(x_shape, weight_shape, *args, **_) -> int:
    gradients, _, chunk_classes, need_dx, need_dweight, _ = args[-6:]
    again = gradients == _ACCUMULATED and chunk_classes < weight_shape[0]  # the logits of pieces, for their gradient
    return _matmul_flops(x_shape, weight_shape, 1 + again + (gradients == _ACCUMULATED) * (need_dx + need_dweight))


@register_flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward)
def _backward_flops(dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    gradients, _, chunk_classes, need_dx, need_dweight, _ = args[-6:]
    logits = (gradients == _RECOMPUTED) * (1 + (chunk_classes < weight_shape[0]))
    matmuls = (gradients in (_DEFERRED, _RECOMPUTED, _OVERLAID)) * (need_dx + need_dweight)
    again = (weight_shape[0] - chunk_classes if gradients == _OVERLAID else 0), weight_shape[1]  # classes not stored
    return _matmul_flops(x_shape, weight_shape, logits + matmuls) + _matmul_flops(
        x_shape, (max(again[0], 0), again[1]), 1
    )


@register_flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward_)
def _backward_in_place_flops(dweight_shape, saved_shape, dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    return _backward_flops(dloss_shape, x_shape, weight_shape, *args)
