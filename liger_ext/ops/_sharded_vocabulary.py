"""The fused loss of a head whose classes are sharded over processes: each process has a range of the vocabulary.

Every process computes the logits of its shard, and statistics of each row: the maximum, the sum of exponentials, the
target's logit, and sums for the entropy. The processes gather these statistics, a few numbers for each row, and merge
them by the same kernel, so that their losses are bitwise equal. The merged statistics suffice for the gradients of a
shard's weight and bias. The gradient of x is the sum of the shards' gradients in the accumulator's dtype (float32), so
that it is rounded once, as without shards.

There are two collectives, whatever the number of chunks: a gather in the forward, and a sum in the backward if x
requires a gradient. This file calls them between C++ ops (``csrc/ops/sharded_vocabulary.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.utils.weak import WeakTensorKeyDictionary

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, accumulator, require, shape_text
from liger_ext.ops._compile import disabled_in_graphs, flop_formula
from liger_ext.ops._fused_linear_op import (
    ENTROPY,
    TENSORS,
    LossArguments,
    combine_gradients,
    is_private,
    recomputed_rows,
    scale_gradient,
)
from liger_ext.ops._loss_plan import padded_vocab
from liger_ext.ops._register import register_without_derivative
from liger_ext.ops.cross_entropy import fake_results

_OP = "fused_linear_cross_entropy"
_DTYPES = LossArguments._fields.index("accum_dtype")  # the index behind the last option of the losses
_MAXIMUM, _BEST = int(_C.VocabularyStatistics.maximum), int(_C.VocabularyStatistics.best)

_statistics_op = torch.ops.liger_ext.vocabulary_shard_statistics.default
_losses_op = torch.ops.liger_ext.vocabulary_shard_losses_.default
_backward_op = torch.ops.liger_ext.vocabulary_shard_backward.default
_backward_in_place = torch.ops.liger_ext.vocabulary_shard_backward_.default

_gathered_sizes = WeakTensorKeyDictionary()  # weight -> (process group, sizes of its shards)


@dataclass(frozen=True)
class Shard:
    """This process's shard of the vocabulary. ``sizes``: the number of classes of each process."""

    group: torch.distributed.ProcessGroup
    rank: int
    sizes: tuple[int, ...]

    @property
    def first_class(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def vocab_size(self) -> int:
        return sum(self.sizes)


def is_dtensor(t: Tensor) -> bool:
    return hasattr(t, "placements")


@disabled_in_graphs  # breaks a graph, as the loss does
def local_tensors(
    op: str,
    group: torch.distributed.ProcessGroup | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    **others: Tensor | None,
) -> tuple[Shard | Tensor | None, ...]:
    """Returns the shard, and this process's tensors in the order of the arguments, with local tensors in place of
    DTensors. ``op``: the public function's name, for errors. The first call with a plain weight gathers the shards'
    sizes, which waits for the device.

    Raises:
        TypeError, ValueError: a process group without this process, or a DTensor with an unsupported placement.
    """
    tensors = {"x": x, "weight": weight, "target": target, **others}
    if is_dtensor(weight):
        require(group is None, op, ": process_group is given, expected None: a DTensor's mesh has one")
        mesh = weight.device_mesh
        group, vocab, shards = mesh.get_group(), weight.shape[0], mesh.size()
        tensors = {name: _local(op, name, t, mesh) for name, t in tensors.items()}
        most = -(-vocab // shards)
        sizes = tuple(min(most, max(vocab - most * shard, 0)) for shard in range(shards))
    else:
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"{op}: process_group must be a ProcessGroup, not {type(group).__name__}")
        require(weight.dim() == 2, op, ": weight has shape ", shape_text(weight), ", expected (classes, hidden_size)")
        sizes = None
    rank = torch.distributed.get_rank(group)
    if sizes is None:
        sizes = _sizes(weight, group)
    classes = tensors["weight"].shape[0]
    require(sizes[rank] == classes, op, ": weight's shard has ", classes, " classes, expected ", sizes)
    return Shard(group, rank, sizes), *tensors.values()


def _local(op: str, name: str, t: Tensor | None, mesh: torch.distributed.DeviceMesh) -> Tensor | None:
    if t is None or not is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    expected = Sharded(0) if name in ("weight", "bias") else Replicate()
    if t.device_mesh != mesh or mesh.ndim != 1 or tuple(t.placements) != (expected,):
        raise ValueError(
            f"{op}: {name} has placements {tuple(t.placements)} on {t.device_mesh}, expected {expected} on a mesh of "
            "one dimension, that of weight"
        )
    return t.to_local()


def _sizes(weight: Tensor, group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    # Cached by the weight: processes that run the same program all find it, or all gather.
    known = _gathered_sizes.get(weight)
    if known is None or known[0] is not group:
        (sizes,) = _gathered(group, torch.tensor(weight.shape[0], device=weight.device))
        known = _gathered_sizes[weight] = group, tuple(sizes.tolist())
    return known[1]


def _gathered(group: torch.distributed.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Gathers tensors from all processes by one collective. Returns each as ``(shards, ...)``. Tensors with the widest
    elements must come first, so that all are aligned."""
    byte_views = [t.detach().reshape(-1).view(torch.uint8) for t in tensors]
    mine = torch.cat(byte_views)
    shards = torch.distributed.get_world_size(group)
    every = mine.new_empty(shards, mine.numel())
    torch.distributed.all_gather([*every], mine, group=group)
    parts = every.split([b.numel() for b in byte_views], dim=1)
    return [p.reshape(-1).view(t.dtype).view(shards, *t.shape) for p, t in zip(parts, tensors, strict=True)]


class _ShardedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, *args):
        args = LossArguments(*args)
        x, weight, target, bias = args[:4]
        place = shard.first_class, shard.vocab_size
        head, head_bias = weight, bias
        if weight.shape[0] == 0:  # an empty shard runs with one class of zeros, so that targets are checked here, too
            head, head_bias, place = weight.new_zeros(1, weight.shape[1]), None, (0, shard.vocab_size)
        wanted = args.need_dx or args.need_dweight or args.need_dbias
        ctx.stores_logits = (
            wanted and x.shape[0] <= args.chunk_rows and weight.shape[0] > 0 and not args.wide_logits(x, weight)
        )
        logits, statistics, best = _statistics_op(
            x, head, target, head_bias, args.ce_weight, args.temperature, args.ignore_index, args.label_smoothing,
            args.softcap, args.logit_scale, args.return_entropy, args.return_mean_logits, args.return_log_sum_sq,
            args.accum_dtype, args.compute_dtype, args.logits_dtype, *place, args.chunk_rows,
            args.return_token_accuracy or args.return_predicted_tokens, ctx.stores_logits,
        )  # fmt: skip
        if weight.shape[0] == 0:
            statistics.zero_()
            for largest in (statistics[:, _MAXIMUM], statistics[:, _BEST]):
                largest.fill_(-torch.inf)
            best.fill_(shard.vocab_size)
        sums, best, statistics = _gathered(shard.group, target.sum(), best, statistics)
        different = (sums != sums[0]).any()
        if different.device.type == "cpu" and different:
            raise ValueError(f"{_OP}: target is not the same in all processes, between which the vocabulary is sharded")
        *results, counts, row_state = _losses_op(
            logits, statistics.flatten(0, 1), best.flatten(0, 1), x, head, target, args.ce_weight, args.normalizer,
            args.temperature, *args[TENSORS:_DTYPES], args.compute_dtype, *place,
        )  # fmt: skip
        loss, entropy = results[0], results[ENTROPY] if args.return_entropy else None
        for t in (loss,) if entropy is None else (loss, entropy):
            t.masked_fill_(different, torch.nan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in results[1:] if t is not entropy))
        both = (None, None) if entropy is None else (loss, entropy)
        tensors = x, weight.detach(), target, bias, args.ce_weight, args.temperature
        ctx.save_for_backward(*tensors, *both, counts, row_state, logits)
        ctx.shard, ctx.place, ctx.overwrites_logits = shard, place, is_private(logits)
        ctx.options = LossArguments(*(None,) * TENSORS, *args[TENSORS:])  # without the tensors, which ctx saves
        return tuple(results)

    @staticmethod
    def backward(ctx, dloss, *others):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_OP} of a sharded vocabulary has no second derivative (create_graph=True)")
        gradients, dentropy = [None] * len(ctx.needs_input_grad), others[ENTROPY - 1]
        if dloss is None and dentropy is None:
            return tuple(gradients)
        args = ctx.options
        x, weight, target, bias, ce_weight, temperature, loss, entropy, *forward_results, logits = ctx.saved_tensors
        if args.reduction == REDUCTIONS["none"]:  # a NaN in the gradient of an ignored row must not reach the sums
            ignored = target == args.ignore_index
            dloss, dentropy = (d if d is None else torch.where(ignored, 0.0, d) for d in (dloss, dentropy))
        mix, stored, rows = None, ctx.stores_logits, args.chunk_rows
        if dentropy is not None:
            dloss, mix = combine_gradients(dloss, dentropy, loss, entropy)
            stored = (
                stored and ctx.overwrites_logits and args.softcap is None and not _get_current_graph_task_keep_graph()
            )
            if not stored:
                # No gradient is stored, it may not be overwritten, or it has no probabilities: recompute the logits.
                logits, rows = logits.new_empty(0), min(rows, recomputed_rows(weight, args.wide_logits(x, weight)))
        dloss = scale_gradient(dloss, temperature, args.logit_scale)
        options = (
            args.ignore_index,
            args.reduction,
            args.label_smoothing,
            args.lse_square_scale,
            args.softcap,
            args.logit_scale,
        )
        options += args.use_token_scaling, args.accum_dtype, args.compute_dtype, args.logits_dtype, *ctx.place, rows

        def compute(mix: Tensor | None, *needs: bool) -> tuple[Tensor, ...]:
            if weight.shape[0] > 0:
                inputs = x, weight, target, bias, ce_weight, temperature, mix, *forward_results, logits
                op = _backward_in_place if stored and mix is not None else _backward_op
                return op(dloss, *inputs, *options, *needs)
            dx = x.new_zeros(
                x.shape, dtype=accumulator(args.compute_dtype or torch.promote_types(x.dtype, weight.dtype))
            )
            return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)

        # With a stored gradient, dx is computed first and summed over processes. dweight and dbias are computed
        # meanwhile, which hides the time of the sum. Recomputed logits serve all gradients at once.
        need_dx, *need_parameters = args.need_dx, args.need_dweight, args.need_dbias
        apart = stored and need_dx and any(need_parameters)
        dx, dweight, dbias = compute(mix, need_dx, False, False) if apart else compute(mix, need_dx, *need_parameters)
        if need_dx:
            summed = torch.distributed.all_reduce(dx, group=ctx.shard.group, async_op=True)
        if apart:
            _, dweight, dbias = compute(None, False, *need_parameters)  # the stored gradient already contains mix
        if need_dx:
            summed.wait()
            gradients[1] = dx.to(x.dtype)
        if args.need_dweight:
            gradients[2] = dweight
        if args.need_dbias:
            gradients[4] = dbias
        return tuple(gradients)


@disabled_in_graphs
def sharded_loss(shard: Shard, args: LossArguments) -> tuple[Tensor, ...]:
    """Returns the op's first seven results, as ``fused_loss`` does. ``args``: the op's arguments; ``chunk_rows``, the
    number of rows of logits that may exist at a time, is the only part of the plan with an effect."""
    return _ShardedLoss.apply(shard, *args)


def _dtypes(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    compute = torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype
    return compute, accumulator(compute)


def _fake_statistics(x, weight, *others):
    *moments, _, compute_dtype, _, _, _, _, predictions, keep_logits = others[-11:]
    compute, acc = _dtypes(x, weight, compute_dtype)
    rows, classes = x.shape[0], weight.shape[0]
    strided = x.new_empty_strided((rows, classes), (padded_vocab(classes), 1), dtype=compute)
    return (
        strided if keep_logits else x.new_empty(0, dtype=compute),
        x.new_empty((1, _C.statistics_slots(any(moments)), rows), dtype=acc),
        x.new_empty((int(predictions), rows), dtype=torch.int64),
    )


def _fake_losses(logits, statistics, best_class, x, weight, target, *others):
    reduction, *_, token_scaling, z_loss, accuracy, predicted, entropy, mean, squares, compute_dtype, _, _ = others[4:]
    _, acc = _dtypes(x, weight, compute_dtype)
    rows = x.shape[0]
    return (
        *fake_results(x, rows, acc, reduction, z_loss, accuracy, predicted),
        *(x.new_empty(rows if moment else 0, dtype=acc) for moment in (entropy, mean, squares)),
        x.new_empty(_C.cross_entropy_counts, dtype=acc),
        x.new_empty(_C.gradient_state_size(rows, token_scaling), dtype=acc),
    )


def _fake_backward(dloss, x, weight, target, bias, *others):
    compute_dtype, *_, need_dx, need_dweight, need_dbias = others[-8:]
    _, acc = _dtypes(x, weight, compute_dtype)
    need_dbias = need_dbias and bias is not None
    return (
        x.new_empty(x.shape if need_dx else 0, dtype=acc),
        weight.new_empty(weight.shape if need_dweight else 0),
        x.new_empty(weight.shape[0] if need_dbias else 0, dtype=acc if bias is None else bias.dtype),
    )


register_without_derivative("vocabulary_shard_statistics", _fake_statistics)
register_without_derivative("vocabulary_shard_losses_", _fake_losses)
register_without_derivative("vocabulary_shard_backward", _fake_backward)
register_without_derivative("vocabulary_shard_backward_", _fake_backward)


# Formulas for torch.utils.flop_counter, which passes shapes in place of tensors.
@flop_formula(torch.ops.liger_ext.vocabulary_shard_statistics)
def _statistics_flops(x_shape, weight_shape, *_, **__) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@flop_formula(torch.ops.liger_ext.vocabulary_shard_backward)
@flop_formula(torch.ops.liger_ext.vocabulary_shard_backward_)
def _backward_flops(dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    *_, need_dx, need_dweight, _ = args
    again = len(args[7]) < 2  # the forward stored no gradient of the logits
    return _statistics_flops(x_shape, weight_shape) * (again + need_dx + need_dweight)
