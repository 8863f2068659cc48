"""Decides whether the exception or the results of a call are acceptable. Anything else is a finding.

An exception is acceptable if the call's arguments may be the cause, and it is

* MemoryError, torch.OutOfMemoryError, or a RuntimeError with the text "out of memory" or about an overflow of a size;
* ValueError, TypeError or IndexError with the name of an argument in it;
* RuntimeError or NotImplementedError of torch's dispatcher or autograd (``TORCH``), or with the name liger_ext in it.

A result is right if it has the documented shapes and dtypes, and is finite for values of ordinary size. If the call
has a reference (``Case.judged``), the error of each element against float64 must also be at most the bound of bounds.py
(a multiple of it in float64 and for gradients of parameters) plus twice the largest error of PyTorch's composition in
that row (near the end of a dtype's range both may overflow in intermediate values). A row is exempt if in one of its
elements PyTorch's result is not finite, or if reference plus bound exceed half of the dtype's largest number (for dx:
before the multiplication by its row's upstream gradient). Norms are exempt if squares of their inputs may overflow.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from calls import Call
from ops import promised
from torch import Tensor

from liger_ext import functional
from liger_ext.testing import OPS, _backward, _leaves, expected, named_outputs

MEMORY = r"out of memory|not enough memory|[Cc]annot allocate|can't allocate|size calculation overflowed|overflow"
TORCH = r"liger_ext|Expected a value of type|does not require grad|[Ii]nference tensor|backward through|same device"
ALIASES = {"accum_dtype": "accum|ScalarType", "memory": "chunk_rows|chunk_classes", "bias_dtype": "bias"}


def acceptable(error: BaseException, names: list[str]) -> bool:
    """Returns whether an error explains to the caller what was wrong."""
    text = str(error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, (ValueError, TypeError, IndexError)):
        return bool(re.search(rf"\b({'|'.join([*names, *ALIASES.values()])})\b", text))
    return isinstance(error, (RuntimeError, NotImplementedError)) and bool(re.search(f"{MEMORY}|{TORCH}", text))


def wrong_shapes(call: Call, outputs: dict[str, Tensor]) -> str:
    """Returns an error text if a result's shape or dtype differs from the documented one, else ""."""
    documented = promised(call.op, call.arguments)
    if documented.keys() != outputs.keys():
        return f"results {sorted(outputs)}, promised {sorted(documented)}"
    for name, (shape, dtype) in documented.items():
        found = outputs[name]
        if tuple(found.shape) != shape or found.dtype != (dtype or found.dtype):
            return f"{name} is {found.dtype} {tuple(found.shape)}, promised {dtype} {shape}"
    return ""


def has_references(call: Call) -> bool:
    """Returns whether a reference takes these arguments. The references of the losses require two dimensions and at
    least one class; those of rope and of the norms reject empty rows."""
    tensors = call.tensors()
    flat = all(tensors[n].dim() == 2 for n in ("logits", "x") if n in tensors) or "target" not in tensors
    small = sum(t.numel() for t in tensors.values()) < 1 << 16
    # The squares in a norm overflow from 1.8e19 on. The variance of a row of equal numbers consists of rounding errors.
    moderate = "eps" not in call.arguments or all(
        bool(((t.abs() < 1e18) | ~t.isfinite()).all()) for t in tensors.values()
    )
    return moderate and flat and small and all(t.numel() for t in tensors.values())


def wrong(call: Call, outputs: dict[str, Tensor], gradients: dict[str, Tensor], grads: dict[str, Tensor]) -> str:
    """Returns an error text for a result that is further from float64 than allowed, else ""."""
    inputs, op = dict(call.arguments), OPS[call.op]
    if isinstance(inputs.get("normalizer"), Tensor):
        inputs["normalizer"] = inputs["normalizer"].detach().reshape(())  # a constant
    exact = expected(call.op, inputs, grads, {name: t.dtype for name, t in outputs.items()})
    compute = op.compute_dtype(inputs)
    inputs |= {n: inputs[n].detach() for n in call.constants if isinstance(inputs.get(n), Tensor)}
    leaves = _leaves(inputs, None if op.native else torch.promote_types(compute, torch.float32))
    base = named_outputs(op.baseline(**leaves, **({"stored": compute} if op.stores else {})))
    theirs = base | {f"d{n}": g for n, g in _backward(base, leaves, grads).items()}
    results = outputs | gradients
    matmul = "target" in inputs and "x" in inputs
    if matmul or inputs.get("softcap"):  # rounding decides which of nearly equal logits is the largest
        results.pop("token_accuracy", None)
    if matmul:
        x, weight = (leaves[n].detach().double().abs() for n in ("x", "weight"))
        if bool(((x @ weight.T).nan_to_num() < 1e-36).all(1).any()):  # many logits below the normal range are equal
            results.pop("predicted_tokens", None)
    for name, ours in results.items():
        judged = exact[name]
        if judged.allowed is None:
            # Softcap makes large logits equal, in the reference too; NaN has no order.
            finite = all(bool(t.isfinite().all()) for t in call.tensors().values() if t.is_floating_point())
            if finite and call.arguments["softcap"] is None and judged.share(ours) > 1:
                return f"{name} differs"
            continue
        allowed, limit = judged.allowed, torch.finfo(ours.dtype).max / 2
        if name[1:] in op.parameters:
            # The terms of a sum over rows may cancel. The largest column does not show that if there are few or equal
            # columns.
            terms = sum(g.detach().double().abs().sum() for g in grads.values() if bool(g.isfinite().all()))
            allowed = 16 * allowed + terms * torch.finfo(torch.promote_types(ours.dtype, torch.float32)).eps
        if name == "dx" and inputs.get("reduction") == "none" and "loss" in grads:
            limit = limit * grads["loss"].detach().double().abs().clamp(max=1).unsqueeze(-1)
        off = violation(
            ours.detach().double(), judged.value.detach(), allowed, theirs[name].detach().double(), ours.dtype, limit
        )
        if off:
            return f"{name} {off}"
    return ""


