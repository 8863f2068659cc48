"""The fused loss of a head whose classes are sharded over processes, each of which has a part of the vocabulary.

Every process makes the logits of its shard and, of each row, their statistics: maximum, sum of exponentials, the
target's logit. They are gathered, a few numbers of each row, and merged, by the same kernel everywhere, so that losses
are the same bits. The gradients of a shard need nothing more; that of x is the sum of what the shards give, in the
accumulator's dtype (float32), so that it is rounded once, as it is without shards.

Two collectives, however the rows are cut into chunks: one gather in the forward, one sum in the backward if x requires
a gradient. They are called here, between ops of C++ (``csrc/ops/sharded_vocabulary.cpp``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, accumulator, require, shape_text
from liger_ext.ops._compile import flop_formula, outside_of_graphs
from liger_ext.ops._fused_linear_op import LossArguments
from liger_ext.ops._loss_plan import padded_vocab
from liger_ext.ops._register import register_without_derivative
from liger_ext.ops.cross_entropy import fake_results

_OP = "fused_linear_cross_entropy"
_SLOTS = len(_C.VocabularyStatistics.__members__)
_MAXIMUM, _BEST = int(_C.VocabularyStatistics.maximum), int(_C.VocabularyStatistics.best)

_statistics_op = torch.ops.liger_ext.vocabulary_shard_statistics.default
_losses_op = torch.ops.liger_ext.vocabulary_shard_losses_.default
_backward_op = torch.ops.liger_ext.vocabulary_shard_backward.default

_gathered_sizes = WeakTensorKeyDictionary()  # weight -> (process group, sizes of its shards)


@dataclass(frozen=True)
class Shard:
    """This process's part of the vocabulary. ``sizes``: how many classes each process has."""

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


