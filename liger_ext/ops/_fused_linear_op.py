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

from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, accumulator
from liger_ext.ops._compile import flop_formula
from liger_ext.ops._loss_arguments import NAMES, OPTIONS, LossArguments, matmul_dtype, wide_logits
from liger_ext.ops._register import register, register_without_derivative
from liger_ext.ops._schema import called_by_name, result_names, selector
from liger_ext.ops.cross_entropy import fake_results

_op = torch.ops.liger_ext.fused_linear_cross_entropy.default
_backward_op = called_by_name(torch.ops.liger_ext.fused_linear_cross_entropy_backward.default)
_backward_in_place = called_by_name(torch.ops.liger_ext.fused_linear_cross_entropy_backward_.default)

_DEFERRED, _ACCUMULATED, _RECOMPUTED, _OVERLAID = map(
    int, (_C.Gradients.deferred, _C.Gradients.accumulated, _C.Gradients.recomputed, _C.Gradients.overlaid)
)

RESULTS = result_names(_op)
USER_RESULTS = RESULTS[: RESULTS.index("counts")]
_SAVED = ("weight", "loss", "entropy", "x", "target", "bias", "ce_weight", "temperature")
_SAVED += "counts", "saved", "dx", "dweight", "dbias"
_FOR_BACKWARD = (*_SAVED, *OPTIONS)
_select_saved = selector([*NAMES, *RESULTS], _SAVED[3:])
_select_without_gradient = selector([*NAMES, *RESULTS], [n for n in RESULTS if n not in ("loss", "entropy")])
_select_options = selector(NAMES, OPTIONS)
_select_needs = selector(NAMES, ["need_dx", "need_dweight", "need_dbias"])
_select_learned = selector(NAMES, ["x", "weight", "bias"])
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def autocast_dtype(device_type: str, x: Tensor, weight: Tensor) -> torch.dtype | None:
    # Autocast does not cast float64, as in torch's matmuls. torch has no autocast for other devices (meta).
    if device_type not in ("cpu", "cuda"):
        return None
    if x.dtype == torch.float64 or weight.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _autocast(device_type, *values):
    args = LossArguments(*values)
    if args.compute_dtype is not None:
        return args
    return args._replace(compute_dtype=autocast_dtype(device_type, args.x, args.weight))


def fake_loss_results(values, dtype):
    """Returns the results for users, loss to log_sum_sq, without data."""
    x, rows = values.x, values.x.shape[0]
    wanted = values.return_z_loss, values.return_token_accuracy, values.return_predicted_tokens
    moments = values.return_entropy, values.return_mean_logits, values.return_log_sum_sq
    return (
        *fake_results(x, rows, dtype, values.reduction, *wanted),
        *(x.new_empty(rows if moment else 0, dtype=dtype) for moment in moments),
    )


def _fake(values):
    x = values.x
    acc = accumulator(matmul_dtype(x, values.weight, values.compute_dtype))
    saved = (x.new_empty(shape, dtype=_DTYPES[dtype]) for shape, dtype in _C.saved_tensors(*values))
    return *fake_loss_results(values, acc), *saved


def _fake_backward(x, weight, bias, compute_dtype, need_dx, need_dweight, need_dbias):
    acc = accumulator(matmul_dtype(x, weight, compute_dtype))
    need_dbias = need_dbias and bias is not None
    return (
        x.new_empty(x.shape if need_dx else 0),
        weight.new_empty(weight.shape if need_dweight else 0),
        x.new_empty(weight.shape[0] if need_dbias else 0, dtype=acc if bias is None else bias.dtype),
    )


def _fake_backward_in_place(x, weight, bias, compute_dtype, need_dx, need_dbias):
    dx, _, dbias = _fake_backward(x, weight, bias, compute_dtype, need_dx, False, need_dbias)
    return dx, dbias


def _setup_context(ctx, values):
    needed = _select_learned(ctx.needs_input_grad)
    for name, need, computed in zip(("x", "weight", "bias"), needed, _select_needs(values), strict=True):
        if need and not computed:
            raise RuntimeError(
                f"liger_ext::fused_linear_cross_entropy was called with need_d{name}=False, but {name} requires a "
                f"gradient. Pass need_d{name}=True, or {name}.detach()"
            )
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        *_select_without_gradient(values), *(() if values.return_entropy else (values.entropy,))
    )
    # The detached weight is saved, as torch's linear layers save a view: a new `.data` of the parameter before the
    # backward then has no effect. With DeepSpeed's ZeRO 3 (attribute ds_id) the parameter itself is saved: ZeRO 3
    # empties its parameters after the forward to save memory, and fills them again before the backward.
    weight = values.weight if hasattr(values.weight, "ds_id") else values.weight.detach()
    for_entropy = (values.loss, values.entropy) if values.return_entropy else (None, None)
    ctx.save_for_backward(weight, *for_entropy, *_select_saved(values))
    dweight = values.dweight
    # The backward may overwrite dweight's memory only if no other code sees it, including the caller of the op.
    ctx.overwrites_dweight = getattr(ctx, "outputs_private", False) and dweight.numel() > 0 and is_private(dweight)
    # The options of the backward must be those of the forward, since the saved tensors depend on them.
    ctx.options = _select_options(values)


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