def violation(ours: Tensor, exact: Tensor, allowed: Tensor, theirs: Tensor, dtype: torch.dtype, limit) -> str:
    asked = exact.isfinite() & theirs.isfinite() & (allowed >= 0) & (allowed + exact.abs() <= limit)
    slack = (theirs - exact).abs().masked_fill(~asked, 0)
    if slack.dim():
        if not slack.shape[-1]:
            return ""
        asked = asked & asked.all(-1, keepdim=True)
        slack = slack.amax(-1, keepdim=True)
    error = (ours - exact).abs()
    if dtype == torch.float64:  # the reference has as many roundings
        allowed = 4 * allowed
    bad = asked & ~(error <= allowed + 2 * slack)
    if not bool(bad.any()):
        return ""
    at = int((error / allowed).masked_fill(~bad, -1).nan_to_num(torch.inf).flatten().argmax())
    found, should, bound = (t.expand_as(exact).flatten()[at].item() for t in (ours, exact, allowed))
    what = "further from float64 than the bound" if bool(ours[bad].isfinite().all()) else "not finite where PyTorch is"
    return f"is {what}: element {at} is {found:.6g}, should be {should:.6g}, bound {bound:.3g}"


def unlike_cross_entropy(call: Call, gradients: dict[str, Tensor], grads: dict[str, Tensor]) -> str:
    """Returns an error text if gradients of the fused loss differ from those of liger_ext's cross_entropy of the same
    logits by more than 5 % of the largest, else "". It applies where every target has a class weight of 0, because
    PyTorch then returns 0 / 0."""
    a = call.arguments
    if (
        call.op != "fused_linear_cross_entropy"
        or a["normalizer"] is not None
        or a["use_token_scaling"]
        or "loss" not in grads
    ):
        return ""
    target, ce_weight = a["target"].flatten(), a["ce_weight"]
    if a["reduction"] != "mean" or not isinstance(ce_weight, Tensor) or ce_weight.dtype.is_complex:
        return ""
    if bool(ce_weight.detach().flatten()[target[target != a["ignore_index"]]].any()):
        return ""
    given = [t for t in (*call.tensors().values(), *grads.values()) if t.is_floating_point() and t.numel()]
    if not all(bool(t.detach().abs().amax() < 1e4) for t in given):
        return ""
    wide = {n: t.detach().cpu().double().requires_grad_() for n, t in call.tensors().items() if t.is_floating_point()}
    logits = wide["x"] @ wide["weight"].T + wide.get("bias", 0)
    options = ("ignore_index", "reduction", "label_smoothing", "lse_square_scale", "softcap")
    ce_weight = wide["ce_weight"].detach() if "ce_weight" in wide else None
    loss = functional.cross_entropy(logits, a["target"].cpu(), ce_weight, **{n: a[n] for n in options})
    for name, ours in gradients.items():
        (exact,) = torch.autograd.grad(loss, wide[name[1:]], grads["loss"].cpu().double(), retain_graph=True)
        error, largest = (ours.detach().cpu().double() - exact).abs(), exact.abs().amax() if exact.numel() else 0
        if exact.isfinite().all() and not bool((error <= 0.05 * largest + 1e-6).all()):
            return f"{name} is not that of cross_entropy"
    return ""


def normal_form(text: Any) -> str:
    """Returns a finding's text without its numbers, by which findings are grouped."""
    first = str(text).strip().splitlines()[0] if str(text).strip() else ""
    first = re.sub(r"'\w+' object has no attribute '\w+'", "'…' object has no attribute '…'", first)
    return re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", first)[:160]