@outside_of_graphs  # breaks a graph, as the loss does
def local_tensors(
    group: torch.distributed.ProcessGroup | None,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ce_weight: Tensor | None,
) -> tuple[Shard, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The shard, and this process's tensors, without DTensors. The sizes of plain shards are gathered when a weight
    comes for the first time, which waits for the device.

    Raises:
        TypeError, ValueError: no process group that this process is in; a DTensor of a placement that is not taken.
    """
    if is_dtensor(weight):
        require(group is None, _OP, ": process_group is given, expected None: a DTensor's mesh has one")
        mesh = weight.device_mesh
        given = {"x": x, "weight": weight, "target": target, "bias": bias, "ce_weight": ce_weight}
        x, weight, target, bias, ce_weight = (_local(name, t, mesh) for name, t in given.items())
        group, vocab, shards = mesh.get_group(), given["weight"].shape[0], mesh.size()
        most = -(-vocab // shards)
        sizes = tuple(min(most, max(vocab - most * shard, 0)) for shard in range(shards))
    else:
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise TypeError(f"{_OP}: process_group must be a ProcessGroup, not {type(group).__name__}")
        require(weight.dim() == 2, _OP, ": weight has shape ", shape_text(weight), ", expected (classes, hidden_size)")
        sizes = None
    rank = torch.distributed.get_rank(group)
    if sizes is None:
        sizes = _sizes(weight, group)
    require(sizes[rank] == weight.shape[0], _OP, ": weight's shard has ", weight.shape[0], " classes, expected ", sizes)
    return Shard(group, rank, sizes), x, weight, target, bias, ce_weight


def _local(name: str, t: Tensor | None, mesh: torch.distributed.DeviceMesh) -> Tensor | None:
    if t is None or not is_dtensor(t):
        return t
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Sharded

    expected = Sharded(0) if name in ("weight", "bias") else Replicate()
    if t.device_mesh != mesh or mesh.ndim != 1 or tuple(t.placements) != (expected,):
        raise ValueError(
            f"{_OP}: {name} has placements {tuple(t.placements)} on {t.device_mesh}, expected {expected} on a mesh of "
            "one dimension, that of weight"
        )
    return t.to_local()


def _sizes(weight: Tensor, group: torch.distributed.ProcessGroup) -> tuple[int, ...]:
    # Kept by the tensor: processes that run the same program find it, or do not, alike.
    known = _gathered_sizes.get(weight)
    if known is None or known[0] is not group:
        (sizes,) = _gathered(group, torch.tensor(weight.shape[0], device=weight.device))
        known = _gathered_sizes[weight] = group, tuple(sizes.tolist())
    return known[1]


def _gathered(group: torch.distributed.ProcessGroup, *tensors: Tensor) -> list[Tensor]:
    """Of each tensor ``(shards, ...)``, by one collective. Those with the widest elements come first."""
    bytes_of = [t.detach().reshape(-1).view(torch.uint8) for t in tensors]
    mine = torch.cat(bytes_of)
    shards = torch.distributed.get_world_size(group)
    every = mine.new_empty(shards, mine.numel())
    torch.distributed.all_gather([*every], mine, group=group)
    parts = every.split([b.numel() for b in bytes_of], dim=1)
    return [p.reshape(-1).view(t.dtype).view(shards, *t.shape) for p, t in zip(parts, tensors, strict=True)]


class _ShardedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, needs, chunk, x, weight, target, bias, ce_weight, normalizer, *options):
        ignore_index, _, smoothing, _, softcap, _, *returns, accum, compute = options
        kept = any(needs) and x.shape[0] <= chunk and weight.shape[0] > 0
        place = shard.first_class, shard.vocab_size
        head, head_bias = weight, bias
        if weight.shape[0] == 0:  # runs with one made-up class, so that targets are checked here, too
            head, head_bias, place = weight.new_zeros(1, weight.shape[1]), None, (0, shard.vocab_size)
        logits, statistics, best = _statistics_op(
            x, head, target, head_bias, ce_weight, ignore_index, smoothing, softcap, accum, compute, *place,
            chunk, returns[1] or returns[2], kept,
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
        loss, *others, counts, kept_values = _losses_op(
            logits, statistics.flatten(0, 1), best.flatten(0, 1), x, head, target, ce_weight, normalizer, *options[:6],
            *returns, compute, *place,
        )  # fmt: skip
        loss.masked_fill_(different, torch.nan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*others)
        ctx.save_for_backward(x, weight.detach(), target, bias, ce_weight, counts, kept_values, logits)
        ctx.shard, ctx.needs, ctx.options = shard, needs, (*options[:6], accum, compute, *place, chunk)
        ctx.kept = kept
        return loss, *others

    @staticmethod
    def backward(ctx, dloss, *_):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_OP} of a sharded vocabulary has no second derivative (create_graph=True)")
        gradients = [None] * len(ctx.needs_input_grad)
        if dloss is None:
            return tuple(gradients)
        x, weight, target, bias, *_ = saved = ctx.saved_tensors
        need_dx, *need_parameters = ctx.needs
        if ctx.options[1] == REDUCTIONS["none"]:  # a NaN in the gradient of an ignored row must not reach the sums
            dloss = torch.where(target == ctx.options[0], 0.0, dloss)

        def made(*needs: bool) -> tuple[Tensor, ...]:
            if weight.shape[0] > 0:
                return _backward_op(dloss, *saved, *ctx.options, *needs)
            compute = ctx.options[7] or torch.promote_types(x.dtype, weight.dtype)
            dx = x.new_zeros(x.shape, dtype=accumulator(compute))
            return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)

        # dx is made first and summed over processes; making dweight and dbias meanwhile hides the time of that.
        apart = ctx.kept and need_dx and any(need_parameters)
        dx, dweight, dbias = made(need_dx, False, False) if apart else made(*ctx.needs)
        if need_dx:
            summed = torch.distributed.all_reduce(dx, group=ctx.shard.group, async_op=True)
        if apart:
            _, dweight, dbias = made(False, *need_parameters)
        if need_dx:
            summed.wait()
            gradients[3] = dx.to(x.dtype)
        if need_parameters[0]:
            gradients[4] = dweight
        if need_parameters[1]:
            gradients[6] = dbias
        return tuple(gradients)


@outside_of_graphs
def sharded_loss(shard: Shard, of: LossArguments) -> tuple[Tensor, ...]:
    """loss, z_loss, token_accuracy and predicted_tokens, as of the op. ``of``: the op's arguments; of its plan,
    ``chunk_rows`` alone matters: how many rows of logits may exist at a time."""
    ce_weight = of.ce_weight
    if ce_weight is not None and ce_weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{_OP} has no gradient for ce_weight: pass ce_weight.detach()")
    needs = of.need_dx, of.need_dweight, of.need_dbias
    return _ShardedLoss.apply(shard, needs, of.chunk_rows, *(getattr(of, name) for name in _ARGUMENTS))


_OF_TOKENS = {"temperature", "logit_scale", "return_entropy", "return_mean_logits", "return_log_sum_sq"}
_ARGUMENTS = [
    name for name in LossArguments._fields[: LossArguments._fields.index("gradients")] if name not in _OF_TOKENS
]


def _dtypes(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    compute = torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype
    return compute, accumulator(compute)


def _fake_statistics(x, weight, *others):
    compute_dtype, *_, predictions, keep_logits = others[-6:]
    compute, acc = _dtypes(x, weight, compute_dtype)
    rows, classes = x.shape[0], weight.shape[0]
    strided = x.new_empty_strided((rows, classes), (padded_vocab(classes), 1), dtype=compute)
    return (
        strided if keep_logits else x.new_empty(0, dtype=compute),
        x.new_empty((1, _SLOTS, rows), dtype=acc),
        x.new_empty((int(predictions), rows), dtype=torch.int64),
    )


def _fake_losses(logits, statistics, best_class, x, weight, target, ce_weight, normalizer, ignore_index, *options):
    reduction, *_, token_scaling, z_loss, accuracy, predicted, compute_dtype, _, _ = options
    _, acc = _dtypes(x, weight, compute_dtype)
    rows = x.shape[0]
    return (
        *fake_results(x, rows, acc, reduction, z_loss, accuracy, predicted),
        *(x.new_empty(n, dtype=acc) for n in (_C.cross_entropy_counts, rows * (3 if token_scaling else 2))),
    )


def _fake_backward(dloss, x, weight, target, bias, *others):
    compute_dtype, *_, need_dx, need_dweight, need_dbias = others[-7:]
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


# Formulas for torch.utils.flop_counter, which passes shapes in place of tensors.
@flop_formula(torch.ops.liger_ext.vocabulary_shard_statistics)
def _statistics_flops(x_shape, weight_shape, *_, **__) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@flop_formula(torch.ops.liger_ext.vocabulary_shard_backward)
def _backward_flops(dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    *_, need_dx, need_dweight, _ = args
    again = len(args[5]) < 2  # nothing was kept
    return _statistics_flops(x_shape, weight_shape) * (again + need_dx + need_dweight)
