"""How liger_ext is judged: references in float64, PyTorch's own compositions, and one rule. Used by the tests and
by the doctor.

**The rule.** Every output and every gradient is compared with a float64 reference that gets the same inputs,
upcast. PyTorch's own functions get the same inputs, compute in the accumulator's dtype (fp32, or fp64 for fp64) and
round once, and are compared with the same reference; where a value between is stored in 16 bits by nature (the
logits of the fused loss, softmax's y), they run in the inputs' dtypes. Element i's error is measured in units of

    u[i] = half an ulp of the output's dtype at reference[i]  +  STEPS half-ulps of the accumulator's dtype at scale[i],

where ``scale`` is the size of the intermediate values that the element is computed from (by default the largest of
its row; times sqrt(terms) / 2 for a sum over many rows). One rounding gives errors uniform in [-1, 1]. Then

    largest error  <=  1                     +  FACTOR * PyTorch's largest error
    rms error      <=  rms of one rounding   +  FACTOR * PyTorch's rms error
    |mean error|   <=  what chance allows    +  FACTOR * |PyTorch's mean error|

The last, where errors away from zero count as positive, is asked of 16-bit results: it finds truncation and whatever is
systematically too large or too small. FACTOR and STEPS are the only tolerances.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from liger_ext.ops._checks import accumulator
from liger_ext.references import losses, rows

__all__ = ["FACTOR", "OPS", "STEPS", "Measurement", "Op", "check", "compare", "judge", "measure", "self_test"]

FACTOR = 1.5
"""How much larger than PyTorch's own error ours may be, before the half ulp of rounding is added."""
STEPS = {torch.float32: 4, torch.float64: 32}
"""Roundings in the accumulator's dtype that a result may carry. float64 has more: there the reference itself is
rounded."""


