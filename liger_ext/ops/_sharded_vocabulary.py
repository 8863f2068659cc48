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
from liger_ext.ops._checks import accumulator, require, shape_text
from liger_ext.ops._compile import disabled_in_graphs, flop_formula
from liger_ext.ops._fused_linear_op import (
    USER_RESULTS,
    combine_gradients,
    fake_loss_results,
    is_private,
    recomputed_rows,
    scale_gradient,
    without_ignored,
)
from liger_ext.ops._loss_arguments import NAMES, OPTIONS, FusedLossCall, matmul_dtype, wide_logits, without_data
from liger_ext.ops._loss_devices import device_index
from liger_ext.ops._loss_plan import Plan, padded_vocab, shard_rows
from liger_ext.ops._register import register_without_derivative
from liger_ext.ops._schema import called_by_name, selector

_OP = "fused_linear_cross_entropy"
_MAXIMUM, _BEST = int(_C.VocabularyStatistics.maximum), int(_C.VocabularyStatistics.best)

_ARGUMENTS = ("shard", *NAMES)
_SAVED = (
    "x", "weight", "target", "bias", "ce_weight", "temperature", "loss", "entropy", "counts", "gradient_state", "saved",
)  # fmt: skip

_statistics_op = called_by_name(torch.ops.liger_ext.vocabulary_shard_statistics.default)
_losses_op = called_by_name(torch.ops.liger_ext.vocabulary_shard_losses_.default)
_backward_op = called_by_name(torch.ops.liger_ext.vocabulary_shard_backward.default)
_backward_in_place = called_by_name(torch.ops.liger_ext.vocabulary_shard_backward_.default)
_select_upstream = selector(USER_RESULTS, ["loss", "entropy"])

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
        values = dict(zip(NAMES, args, strict=True))
        x, weight, target = values["x"], values["weight"], values["target"]
        place = {"first_class": shard.first_class, "vocab_size": shard.vocab_size}
        head = values | place
        if weight.shape[0] == 0:  # an empty shard runs with one class of zeros, so that targets are checked here, too
            head |= {"weight": weight.new_zeros(1, weight.shape[1]), "bias": None, "first_class": 0}
        wanted = values["need_dx"] or values["need_dweight"] or values["need_dbias"]
        at_once = x.shape[0] <= values["chunk_rows"] and not wide_logits(values)
        ctx.stores_logits = wanted and at_once and weight.shape[0] > 0
        predictions = values["return_token_accuracy"] or values["return_predicted_tokens"]
        logits, statistics, best = _statistics_op(head | {"predictions": predictions, "keep_logits": ctx.stores_logits})
        if weight.shape[0] == 0:
            statistics.zero_()
            for largest in (statistics[:, _MAXIMUM], statistics[:, _BEST]):
                largest.fill_(-torch.inf)
            best.fill_(shard.vocab_size)
        sums, best, statistics = _gathered(shard.group, target.sum(), best, statistics)
        different = (sums != sums[0]).any()
        if different.device.type == "cpu" and different:
            raise ValueError(f"{_OP}: target is not the same in all processes, between which the vocabulary is sharded")
        gathered = {"logits": logits, "statistics": statistics.flatten(0, 1), "best_class": best.flatten(0, 1)}
        results = _losses_op(head | gathered)
        values |= dict(zip((*USER_RESULTS, "counts", "gradient_state"), results, strict=True)) | place
        differentiable = {"loss", "entropy"} if values["return_entropy"] else {"loss"}
        for name in differentiable:
            values[name].masked_fill_(different, torch.nan)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(values[name] for name in USER_RESULTS if name not in differentiable))
        of_entropy = {} if values["return_entropy"] else {"loss": None, "entropy": None}
        saved = values | of_entropy | {"weight": weight.detach(), "saved": logits}
        ctx.save_for_backward(*(saved[name] for name in _SAVED))
        ctx.shard, ctx.overwrites_logits = shard, is_private(logits)
        ctx.options = {name: values[name] for name in (*OPTIONS, *place)}
        return tuple(values[name] for name in USER_RESULTS)

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_OP} of a sharded vocabulary has no second derivative (create_graph=True)")
        dloss, dentropy = _select_upstream(grads)
        if dloss is None and dentropy is None:
            return (None,) * len(_ARGUMENTS)
        values = {**ctx.options, **dict(zip(_SAVED, ctx.saved_tensors, strict=True))}
        x, weight, bias = values["x"], values["weight"], values["bias"]
        dloss, dentropy = without_ignored(values, dloss, dentropy)
        mix, stored = None, ctx.stores_logits
        if dentropy is not None:
            dloss, mix = combine_gradients(dloss, dentropy, values["loss"], values["entropy"])
            keeps_graph = _get_current_graph_task_keep_graph()
            stored = stored and ctx.overwrites_logits and values["softcap"] is None and not keeps_graph
            if not stored:
                # No gradient is stored, it may not be overwritten, or it has no probabilities: recompute the logits.
                values["saved"] = values["saved"].new_empty(0)
                values["chunk_rows"] = min(values["chunk_rows"], recomputed_rows(values))
        values["dloss"] = scale_gradient(dloss, values["temperature"], values["logit_scale"])
        needs = {name: values[name] for name in ("need_dx", "need_dweight", "need_dbias")}

        def compute(mix: Tensor | None, **needs: bool) -> tuple[Tensor, ...]:
            if weight.shape[0] > 0:
                op = _backward_in_place if stored and mix is not None else _backward_op
                return op(values | needs | {"mix": mix})
            dx = x.new_zeros(x.shape, dtype=accumulator(matmul_dtype(x, weight, values["compute_dtype"])))
            return dx, torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias)

        # With a stored gradient, dx is computed first and summed over processes. dweight and dbias are computed
        # meanwhile, which hides the time of the sum. Recomputed logits serve all gradients at once.
        need_dx = needs["need_dx"]
        apart = stored and need_dx and (needs["need_dweight"] or needs["need_dbias"])
        dx, dweight, dbias = compute(mix, **needs | ({"need_dweight": False, "need_dbias": False} if apart else {}))
        if need_dx:
            summed = torch.distributed.all_reduce(dx, group=ctx.shard.group, async_op=True)
        if apart:
            _, dweight, dbias = compute(None, **needs | {"need_dx": False})  # the stored gradient already contains mix
        if need_dx:
            summed.wait()
            dx = dx.to(x.dtype)
        gradients = {"x": dx, "weight": dweight, "bias": dbias}
        return tuple(gradients[name] if needs.get(f"need_d{name}") else None for name in _ARGUMENTS)


