"""Compares the ops' results with float64 references and PyTorch's compositions, for the tests, the doctor and numerics.

Every result must pass two checks: the rule of ``rule.py``, which compares with PyTorch's own error, and the absolute
bound of ``bounds.py``, which is the same on every platform. ``compare`` runs an op and PyTorch's composition.
``expected`` runs neither; it returns references and bounds for results that were computed elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from liger_ext._tuned import forced_knobs as forced_plans
from liger_ext.bounds import bound, half_ulp
from liger_ext.ops._checks import accumulator
from liger_ext.records import RECORDS, InputFactory
from liger_ext.rule import FACTOR, STEPS, Measurement, check, measure

__all__ = [
    "FACTOR",
    "OPS",
    "STEPS",
    "Expected",
    "Measurement",
    "bound",
    "check",
    "compare",
    "examples",
    "expected",
    "forced_plans",
    "half_ulp",
    "judge",
    "measure",
    "self_test",
]


OPS = RECORDS
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def named_outputs(result: Any, bare: str = "out") -> dict[str, Tensor]:
    """Returns an op's result as named tensors. The result may be a tensor (called ``bare``), a tuple, a mapping, or an
    object with loss, z_loss, ... ."""
    if isinstance(result, Tensor):
        return {bare: result}
    if isinstance(result, Mapping):
        return {k: v for k, v in result.items() if v is not None}
    if hasattr(result, "loss"):
        names = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
        return {name: getattr(result, name) for name in names if getattr(result, name) is not None}
    return {f"out{i}": t for i, t in enumerate(result) if t is not None}


def _leaves(inputs: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Returns new leaves with the same values, and with the same memory and strides unless ``dtype`` changes them."""
    leaves = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            leaf = value.detach() if dtype is None else value.detach().to(dtype)
            leaves[name] = leaf.requires_grad_(value.requires_grad)
        else:
            leaves[name] = value
    return leaves