def half_ulp(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between neighbours of ``dtype`` around each element of ``value`` (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.abs().clamp(min=info.smallest_normal))[1] - 1
    return torch.ldexp(torch.full_like(value, info.eps / 2), exponent)


@dataclass(frozen=True)
class Measurement:
    """One output or gradient, judged: the error and the bound of the measure that came closest to its bound, in
    units of u."""

    op: str
    what: str
    dtype: torch.dtype
    measure: str
    error: float
    bound: float

    @property
    def ratio(self) -> float:
        """error / bound: at most 1 is a pass."""
        return self.error / self.bound if self.bound else math.inf

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        numbers = f"error {self.error:.3g}, bound {self.bound:.3g}, ratio {self.ratio:.2f}"
        return f"{self.op} {self.what} {dtype}: {self.measure} {numbers}"


def measure(
    op: str,
    what: str,
    result: Tensor,
    reference: Tensor,
    baseline: Tensor,
    *,
    compute: torch.dtype | None = None,
    scale: Tensor | float | None = None,
    terms: int = 1,
    unbiased: bool = True,
) -> Measurement:
    """Applies the rule; the caller decides what a ratio above 1 means. ``reference`` is float64; the op works in the
    accumulator of ``compute``, by default the result's dtype."""
    dtype = result.dtype
    if result.shape != reference.shape:
        raise AssertionError(f"{op} {what}: shape {tuple(result.shape)}, expected {tuple(reference.shape)}")
    if result.numel() == 0:
        return Measurement(op, what, dtype, "empty", 0.0, 1.0)
    ours, base, exact = (t.detach().to(torch.float64) for t in (result, baseline, reference))

    # What is not finite must agree, and what is beyond the dtype's range must be as large as can be.
    limit = torch.finfo(dtype).max * (1 - torch.finfo(dtype).eps)
    finite = exact.abs() < limit
    if not bool(finite.all()):
        special, beyond = ~exact.isfinite(), exact.isfinite() & ~finite
        same = torch.equal(*(t[special].nan_to_num(7e77, 8e88, -8e88) for t in (ours, exact)))
        if not same or not bool((ours[beyond] * exact[beyond].sign() >= limit).all()):
            return Measurement(op, what, dtype, "non-finite", math.inf, 1.0)
        if not bool(finite.any()):
            return Measurement(op, what, dtype, "non-finite", 0.0, 1.0)

    if scale is None:
        magnitude = exact.abs().masked_fill(~finite, 0)
        scale = magnitude.amax(-1, keepdim=True) if magnitude.dim() else magnitude
    acc = accumulator(compute or dtype)
    step = STEPS[acc] * torch.finfo(acc).eps / 2 * max(1.0, math.sqrt(terms) / 2)
    floor = torch.as_tensor(scale, dtype=torch.float64, device=exact.device) * step
    away = torch.where(exact < 0, -1.0, 1.0) / (half_ulp(exact, dtype) + floor).clamp(min=1e-300)
    error, theirs = (ours - exact) * away, (base - exact) * away
    if not bool(finite.all()):
        error, theirs = error[finite], theirs[finite]
    largest, rms, mean = _statistics(error)
    if not math.isfinite(largest):
        return Measurement(op, what, dtype, "non-finite", math.inf, 1.0)
    base_largest, base_rms, base_mean = _statistics(theirs)
    if not math.isfinite(base_largest):
        base_largest, base_rms, base_mean = _statistics(theirs[theirs.isfinite()])

    # A uniform error in [-1, 1] has mean square 1/3 +- 0.3 / sqrt(n), and mean 0 +- 0.58 / sqrt(n).
    noise = 1 / math.sqrt(error.numel())
    rounding_rms = math.sqrt(min(1.0, 1 / 3 + 5 * 0.3 * noise))
    measures = [("largest", largest, 1 + FACTOR * base_largest), ("rms", rms, rounding_rms + FACTOR * base_rms)]
    if unbiased and torch.finfo(dtype).bits == 16:
        measures.append(("mean", mean, 0.05 + 6 * rms * noise + FACTOR * base_mean))
    return max((Measurement(op, what, dtype, *m) for m in measures), key=lambda m: m.ratio)


def _statistics(error: Tensor) -> list[float]:
    """Largest magnitude, root mean square, and magnitude of the mean; zeros for nothing."""
    if error.numel() == 0:
        return [0.0, 0.0, 0.0]
    low, high = error.aminmax()
    largest = torch.maximum(-low, high)
    return torch.stack([largest, torch.linalg.vector_norm(error) / error.numel() ** 0.5, error.mean().abs()]).tolist()


def check(*args: Any, **kwargs: Any) -> Measurement:
    """As ``measure``; raises AssertionError with op, dtype, error, bound and ratio when the rule is broken."""
    result = measure(*args, **kwargs)
    if not result.ratio <= 1:
        raise AssertionError(f"further from float64 than the rule allows: {result}")
    return result


@dataclass(frozen=True)
class Op:
    """One op under the rule: how it runs, what it should give, what PyTorch gives, and the sizes of its
    intermediates."""

    run: Callable[..., Any]
    reference: Callable[..., Any]
    baseline: Callable[..., Any]
    scales: Callable[..., Mapping[str, Tensor | float]] = lambda inputs, outputs, grads: {}
    parameters: tuple[str, ...] = ()  # inputs whose gradient is a sum over rows
    stores: bool = False  # rounds a value on the way: its functions take ``stored``
    native: bool = False  # PyTorch runs in the inputs' dtypes, and rounding errors need not average out


def outputs_of(result: Any, bare: str = "out") -> dict[str, Tensor]:
    """An op's result as named tensors: a tensor (called ``bare``), a tuple, or an object with loss, z_loss, … ."""
    if isinstance(result, Tensor):
        return {bare: result}
    if isinstance(result, Mapping):
        return {k: v for k, v in result.items() if v is not None}
    if hasattr(result, "loss"):
        names = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
        return {name: getattr(result, name) for name in names if getattr(result, name) is not None}
    return {f"out{i}": t for i, t in enumerate(result)}


def _leaves(inputs: Mapping[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Fresh leaves over the same values (and, in the same dtype, the same memory and strides)."""
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
    """Gradients of all leaves that require one, from the given gradients of the outputs."""
    wanted = {k: v for k, v in leaves.items() if isinstance(v, Tensor) and v.requires_grad}
    used = {k: v for k, v in outputs.items() if v.requires_grad and k in grads}
    if not wanted or not used:
        return {}
    given = [grads[k].to(v.dtype) for k, v in used.items()]
    found = torch.autograd.grad(list(used.values()), list(wanted.values()), given, allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(wanted.items(), found, strict=True)}


def compare(
    name: str,
    inputs: Mapping[str, Any],
    *,
    grad: float | None = None,
    run: Callable[..., Any] | None = None,
    compute_dtype: torch.dtype | None = None,
    base_autocast: bool = False,
) -> list[Measurement]:
    """Runs one op forward and backward as it is, in PyTorch and in float64, and measures every output and gradient.

    ``inputs``: the op's arguments by name; a gradient is wanted of the tensors with ``requires_grad``. ``grad``:
    the gradient of every output; by default random, the same for all three. ``run`` replaces the op (by its
    compiled form, say). ``compute_dtype``: that of the op's matmuls, where autocast chooses another than the
    inputs'; ``base_autocast``: PyTorch's composition runs under autocast to it too.
    """
    op = OPS[name]
    floating = [v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
    if compute_dtype is None:
        names = {"fused_linear_cross_entropy": ("x", "weight"), "add_rms_norm": ("x", "residual")}.get(name, ())
        operands = [inputs[k].dtype for k in names] or [floating[0].dtype]
        compute_dtype = functools.reduce(torch.promote_types, operands)
    stored = {"stored": compute_dtype} if op.stores else {}

    leaves, exact_leaves = _leaves(inputs), _leaves(inputs, torch.float64)
    base_leaves = _leaves(inputs, None if op.native else accumulator(compute_dtype))
    bare = "loss" if name.endswith("cross_entropy") else "out"
    outputs = outputs_of((run or op.run)(**leaves), bare)
    exact = outputs_of(op.reference(**exact_leaves, **stored))
    with torch.autocast(floating[0].device.type, compute_dtype, enabled=base_autocast):
        base = outputs_of(op.baseline(**base_leaves, **stored))

    generator = torch.Generator().manual_seed(sum(t.numel() for t in outputs.values()))
    grads = {}
    for key, out in outputs.items():
        if out.requires_grad:
            random = torch.randn(out.shape, generator=generator) if grad is None else torch.full(out.shape, grad)
            # A loss is scaled by a number of ordinary size, whatever chance says.
            grads[key] = (random.abs() + 0.5 if grad is None and out.dim() == 0 else random).to(out.device, out.dtype)
    found = _backward(outputs, leaves, grads)
    exact_grads = _backward(exact, exact_leaves, grads)
    base_grads = _backward(base, base_leaves, grads)

    with torch.no_grad():
        wide_grads = {k: g.double() for k, g in grads.items()}
        scales = op.scales({**exact_leaves, "compute_dtype": compute_dtype, **stored}, exact, wide_grads)
    results = []
    rule = {"compute": compute_dtype, "unbiased": not op.native}
    for key, out in outputs.items():
        if not out.is_floating_point():
            same = torch.equal(out, exact[key])
            results.append(Measurement(name, key, out.dtype, "different", 0.0 if same else math.inf, 1.0))
            continue
        results.append(measure(name, key, out, exact[key], base[key].to(out.dtype), scale=scales.get(key), **rule))
    work = max([t.numel() for t in (*floating, *outputs.values())], default=1)
    for key, gradient in found.items():
        dtype, what = inputs[key].dtype, "d" + key
        if gradient.dtype != dtype:
            raise AssertionError(f"{name} {what}: dtype {gradient.dtype}, expected that of {key}, {dtype}")
        terms = work // max(1, gradient.numel()) if key in op.parameters else 1
        theirs = base_grads[key].to(dtype)
        results.append(
            measure(name, what, gradient, exact_grads[key], theirs, scale=scales.get(what), terms=terms, **rule)
        )
    return results


def judge(name: str, inputs: Mapping[str, Any], **kwargs: Any) -> list[Measurement]:
    """As ``compare``; raises AssertionError for the worst result that breaks the rule."""
    results = compare(name, inputs, **kwargs)
    worst = max(results, key=lambda m: m.ratio)
    if not worst.ratio <= 1:
        shapes = {k: (tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for k, v in inputs.items()}
        raise AssertionError(f"further from float64 than the rule allows: {worst}\nwith {shapes}")
    return results


def _functional(name: str) -> Callable[..., Any]:
    def run(**kwargs: Any) -> Any:
        from liger_ext import functional

        return getattr(functional, name)(**kwargs)

    return run


def _op(module: ModuleType, name: str, **kwargs: Any) -> Op:
    scales = getattr(module, f"{name}_scales", Op.scales)
    return Op(_functional(name), getattr(module, name), getattr(module, f"torch_{name}"), scales, **kwargs)


OPS: dict[str, Op] = {
    "rms_norm": _op(rows, "rms_norm", parameters=("weight",), stores=True),
    "add_rms_norm": _op(rows, "add_rms_norm", parameters=("weight",), stores=True),
    "layer_norm": _op(rows, "layer_norm", parameters=("weight", "bias")),
    "swiglu": _op(rows, "swiglu"),
    "geglu": _op(rows, "geglu"),
    "swiglu_packed": _op(rows, "swiglu_packed"),
    "geglu_packed": _op(rows, "geglu_packed"),
    "rope": _op(rows, "rope"),
    "softmax": _op(rows, "softmax", native=True),
    "cross_entropy": _op(losses, "cross_entropy"),
    "fused_linear_cross_entropy": _op(losses, "fused_linear_cross_entropy", native=True),
}


def examples(
    device: torch.device | str = "cpu", dtypes: tuple[torch.dtype, ...] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every op at a small Llama-like shape, in each dtype: its name, and leaves as its arguments."""
    if dtypes is None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).to(device, dtype).requires_grad_()

    tokens, hidden, vocab = 48, 320, 1003
    target = torch.randint(0, vocab, (tokens,), generator=generator)
    target[::7] = -100
    target = target.to(device)
    angle = torch.rand(1, tokens // 2, 64, generator=generator).to(device) * 6
    for dtype in dtypes:
        x, residual = random(tokens, hidden, dtype=dtype), random(tokens, hidden, dtype=dtype)
        weight, bias = random(hidden, dtype=dtype, mean=1, scale=0.3), random(hidden, dtype=dtype)
        logits = random(tokens, vocab, dtype=dtype, scale=3)
        head = random(vocab, hidden, dtype=dtype, scale=0.1)
        q, k = random(2, 8, tokens // 2, 64, dtype=dtype), random(2, 2, tokens // 2, 64, dtype=dtype)
        yield "rms_norm", {"x": x, "weight": weight}
        yield "add_rms_norm", {"x": x, "residual": residual, "weight": weight}
        yield "layer_norm", {"x": x, "weight": weight, "bias": bias}
        yield "swiglu", {"gate": x, "up": residual}
        yield "geglu", {"gate": x, "up": residual}
        yield "rope", {"q": q, "k": k, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
        yield "softmax", {"x": logits}
        yield "cross_entropy", {"logits": logits, "target": target}
        yield "fused_linear_cross_entropy", {"x": x, "weight": head, "target": target}


def self_test(
    device: torch.device | str = "cpu", dtypes: tuple[torch.dtype, ...] | None = None
) -> Iterator[Measurement]:
    """Every op, forward and backward, at a small Llama-like shape: yields one measurement for each output and
    gradient."""
    for name, inputs in examples(device, dtypes):
        yield from compare(name, inputs)