def recomputed_rows(values: dict[str, Any]) -> int:
    """Returns the number of rows of logits that a backward recomputes at a time. They take about the memory of dweight;
    logits in float32 count with their gradient."""
    return max(values["weight"].shape[1] // (3 if wide_logits(values) else 1), 128)


def _recompute(values: dict[str, Any]) -> None:
    """Has a backward recompute the logits, in the forward's chunks if it had several."""
    if values["gradients"] not in (_ACCUMULATED, _RECOMPUTED):
        values["chunk_rows"] = recomputed_rows(values)
        values["chunk_classes"] = values["weight"].shape[0]
    values["gradients"] = _RECOMPUTED


def scale_gradient(dloss: Tensor, temperature: Tensor | None, logit_scale: float) -> Tensor:
    """Returns the factor of each row's gradient of the logits: that of the transformed logits times their derivative
    by scale and temperature."""
    if temperature is None and logit_scale == 1:
        return dloss
    return dloss * (logit_scale if temperature is None else logit_scale / temperature)


def without_ignored(values: dict[str, Any], *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns upstream gradients of each row with zeros for ignored rows, whose NaN must not reach the sums over rows;
    gradients of a loss that is a mean or a sum as they are."""
    if values["reduction"] != REDUCTIONS["none"]:
        return upstream
    ignored = values["target"] == values["ignore_index"]
    return tuple(d if d is None else torch.where(ignored, 0.0, d) for d in upstream)


def _backward(ctx, saved, dloss, dentropy):
    if dloss is None and dentropy is None:
        return {}
    values = dict(zip(_FOR_BACKWARD, (*saved, *ctx.options), strict=True))
    values["mix"] = None
    weight, temperature, dweight = values["weight"], values["temperature"], values["dweight"]
    dloss, dentropy = without_ignored(values, dloss, dentropy)
    some = dentropy if dloss is None else dloss
    batched = torch._C._functorch.is_legacy_batchedtensor(some)  # torch.autograd.grad(is_grads_batched=True)
    in_place = ctx.overwrites_dweight and not batched and not _get_current_graph_task_keep_graph()
    if dentropy is not None:
        dloss, values["mix"] = combine_gradients(dloss, dentropy, values["loss"], values["entropy"])
        if not (in_place and values["gradients"] == _OVERLAID and values["softcap"] is None):
            # No gradient of the logits is stored, or it may not be overwritten or contains no probabilities. So the
            # backward recomputes the logits.
            in_place = False
            _recompute(values)
    values["dloss"] = scale_gradient(dloss, temperature, values["logit_scale"])
    if in_place:
        dx, dbias = _backward_in_place(values)
        torch.autograd.graph.increment_version((dweight, values["saved"]))
        dweight = dweight.view(weight.dtype)[: weight.numel()].view(weight.shape)
    else:
        dx, dweight, dbias = _backward_op(values)
    needed = _select_learned(ctx.needs_input_grad)
    gradients = zip(("x", "weight", "bias"), (dx, dweight, dbias), needed, strict=True)
    return {name: gradient for name, gradient, need in gradients if need}


call_op = register(
    "fused_linear_cross_entropy",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    autocast=_autocast,
)


register_without_derivative("fused_linear_cross_entropy_backward_", _fake_backward_in_place)


# Formulas for torch.utils.flop_counter: the matmuls of forward and backward. Sizes may be symbolic.
def _matmul_flops(x, weight, matmuls) -> int:
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] * matmuls


@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy)
def _forward_flops(values) -> int:
    x, weight, accumulated = values.x, values.weight, values.gradients == _ACCUMULATED
    # With chunks of classes, the logits are computed twice: for their statistics, and for their gradient.
    again = accumulated and values.chunk_classes < weight.shape[0]
    _, _, (dx, _), _, _ = _C.saved_tensors(*values)
    return _matmul_flops(x, weight, 1 + again + (len(dx) == 2) + (values.need_dweight and accumulated))


@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward)
@flop_formula(torch.ops.liger_ext.fused_linear_cross_entropy_backward_)
def _backward_flops(x, weight, mix, dx, gradients, chunk_classes, need_dx, need_dweight) -> int:
    logits = (gradients == _RECOMPUTED) * (1 + (chunk_classes < weight.shape[0]))
    # The forward's sum of dx is that of the loss alone, so a gradient of the entropy (mix) computes dx again.
    with_dx = need_dx and (mix is not None or dx.dim() != 2)
    flops = _matmul_flops(x, weight, logits + with_dx + (need_dweight and gradients != _ACCUMULATED))
    if gradients == _OVERLAID:  # the logits of classes whose gradient is not stored are recomputed
        flops += 2 * x.shape[0] * x.shape[1] * max(weight.shape[0] - chunk_classes, 0)
    return flops