def _backward(
    outputs: Mapping[str, Tensor], leaves: Mapping[str, Any], grads: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the gradients of all leaves that require one. ``grads``: the upstream gradients by the outputs' names."""
    wanted = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    used = {k: v for k, v in outputs.items() if v.requires_grad and k in grads}
    if not wanted or not used:
        return {}
    upstream = [grads[k].to(v.dtype) for k, v in used.items()]
    found = torch.autograd.grad(list(used.values()), list(wanted.values()), upstream, allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(wanted.items(), found, strict=True)}


@dataclass(frozen=True)
class Expected:
    """A result in float64, and the largest error that it may have on any platform. ``allowed`` is None for a result
    that must be equal to ``value``; predicted classes may also be classes that ``scale``, bool [rows, classes],
    marks."""

    value: Tensor
    allowed: Tensor | None
    scale: Tensor | float | None
    terms: int = 1

    def share(self, result: Tensor) -> float:
        """Returns the largest error / bound of a platform's result. Non-finite elements must agree, or it is inf."""
        exact, ours = self.value.detach().double(), result.detach().to(self.value.device, torch.float64)
        if self.allowed is None:
            right = exact == ours
            if isinstance(self.scale, Tensor):
                at = ours.long().flatten()[:, None].clamp(0, self.scale.shape[1] - 1)
                named = self.scale.gather(1, at).view_as(right) & (ours < self.scale.shape[1])
                right |= named & (ours >= 0) & (exact >= 0)
            return 0.0 if bool(right.all()) else math.inf
        finite = exact.isfinite() & (exact.abs() <= torch.finfo(result.dtype).max)
        same = torch.equal(ours[~finite].nan_to_num(7e77, 8e88, -8e88), exact[~finite].nan_to_num(7e77, 8e88, -8e88))
        if not same or not bool(ours[finite].isfinite().all()):
            return math.inf
        return ((ours - exact).abs() / self.allowed)[finite].max().item() if bool(finite.any()) else 0.0


def expected(
    name: str,
    inputs: Mapping[str, object],
    grads: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    compute_dtype: torch.dtype | None = None,
) -> dict[str, Expected]:
    """Computes the expected results and bounds of one call of an op, forward and backward, without running the op or
    PyTorch's composition. Returns them by the results' names; the gradient of x is called "dx".

    ``inputs``: the op's arguments by name; gradients are computed for tensors with ``requires_grad``. ``grads``: the
    upstream gradients by the outputs' names. ``dtypes``: the outputs' dtypes by their names. ``compute_dtype``: the
    dtype of the op's matmuls, by default the inputs'.
    """
    op = OPS[name]
    compute = compute_dtype or op.compute_dtype(inputs)
    stored = {"stored": compute} if op.stores else {}
    leaves = _leaves(inputs, torch.float64)
    outputs = named_outputs(op.reference(**leaves, **stored))
    gradients = _backward(outputs, leaves, grads)
    with torch.no_grad():
        wide = {key: gradient.double() for key, gradient in grads.items()}
        scales = op.scales({**leaves, "compute_dtype": compute, **stored}, outputs, wide)
    floating = [v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
    length, rounded = op.length(inputs), op.rounded(inputs)

    def judged(what: str, value: Tensor, dtype: torch.dtype, terms: int = 1) -> Expected:
        if not dtype.is_floating_point:
            return Expected(value, None, scales.get(what))
        size = scales.get(f"{what} bound", scales.get(what))
        if size is None:  # the largest value of the row
            size = value.detach().abs().nan_to_num(0, 0, 0)
            size = size.amax(-1, keepdim=True) if size.dim() and size.numel() else size
        rule = {"compute": compute, "length": length, "terms": terms, "stored": compute if what in rounded else None}
        return Expected(value, bound(name, what, value.detach(), dtype, size, **rule), scales.get(what), terms)

    work = max([t.numel() for t in (*floating, *outputs.values())], default=1)
    measurements = {
        key: judged(key, value.double() if value.is_floating_point() else value, dtypes[key])
        for key, value in outputs.items()
        if key in dtypes
    }
    for key, gradient in gradients.items():
        terms = work // max(1, gradient.numel()) if key in op.parameters else 1
        measurements["d" + key] = judged("d" + key, gradient, inputs[key].dtype, terms)
    return measurements


def compare(
    name: str,
    inputs: Mapping[str, object],
    *,
    grad: float | None = None,
    run: Callable[..., object] | None = None,
    compute_dtype: torch.dtype | None = None,
    base_autocast: bool = False,
) -> list[Measurement]:
    """Runs an op, PyTorch's composition and the float64 reference, forward and backward, and measures every output and
    gradient.

    ``inputs``: the op's arguments by name; gradients are computed for tensors with ``requires_grad``. ``grad``: the
    upstream gradient of every output; by default random, and the same for all three. ``run`` replaces the op, for
    instance by its compiled form. ``compute_dtype``: the dtype of the op's matmuls, if autocast changes it.
    ``base_autocast``: PyTorch's composition runs under autocast to this dtype, too.
    """
    op = OPS[name]
    compute = compute_dtype or op.compute_dtype(inputs)
    leaves, base_leaves = _leaves(inputs), _leaves(inputs, None if op.native else accumulator(compute))
    outputs = named_outputs((run or op.run)(**leaves), op.outputs[0])
    device = next(t.device for t in outputs.values())
    with torch.autocast(device.type, compute, enabled=base_autocast):
        base = named_outputs(op.baseline(**base_leaves, **({"stored": compute} if op.stores else {})))

    generator = torch.Generator().manual_seed(sum(t.numel() for t in outputs.values()))
    grads = {}
    for key, out in outputs.items():
        if out.requires_grad:
            random = torch.randn(out.shape, generator=generator) if grad is None else torch.full(out.shape, grad)
            # The upstream gradient of a loss is of ordinary size, never near 0.
            grads[key] = (random.abs() + 0.5 if grad is None and out.dim() == 0 else random).to(out.device, out.dtype)
    exact = expected(name, inputs, grads, {key: out.dtype for key, out in outputs.items()}, compute)
    ours = outputs | {"d" + key: gradient for key, gradient in _backward(outputs, leaves, grads).items()}
    theirs = base | {"d" + key: gradient for key, gradient in _backward(base, base_leaves, grads).items()}

    results = []
    for what, result in ours.items():
        found = exact[what]
        if found.allowed is None:
            share = found.share(result)
            results.append(Measurement(name, what, result.dtype, "different", share, 1.0, share))
            continue
        if what not in outputs and result.dtype != inputs[what[1:]].dtype:
            raise AssertionError(f"{name} {what}: dtype {result.dtype}, expected that of {what[1:]}")
        rule = {"scale": found.scale, "terms": found.terms, "allowed": found.allowed, "compute": compute}
        baseline = theirs[what].to(result.dtype)
        results.append(measure(name, what, result, found.value, baseline, unbiased=not op.native, **rule))
    return results


def judge(
    name: str, inputs: Mapping[str, object], **options: float | Callable[..., object] | torch.dtype | None
) -> list[Measurement]:
    """Runs ``compare``. Raises AssertionError for the worst result if it breaks the rule."""
    results = compare(name, inputs, **options)
    worst = max(results, key=lambda m: m.ratio)
    if not worst.ratio <= 1:
        shapes = {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        raise AssertionError(f"further from float64 than the rule allows: {worst}\nwith {shapes}")
    return results


def examples(
    device: torch.device | str = "cpu",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    tokens: int = 48,
    hidden: int = 320,
    vocab: int = 1003,
) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields an example of every op in each dtype, at a small Llama-like shape: the op's name, and its arguments as
    leaves. ``tokens`` must be even."""
    for dtype in dtypes:
        for name, record in RECORDS.items():
            yield name, record.inputs(InputFactory(dtype, device), record.example(tokens, hidden, vocab))


def self_test(device: torch.device | str = "cpu", dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[Measurement]:
    """Runs every op forward and backward at a small Llama-like shape. Yields one measurement for each output and
    gradient."""
    for name, inputs in examples(device, dtypes):
        yield from compare(name, inputs)
