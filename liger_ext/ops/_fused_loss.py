"""Prepares a call of the fused loss's op, for ``fused_linear_cross_entropy`` and ``linear_log_probs``.

The C++ op cannot read whether a tensor requires a gradient. So ``fused_loss`` determines the gradients to compute and
chooses their plan (``_loss_plan.py``, ``_fused_linear_op.py``).
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import (
    REDUCTIONS,
    accumulator,
    check_constants,
    check_integer,
    check_tensors,
    class_targets,
    mode_code,
    require,
    shape_text,
)
from liger_ext.ops._fused_linear_op import USER_RESULTS, autocast_dtype, call_op
from liger_ext.ops._loss_arguments import FLOATS, FusedLossCall, matmul_dtype, with_defaults, without_data
from liger_ext.ops._loss_devices import device_index
from liger_ext.ops._loss_plan import Plan, plan
from liger_ext.ops._sharded_vocabulary import is_dtensor, local_tensors, sharded_loss
from liger_ext.ops.count_rows import CountedRows, for_all_rows, gather, listed_rows
from liger_ext.ops.cross_entropy import class_weight

_ACCUMULATED = int(_C.Gradients.accumulated)


def fused_loss(
    op: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ce_weight: Tensor | None = None,
    *,
    ignore_index: int,
    memory: str | int,
    rows: CountedRows | Tensor | None,
    reduction: str = "none",
    temperature: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Checks the arguments, calls the op, and returns its results for all rows of x, flattened: first loss, z_loss,
    token_accuracy, predicted_tokens, entropy, mean_logits and log_sum_sq. ``op``: the public function's name, for
    errors. ``temperature``: ``(rows,)``. ``options``: further arguments of the op."""
    values = with_defaults(x=x, weight=weight, target=target, ignore_index=ignore_index, **options)
    softcap = values["softcap"]
    check_tensors(op, x=x, weight=weight, target=target)
    check_integer(op, ignore_index=ignore_index)
    floats = {name: values[name] for name in FLOATS}
    check_constants(op, ce_weight=ce_weight, normalizer=normalizer, temperature=temperature, **floats)
    if isinstance(softcap, bool) or not isinstance(softcap, (numbers.Real, torch.SymFloat, torch.SymInt, type(None))):
        raise TypeError(f"{op}: softcap is {softcap!r}, expected None or a number")
    for name in ("accum_dtype", "logits_dtype"):
        value = values[name]
        if not (value is None or isinstance(value, torch.dtype)):
            raise TypeError(f"{op}: {name} is {value!r}, expected a torch.dtype or None")
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
        shard, x, weight, target, bias, ce_weight, temperature = local_tensors(
            op, process_group, x, weight, target, bias=bias, ce_weight=ce_weight, temperature=temperature
        )
    flat = x if x.dim() == 2 else x.reshape(target.numel(), x.shape[-1])
    targets = class_targets(target if target.dim() == 1 else target.reshape(-1))
    listed = None
    if rows is not None and weight.dim() == 2:
        vocab_size = weight.shape[0] if shard is None else shard.vocab_size
        listed = listed_rows(op, rows, targets, vocab_size, ignore_index)
        if listed is not None:
            flat, targets = gather(flat, listed[0]), listed[1]
            if temperature is not None:
                temperature = temperature[listed[0]]
    compute_dtype = autocast_dtype(x.device.type, x, weight)
    dtype = matmul_dtype(x, weight, compute_dtype)
    # Bytes of the copies made here: reshape() copies some x, class_weight() converts. Graphs ignore them.
    reshaped = x.dim() > 2 and not torch.compiler.is_compiling() and not x.is_contiguous()
    copies = flat.numel() * flat.element_size() if reshaped else 0
    if ce_weight is not None:
        ce_weight = class_weight(op, ce_weight, "ce_weight", dtype)
        copies += ce_weight.numel() * ce_weight.element_size()
    grad = torch.is_grad_enabled()
    values.update(
        x=flat,
        target=targets,
        bias=bias,
        weight=weight,
        ce_weight=ce_weight,
        normalizer=None if normalizer is None else _normalizer(op, normalizer, accumulator(dtype), x.device),
        temperature=None if temperature is None else temperature.to(accumulator(dtype)).contiguous(),
        reduction=mode_code(op, "reduction", reduction, REDUCTIONS),
        compute_dtype=compute_dtype,
        need_dx=grad and x.requires_grad,
        need_dweight=grad and weight.requires_grad,
        need_dbias=grad and bias is not None and bias.requires_grad,
    )
    all_rows = 0 if listed is None else target.numel()
    if shard is not None:
        outputs = sharded_loss(shard, values, memory, all_rows, copies)
    else:
        needs = values["need_dx"] or values["need_dweight"] or values["need_dbias"]
        chosen = Plan(_ACCUMULATED if needs else 0, 1, 1)
        if weight.dim() == 2 and weight.shape[0] > 0:  # the op raises an error for other weights
            # No overlaid plan in a graph: it would overwrite a result of another op.
            overlays = not torch.compiler.is_compiling()
            chosen = plan(
                FusedLossCall(without_data(values), device_index(x.device), overlays, all_rows, copies=copies), memory
            )
        values["gradients"], values["chunk_rows"], values["chunk_classes"] = chosen
        outputs = call_op(*values.values())
    if listed is not None:
        wanted = reduction == "none", *(values[f"return_{name}"] for name in USER_RESULTS[1:])
        outputs = for_all_rows(outputs, listed[0], target.numel(), *wanted)
    return outputs


def _normalizer(op: str, value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Neither branch synchronises with the device of x; a CPU waits for a normalizer that a GPU computes.
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"{op}: normalizer has shape {shape_text(value)}, expected one number")
        if value.is_meta and device.type != "meta":
            raise ValueError(f"{op}: normalizer is on meta and has no value, expected it on {device}, as x is")
        return value.detach().reshape(1).to(device=device, dtype=dtype, non_blocking=device.type != "cpu")
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: normalizer must be a number or a Tensor, not {type(value).__name__}")
    if abs(value) > torch.finfo(dtype).max:
        raise ValueError(f"{op}: normalizer is {value}, expected a number that {dtype} can hold")
    return torch.full((1,), value if abs(value) < 1 << 62 else float(value), dtype=dtype, device=device)
