"""The fused loss's op in torch: its fake implementation, autograd formula, autocast rule and flop formulas.

The op's arguments name the gradients to compute, the number of rows and classes of logits that may exist at a time, and
the strategy for the gradients (``_C.Gradients``). Two matmuls compute dx and dweight from the gradient of the logits.
That gradient contains neither the upstream gradient nor the denominator of a mean, which are applied later.

* deferred: all logits exist at once (logits in float32 with 16-bit matmuls: a chunk of rows). The forward saves their
  gradient, and the backward runs the two matmuls.
* overlaid: as deferred, but the forward saves the gradient of the logits in the memory that becomes dweight. Classes
  that do not fit are saved in an overflow buffer, or the backward recomputes their logits.
* accumulated: several chunks, or a frozen head. The forward sums dx and dweight over chunks; the backward scales the
  sums.
* recomputed: several chunks, reduction "none", where each row's gradient has its own factor, and a head that is not
  frozen. The backward recomputes the chunks.

If a second backward may follow, or other code sees the saved tensors (hooks, graphs of torch.compile), the backward
only reads them. Otherwise it computes dweight in the memory that the forward has allocated for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, accumulator, condition_holds
from liger_ext.ops._compile import flop_formula
from liger_ext.ops._loss_plan import padded_vocab
from liger_ext.ops._register import register, register_without_derivative
from liger_ext.ops.cross_entropy import fake_results

_forward_op = torch.ops.liger_ext.fused_linear_cross_entropy.default
_backward_op = torch.ops.liger_ext.fused_linear_cross_entropy_backward.default
_backward_in_place = torch.ops.liger_ext.fused_linear_cross_entropy_backward_.default

_DEFERRED, _ACCUMULATED, _RECOMPUTED, _OVERLAID = map(
    int, (_C.Gradients.deferred, _C.Gradients.accumulated, _C.Gradients.recomputed, _C.Gradients.overlaid)
)


TENSORS = 7  # the number of the op's tensor arguments, which come first
ENTROPY = 4  # the index of the entropy in the op's results


class LossArguments(NamedTuple):
    """The op's arguments, in the order of its schema."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    ce_weight: Tensor | None = None
    normalizer: Tensor | None = None
    temperature: Tensor | None = None
    ignore_index: int = -100
    reduction: int = REDUCTIONS["none"]
    label_smoothing: float = 0.0
    lse_square_scale: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    use_token_scaling: bool = False
    return_z_loss: bool = False
    return_token_accuracy: bool = False
    return_predicted_tokens: bool = False
    return_entropy: bool = False
    return_mean_logits: bool = False
    return_log_sum_sq: bool = False
    accum_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    gradients: int = 0
    chunk_rows: int = 1
    chunk_classes: int = 1
    need_dx: bool = False
    need_dweight: bool = False
    need_dbias: bool = False

    @property
    def compute(self) -> torch.dtype:
        """The dtype of the matmuls. The losses have the dtype of its accumulator."""
        return _compute(self.x, self.weight, self.compute_dtype)

    def wide_logits(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the logits are wider than the operands of the matmuls."""
        return self.logits_dtype not in (None, _compute(x, weight, self.compute_dtype))


# The options that the backward ops take: all but the ``return_*`` flags, except ``return_entropy``.
_BACKWARD_OPTIONS = [
    name for name in LossArguments._fields[TENSORS:] if name == "return_entropy" or not name.startswith("return_")
]


def autocast_dtype(device_type: str, x: Tensor, weight: Tensor) -> torch.dtype | None:
    # Autocast does not cast float64, as in torch's matmuls. torch has no autocast for other devices (meta).
    if device_type not in ("cpu", "cuda"):
        return None
    if x.dtype == torch.float64 or weight.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(device_type, *args):
    args = LossArguments(*args)
    if args.compute_dtype is not None:
        return args
    return args._replace(compute_dtype=autocast_dtype(device_type, args.x, args.weight))


def _compute(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype


def _fake(*args):
    args = LossArguments(*args)
    x, weight, compute = args.x, args.weight, args.compute
    acc = accumulator(compute)
    rows, hidden = x.shape
    vocab = weight.shape[0]
    stored = min(args.chunk_classes, vocab)
    accumulated, needs_state = args.gradients == _ACCUMULATED, False
    summed = weight.dtype if weight.dtype == args.accum_dtype else acc
    saved, dweight = x.new_empty(0, dtype=summed), x.new_empty(0, dtype=summed)
    if args.gradients == _DEFERRED:
        saved = x.new_empty((rows, padded_vocab(vocab)), dtype=compute)
    elif args.gradients == _OVERLAID:
        room = _C.overlaid_room(hidden, weight.dtype, compute)
        saved = x.new_empty(_C.overlaid_rest(rows, room, vocab, stored), dtype=compute)
        dweight = weight.new_empty(vocab * hidden)
        needs_state = stored < vocab
    elif accumulated and args.need_dweight:
        memory, rest = _C.sum_sizes(vocab, hidden, summed, weight.dtype)
        saved, dweight = x.new_empty(rest, dtype=summed), x.new_empty(memory, dtype=summed)
    sums_dx = _C.sums_dx(args.gradients, weight.dtype, compute, condition_holds(stored >= vocab))
    wanted = args.reduction, args.return_z_loss, args.return_token_accuracy, args.return_predicted_tokens
    state_size = _C.gradient_state_size(rows, args.use_token_scaling) if needs_state or args.return_entropy else 0
    moments = args.return_entropy, args.return_mean_logits, args.return_log_sum_sq
    return (
        *fake_results(x, rows, acc, *wanted),
        *(x.new_empty(rows if moment else 0, dtype=acc) for moment in moments),
        x.new_empty(_C.cross_entropy_counts + state_size, dtype=acc),
        saved,
        x.new_empty((rows, hidden) if args.need_dx and sums_dx else 0, dtype=compute),
        dweight,
        x.new_empty(vocab if accumulated and args.need_dbias and args.bias is not None else 0, dtype=acc),
    )


def _fake_backward(dloss, x, weight, target, bias, *others):
    *_, compute_dtype, _, _, _, _, need_dx, need_dweight, need_dbias = others
    acc = accumulator(_compute(x, weight, compute_dtype))
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
    args = LossArguments(*inputs)
    x, weight, target, bias, ce_weight = inputs[:5]
    need_dx, need_dweight, need_dbias = args[-3:]
    for index, name, need in ((0, "x", need_dx), (1, "weight", need_dweight), (3, "bias", need_dbias)):
        if ctx.needs_input_grad[index] and not need:
            raise RuntimeError(
                f"liger_ext::fused_linear_cross_entropy was called with need_d{name}=False, but {name} requires a "
                f"gradient. Pass need_d{name}=True, or {name}.detach()"
            )
    others = output[1:]
    entropy = output[ENTROPY] if args.return_entropy else None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for t in others if t is not entropy))
    # The detached weight is saved, as torch's linear layers save a view: a new `.data` of the parameter before the
    # backward then has no effect. With DeepSpeed's ZeRO 3 (attribute ds_id) the parameter itself is saved: ZeRO 3
    # empties its parameters after the forward to save memory, and fills them again before the backward.
    saved_weight = weight if hasattr(weight, "ds_id") else weight.detach()
    for_backward = output[-5:]
    both = (None, None) if entropy is None else (output[0], entropy)
    ctx.save_for_backward(x, saved_weight, target, bias, ce_weight, args.temperature, *both, *for_backward)
    dweight = for_backward[3]
    # The backward may overwrite dweight's memory only if no other code sees it, including the caller of the op.
    ctx.overwrites_dweight = getattr(ctx, "outputs_private", False) and dweight.numel() > 0 and is_private(dweight)
    ctx.options = LossArguments(*(None,) * TENSORS, *args[TENSORS:])  # without the tensors, which ctx saves


def is_private(saved: Tensor) -> bool:
    """Whether no other code sees a saved tensor: there are no hooks for saved tensors, and no graph is being traced."""
    hooks = not _saved_tensors_hooks_is_enabled() or _top_saved_tensors_default_hooks(False) is not None
    return type(saved) is Tensor and not hooks


def combine_gradients(dloss: Tensor | None, dentropy: Tensor, loss: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Combines the upstream gradients of loss and entropy, for a kernel that computes one gradient of the logits x'.

    Returns a factor for each row, and the row's A, E, C and log p[target]. With ``p * (A + E * log p) - C * onehot``
    (csrc/kernels/cross_entropy.h), the factor times this gradient is
    ``dloss * (p - onehot) - dentropy * p * (log p + entropy)``."""
    dloss = torch.zeros_like(dentropy) if dloss is None else dloss
    factor = torch.maximum(dloss.abs(), dentropy.abs())
    factor = torch.where((factor > 0) & (factor < torch.inf), factor, 1.0)
    numbers = ((dloss - dentropy * entropy) / factor, -dentropy / factor, dloss / factor, -loss)
    return factor, torch.stack(numbers, 1)


def recomputed_rows(weight: Tensor, wide_logits: bool) -> int:
    """Returns the number of rows of logits that a backward recomputes at a time. They take about the memory of dweight;
    logits in float32 count with their gradient."""
    return max(weight.shape[1] // (3 if wide_logits else 1), 128)


def _recomputed(args: LossArguments, x: Tensor, weight: Tensor) -> LossArguments:
    """Returns the arguments of a backward that recomputes the logits, in the forward's chunks if it had several."""
    if args.gradients not in (_ACCUMULATED, _RECOMPUTED):
        rows = recomputed_rows(weight, args.wide_logits(x, weight))
        args = args._replace(chunk_rows=rows, chunk_classes=weight.shape[0])
    return args._replace(gradients=_RECOMPUTED)


def scale_gradient(dloss: Tensor, temperature: Tensor | None, logit_scale: float) -> Tensor:
    """Returns the factor of each row's gradient of the logits: that of the transformed logits times their derivative
    by scale and temperature."""
    if temperature is None and logit_scale == 1:
        return dloss
    return dloss * (logit_scale if temperature is None else logit_scale / temperature)


def _backward(ctx, saved, dloss, *others):
    args, dentropy = ctx.options, others[ENTROPY - 1]
    gradients = [None] * len(LossArguments._fields)
    if dloss is not None or dentropy is not None:
        x, weight, target, bias, ce_weight, temperature, loss, entropy, *results = saved
        mix = None
        if args.reduction == REDUCTIONS["none"]:  # a NaN in the gradient of an ignored row must not reach the sums
            ignored = target == args.ignore_index
            dloss, dentropy = (d if d is None else torch.where(ignored, 0.0, d) for d in (dloss, dentropy))
        some = dentropy if dloss is None else dloss
        batched = torch._C._functorch.is_legacy_batchedtensor(some)  # torch.autograd.grad(is_grads_batched=True)
        in_place = ctx.overwrites_dweight and not batched and not _get_current_graph_task_keep_graph()
        if dentropy is not None:
            dloss, mix = combine_gradients(dloss, dentropy, loss, entropy)
            if not (in_place and args.gradients == _OVERLAID and args.softcap is None):
                # No gradient of the logits is stored, or it may not be overwritten or contains no probabilities. So the
                # backward recomputes the logits.
                in_place, args = False, _recomputed(args, x, weight)
        dloss = scale_gradient(dloss, temperature, args.logit_scale)
        inputs = x, weight, target, bias, ce_weight, temperature, mix
        # The options must be those of the forward, since the saved tensors depend on them.
        options = (getattr(args, name) for name in _BACKWARD_OPTIONS)
        if in_place:
            counts, rest, dx, memory, dbias = results
            dx, dbias = _backward_in_place(memory, rest, dloss, *inputs, counts, dx, dbias, *options)
            torch.autograd.graph.increment_version((memory, rest))
            dweight = memory.view(weight.dtype)[: weight.numel()].view(weight.shape)
        else:
            dx, dweight, dbias = _backward_op(dloss, *inputs, *results, *options)
        for index, gradient in ((0, dx), (1, dweight), (3, dbias)):
            if ctx.needs_input_grad[index]:
                gradients[index] = gradient
    return tuple(gradients)


call_op = register(
    "fused_linear_cross_entropy",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    differentiable=4,  # x, weight, target, bias
    autocast=_autocast,
)


register_without_derivative("fused_linear_cross_entropy_backward_", _fake_backward_in_place)


# Formulas for torch.utils.flop_counter, which passes shapes in place of tensors: the matmuls of forward and backward.
def _matmul_flops(x_shape, weight_shape, matmuls: int) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0] * matmuls


@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy)
def _forward_flops(x_shape, weight_shape, *args, **_) -> int:
    gradients, _, chunk_classes, need_dx, need_dweight, _ = args[-6:]
    # With chunks of classes, the logits are computed twice: for their statistics, and for their gradient.
    again = gradients == _ACCUMULATED and chunk_classes < weight_shape[0]
    return _matmul_flops(x_shape, weight_shape, 1 + again + (gradients == _ACCUMULATED) * (need_dx + need_dweight))


@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward)
def _backward_flops(dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    gradients, _, chunk_classes, need_dx, need_dweight, _ = args[-6:]
    logits = (gradients == _RECOMPUTED) * (1 + (chunk_classes < weight_shape[0]))
    matmuls = (gradients in (_DEFERRED, _RECOMPUTED, _OVERLAID)) * (need_dx + need_dweight)
    # The logits of classes whose gradient is not stored are recomputed.
    again = (weight_shape[0] - chunk_classes if gradients == _OVERLAID else 0), weight_shape[1]
    return _matmul_flops(x_shape, weight_shape, logits + matmuls) + _matmul_flops(
        x_shape, (max(again[0], 0), again[1]), 1
    )


@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward_)
def _backward_in_place_flops(dweight_shape, saved_shape, dloss_shape, x_shape, weight_shape, *args, **_) -> int:
    return _backward_flops(dloss_shape, x_shape, weight_shape, *args)