@disabled_in_graphs
def sharded_loss(
    shard: Shard, values: dict[str, object], memory: str | int | Plan, all_rows: int, copies: int
) -> tuple[Tensor, ...]:
    """Returns the op's first seven results, as ``fused_loss`` does. ``values``: the op's arguments, of which the plan
    has no effect; ``all_rows``, ``copies``: as in ``FusedLossCall``."""
    device = device_index(values["x"].device)
    call = FusedLossCall(without_data(values), device, overlays=False, all_rows=all_rows, copies=copies)
    values["chunk_rows"] = shard_rows(call.resized(vocab=max(1, *shard.sizes)), memory)
    return _ShardedLoss.apply(shard, *values.values())


def _fake_statistics(
    x, weight, compute_dtype, return_entropy, return_mean_logits, return_log_sum_sq, predictions, keep_logits
):
    compute = matmul_dtype(x, weight, compute_dtype)
    acc = accumulator(compute)
    rows, classes = x.shape[0], weight.shape[0]
    strided = x.new_empty_strided((rows, classes), (padded_vocab(classes), 1), dtype=compute)
    slots = _C.statistics_slots(return_entropy or return_mean_logits or return_log_sum_sq)
    return (
        strided if keep_logits else x.new_empty(0, dtype=compute),
        x.new_empty((1, slots, rows), dtype=acc),
        x.new_empty((int(predictions), rows), dtype=torch.int64),
    )


def _fake_losses(values):
    x = values.x
    acc = accumulator(matmul_dtype(x, values.weight, values.compute_dtype))
    return (
        *fake_loss_results(values, acc),
        x.new_empty(_C.cross_entropy_counts, dtype=acc),
        x.new_empty(_C.gradient_state_size(x.shape[0], values.use_token_scaling), dtype=acc),
    )


def _fake_backward(x, weight, bias, compute_dtype, need_dx, need_dweight, need_dbias):
    acc = accumulator(matmul_dtype(x, weight, compute_dtype))
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


@flop_formula(torch.ops.liger_ext.vocabulary_shard_statistics)
def _statistics_flops(x, weight) -> int:
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0]


@flop_formula(torch.ops.liger_ext.vocabulary_shard_backward)
@flop_formula(torch.ops.liger_ext.vocabulary_shard_backward_)
def _backward_flops(x, weight, saved, need_dx, need_dweight) -> int:
    again = saved.dim() < 2  # the forward stored no gradient of the logits
    return _statistics_flops(x, weight) * (again + need_dx + need_dweight)
