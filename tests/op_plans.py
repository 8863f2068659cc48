"""Launch plans of calls that sizes and a few facts describe, for any GPU: ``plans("rms_norm_backward", device, 8192,
4096, frozen=True)``. The public function runs on meta tensors; its ops' arguments, without data, are changed as the
facts say; csrc/trace returns their launches.

``aligned``: tensors start at a multiple of 16 bytes. ``contiguous``: rows of matrices have no gaps. ``mixed``: in the
forward parameters, in the backward the upstream gradient have another dtype. ``frozen``: no parameter needs a gradient.
``bias``: of the norms and the fused loss. ``full``: an option of a loss that costs instructions. ``per_row``: reduction
"none". ``moments``: log-probabilities with their moments."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from liger_ext import _C, functional
from liger_ext._op_calls import OpCalls, without_data
from liger_ext.ops._loss_plan import Plan
from liger_ext.ops._schema import argument_names
from liger_ext.records import RECORDS, InputFactory, Size, other_dtype

WITHOUT_RECORD = ("dequantize_4bit", "seeded_dropout", "stream_copy")
OPS = sorted(
    [*WITHOUT_RECORD]
    + [f"{op}{suffix}" for op, record in RECORDS.items() if record.kernels == op for suffix in ("", "_backward")]
)
Arguments = tuple[Any, ...]


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def _without_record(op: str, rows: int, cols: int, dtype: torch.dtype) -> Arguments:
    x = _meta(rows, cols, dtype=dtype)
    if op == "stream_copy":
        return _meta(rows * cols * dtype.itemsize // 16 * 4, dtype=torch.float32), 4
    if op == "seeded_dropout":
        return x, _meta(1, dtype=torch.int64), 0, 1, 0, 0.5
    packed, absmax = (_meta(-(-rows * cols // n), dtype=dt) for n, dt in ((2, torch.uint8), (64, torch.float32)))
    return packed, absmax, None, None, None, rows * cols, 0, 64, 256, dtype


def _inputs(op: str, rows: int, cols: int, dtype: torch.dtype, facts: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the public function."""
    heads = facts.get("q_heads", 1), facts.get("k_heads", 1), facts.get("rotary_dim") or cols
    is_rope, hidden = any(RECORDS[op].llama.heads), facts.get("hidden", 1) if RECORDS[op].llama.hidden else 0
    size = Size(rows, cols, heads if is_rope else (0, 0, 0), hidden)
    if op == "group_norm":
        size = replace(size, hidden=facts.get("channel") or cols, batch=rows)
    inputs = RECORDS[op].inputs(InputFactory(dtype, "meta"), size)
    if is_rope and facts.get("interleaved"):
        inputs["layout"] = "interleaved"
    if op == "cross_entropy" or hidden:
        inputs |= {"softcap": 30.0} if facts.get("full") else {}
        inputs["reduction"] = "none" if facts.get("per_row") else "mean"
    if hidden:
        chunks = facts.get("chunk_rows") or max(1, rows), facts.get("chunk_classes") or cols
        once = rows <= chunks[0] and cols <= chunks[1]
        strategy = _C.gradient_strategy(True, True, once, bool(facts.get("per_row")))
        strategy = _C.Gradients.overlaid if facts.get("overlaid") and rows else strategy
        inputs |= {"memory": Plan(int(strategy), *chunks)}
        inputs |= {"bias": _meta(cols, dtype=dtype)} if facts.get("bias") else {}
        inputs |= {"ce_weight": _meta(cols, dtype=dtype).detach()} if facts.get("class_weight") else {}
    return inputs


@functools.lru_cache(maxsize=20_000)
def _calls(name: str, rows: int, cols: int, dtype: torch.dtype, facts: tuple) -> list[tuple[str, Arguments]]:
    """Returns the calls of ops in forward or backward."""
    if name in WITHOUT_RECORD:
        return [(name, tuple(map(without_data, _without_record(name, rows, cols, dtype))))]
    op = name.removesuffix("_backward")
    inputs = _inputs(op, rows, cols, dtype, dict(facts))
    moments = "memory" in inputs and dict(facts).get("moments")
    with OpCalls() as calls:
        if moments:
            inputs = {k: v for k, v in inputs.items() if k not in ("softcap", "reduction", "ce_weight")}
            results = functional.linear_log_probs(**inputs, entropy=True, mean_logits=True, log_sum_sq_probs=True)[:1]
        else:
            results = RECORDS[op].run(**inputs)
        outputs = [t for t in (results if isinstance(results, tuple) else (results,)) if getattr(t, "grad_fn", None)]
        leaves = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        grads = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in outputs]
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    return [call for call in calls.calls if ("_backward" in call[0]) == (name != op)]


def _changed(op: str, arguments: Arguments, cols: int, facts: dict[str, Any]) -> Arguments:
    """Returns the arguments with other layouts, dtypes and flags."""
    changed, backward = [], "_backward" in op
    for name, value in zip(argument_names(getattr(torch.ops.liger_ext, op).default), arguments, strict=True):
        if name in ("need_dweight", "need_dbias") and "norm" in op and facts.get("frozen"):
            value = False
        if name in ("bias", "bias_dtype", "need_dbias") and "norm" in op and not facts.get("bias", True):
            value = False if name == "need_dbias" else None
        if isinstance(value, tuple):
            shape, dtype, strides, offset = value
            other = ("weight", "bias") if not backward else () if "group" in op else ("dy",)
            if facts.get("mixed") and "norm" in op and name in other:
                dtype = other_dtype(dtype)
            if not facts.get("contiguous", True) and name in _MATRICES and len(shape) == 2:
                strides = (shape[1] + 64, 1)
            if not facts.get("aligned", True) and name in (*_MATRICES, *_OTHERS) and op != "stream_copy":
                offset = dtype.itemsize
            value = shape, dtype, strides, offset
        changed.append(value)
    return tuple(changed)


def plans(
    op: str,
    device: _C.DeviceProfile,
    rows: int,
    cols: int,
    dtype: str = "bfloat16",
    knobs: _C.Knobs | None = None,
    **facts: Any,
) -> list[_C.NamedLaunch]:
    """Returns the launches of an op's forward, or with ``_backward`` behind its name, of its backward."""
    known = tuple(sorted((name, value) for name, value in facts.items() if name not in _LAYOUT))
    calls = _calls(op, rows, cols, getattr(torch, dtype), known)
    return [
        launch
        for name, arguments in calls
        for launch in _C.plans(name, device, _changed(name, arguments, cols, facts), knobs=knobs or _C.Knobs())
    ]


_LAYOUT = ("aligned", "contiguous", "mixed", "frozen")
# Arguments that may have any strides, and others that may start at any address. log_p stays where it is, so that its
# rows start at other offsets than those of log_q.
_MATRICES = ("x", "residual", "dy", "dsum", "gate", "up", "dh", "logits", "log_q")
_OTHERS = ("weight", "bias", "ce_weight", "q", "k", "dq", "dk", "cos", "sin", "packed")
