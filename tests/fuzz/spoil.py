"""Functions that spoil the arguments of a valid call. Each changes a Case and records which outcomes are acceptable."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from calls import Call
from torch import Tensor

from liger_ext import functional
from liger_ext.records import RECORDS

NAN, INF = float("nan"), float("inf")
EXTREMES = [NAN, INF, -INF, 0.0, -0.0, 1e-45, 1e-30, 1024.0, 65504.0, 8e37, -8e37, 3.4e38]
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WRONG_DTYPES = [
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]
NOT_TENSORS = [None, "x", 3, 1.5, [1.0, 2.0]]
INTEGERS = [-(2**63), -(2**31), -100, -2, -1, 0, 1, 2, 3, 7, 2**31, 2**40, 2**63 - 1]
FLOATS = [NAN, INF, -INF, 0.0, -1.0, -1e-300, 1e-300, 0.5, 2.0, 1e38, 1e308]
NEVER, MAY, MUST = 0, 1, 2


@dataclass
class Case:
    """A call and the expectations of its outcome."""

    call: Call
    rng: Random
    faults: dict[str, int] = field(default_factory=dict)  # by argument: NEVER, MAY or MUST raise
    ordinary: bool = True  # the values have ordinary sizes, so the results must be finite
    judged: bool = True  # the results are compared with a reference
    notes: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any, raises: int, note: str) -> None:
        self.call = self.call.with_tensors({name: value})
        self.faults[name] = max(self.faults.get(name, NEVER), raises)
        self.notes.append(f"{name}: {note}")

    @property
    def raises(self) -> int:
        return max(self.faults.values(), default=NEVER)

    def pick(self, floating: bool = False) -> tuple[str, Tensor] | None:
        """Picks a tensor that is not yet spoiled and small enough to copy."""
        tensors = [(n, t) for n, t in self.call.tensors().items() if t.numel() < 1 << 20 and n not in self.faults]
        found = [(n, t) for n, t in tensors if t.is_floating_point() or not floating]
        return self.rng.choice(found) if found else None


def values(case: Case) -> None:
    """Sets one element, some or all elements to an extreme value."""
    name, t = case.pick(floating=True) or ("", None)
    if t is None or not t.numel() or t.device.type == "meta":
        return
    rng, t, value = case.rng, t.clone(memory_format=torch.contiguous_format), case.rng.choice(EXTREMES)
    value = value if abs(value) <= torch.finfo(t.dtype).max or value in (INF, -INF) or value != value else INF
    how = rng.choice(["one", "every third", "all", "random signs"])
    flat = t.view(-1)
    if how == "one":
        flat[rng.randrange(t.numel())] = value
    elif how == "random signs":
        t.mul_(value)
    else:
        flat[:: 3 if how == "every third" else 1] = value
    case.set(name, t, NEVER, f"{value} in {how}")
    case.ordinary = False
    # Class weights of both signs cancel, and sums in 16 bits overflow where PyTorch's do not.
    case.judged = case.judged and name not in case.call.constants and case.call.arguments.get("accum_dtype") is None


def zero_class_weights(case: Case) -> None:
    name = next(iter(case.call.constants), "")
    weight = case.call.arguments.get(name)
    target = case.call.arguments.get("target")
    if all(
        isinstance(t, Tensor) and t.dtype in dtypes and t.device.type != "meta" and t.numel() < 1 << 20
        for t, dtypes in ((weight, FLOATING), (target, [torch.int64]))
    ):
        how = case.rng.choice(["zero", "negative", "zero where targets are"])
        changed = weight.clone(memory_format=torch.contiguous_format)
        if how == "negative":
            changed = -changed
        elif how == "zero":
            changed.zero_()
        else:
            changed.view(-1)[target[(target >= 0) & (target < changed.numel())]] = 0
        case.set(name, changed, NEVER, how)
        case.ordinary = False


def dtype(case: Case) -> None:
    name, t = case.pick() or ("", None)
    if t is None:
        return
    if t.is_floating_point() and case.rng.randrange(3) == 0:
        case.set(name, t.to(case.rng.choice([torch.float64, torch.float32, torch.bfloat16])), MAY, "another dtype")
        return
    wrong = case.rng.choice(WRONG_DTYPES if t.is_floating_point() else [*WRONG_DTYPES, torch.float32, torch.bfloat16])
    if wrong == t.dtype:
        return
    # The ops convert class weights, the normalizer and targets of uint8.
    converted = name in case.call.constants and "target" in case.call.arguments
    converted = converted or (name == "target" and wrong == torch.uint8)
    case.set(name, t.to(wrong), MAY if converted else MUST, str(wrong))
    case.judged = False


def shape(case: Case) -> None:
    name, t = case.pick() or ("", None)
    if t is None:
        return
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.unsqueeze(0),
        lambda t: t.unsqueeze(-1),
        lambda t: t.flatten(),
        lambda t: t[..., :0] if t.dim() else t,
        lambda t: t[..., :1] if t.dim() else t,
        lambda t: t[..., :-1] if t.dim() else t,
        lambda t: t[:-1] if t.dim() else t,
        lambda t: t[0] if t.dim() and t.shape[0] else t,
        lambda t: torch.cat([t, t], -1) if t.dim() else t,
        lambda t: t.transpose(0, -1) if t.dim() else t,
        lambda t: t.expand(2, *t.shape),
        lambda t: t.reshape(-1)[:1].reshape(()) if t.numel() else t,
    ]
    case.set(name, case.rng.choice(changes)(t), MAY, "another shape")


def huge(case: Case) -> None:
    """Expands tensors to sizes whose product exceeds 2^31, the memory, or 2^63, without allocating memory."""
    size = case.rng.choice([2**16, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**40, 2**62])
    names = list(case.call.tensors())
    if case.rng.randrange(2) and names:
        names = [case.rng.choice(names)]
    elif RECORDS[case.call.op].llama.hidden:
        size = max(size, 2**31)  # else rows times classes fit into memory, and the call takes minutes
    first = case.rng.randrange(2) == 0
    for name in names:
        t = case.call.arguments[name]
        if t.dim() == 0 or not t.numel():
            continue
        at = 0 if first else -1
        try:
            case.set(
                name,
                t.narrow(at, 0, 1).expand(*(size if d == at % t.dim() else -1 for d in range(t.dim()))),
                MAY,
                f"{size} long",
            )
        except RuntimeError:  # raised by torch: the number of elements exceeds 64 bits
            continue
    case.ordinary = case.judged = False


def target(case: Case) -> None:
    target, logits = case.call.arguments.get("target"), case.call.arguments.get("logits")
    classes = case.call.arguments.get("weight") if logits is None else logits
    if case.faults or not all(isinstance(t, Tensor) and 0 < t.numel() < 1 << 20 for t in (target, classes)):
        return
    count = classes.shape[0 if logits is None else -1]
    bad = case.rng.choice([-1, count, count + 1, -2, -100, -99, 2**31, 2**62, -(2**63)])
    changed, inside = (
        target.clone(memory_format=torch.contiguous_format),
        0 <= bad < count or bad == case.call.arguments.get("ignore_index"),
    )
    changed.view(-1)[case.rng.randrange(target.numel())] = bad
    case.set("target", changed, NEVER if inside else MUST, f"{bad} of {count} classes")


OPTIONS: dict[str, list[tuple[Any, int]]] = {
    "eps": [(v, NEVER) for v in FLOATS] + [("x", MUST), (None, MUST)],
    "offset": [(v, NEVER) for v in FLOATS] + [("x", MUST)],
    "casting_mode": [(0, NEVER), (1, NEVER), (-1, NEVER), (2, MUST), ("Llama", MUST), (None, MUST), (2**70, MUST)],
    "gate_multiplier": [(v, NEVER) for v in FLOATS] + [(None, MUST)],
    "down_multiplier": [(v, NEVER) for v in FLOATS] + [(None, MUST)],
    "approximate": [("erf", MUST), (None, MUST), (1, MUST)],
    "layout": [("interleaved", NEVER), ("interleaved_to_halves", NEVER), ("pairs", MUST), (1, MUST), (None, MUST)],
    "half_tables": [(1, MAY), (None, MAY), ("x", MAY)],
    "unsqueeze_dim": [(0, MUST), (3, MUST), (-1, MUST), (None, MUST), (2**70, MUST)],
    "ignore_index": [(v, MAY) for v in INTEGERS] + [(2**63, MUST), (1.5, MUST), (None, MUST)],
    "reduction": [("avg", MUST), (None, MUST), (1, MUST), ("", MUST)],
    "label_smoothing": [(-0.1, MUST), (1.1, MUST), (NAN, MUST), (INF, MUST), (1.0, NEVER), ("x", MUST)],
    "lse_square_scale": [(v, NEVER) for v in FLOATS] + [(None, MUST)],
    "softcap": [(v, MUST) for v in (0.0, -1.0, NAN, INF, 1e-300, 1e300, "x")]
    + [(v, NEVER) for v in (1e-18, 1e-3, 30, 1e18)],
    "return_z_loss": [(1, MAY), (None, MAY), ("x", MAY)],
    "memory": [(v, MUST if v <= 0 else NEVER if v >= 2**31 else MAY) for v in INTEGERS]
    + [(NAN, MUST), (INF, MUST), (0.5, MUST), ("all", MUST), (True, MUST)],
    "accum_dtype": [(torch.int32, MUST), (torch.bool, MUST), (torch.float16, MAY), ("x", MUST)],
    "normalizer": [(v, NEVER if abs(v) < 1e38 else MAY) for v in FLOATS]
    + [(0, NEVER), (-3, NEVER), ("x", MUST), (2**70, MAY), (torch.ones(2), MUST)],
    "use_token_scaling": [(1, MAY), (None, MAY), ("x", MAY)],
}  # fmt: skip


def option(case: Case) -> None:
    names = [name for name in case.call.arguments if name in OPTIONS and name not in case.faults]
    if not names:
        return
    name = case.rng.choice(names)
    value, raises = case.rng.choice(OPTIONS[name])
    if name == "normalizer" and case.call.arguments["reduction"] == "none":
        raises = MUST
    case.set(name, value, raises, repr(value))
    case.ordinary = case.judged = False


def wrong_type(case: Case) -> None:
    name, _ = case.pick() or ("", None)
    if name:
        parameters = inspect.signature(getattr(functional, case.call.op)).parameters
        optional = "None" in str(parameters[name].annotation)
        case.set(name, case.rng.choice(NOT_TENSORS), MAY if optional else MUST, "no tensor")
        case.judged = False


def meta(case: Case) -> None:
    """Moves all tensors, or one, to the meta device."""
    names = [name for name, t in case.call.tensors().items() if t.numel() < 1 << 20]
    one = case.rng.randrange(2) and len(names) > 1
    for name in [case.rng.choice(names)] if one else names:
        case.set(name, case.call.arguments[name].to("meta"), MAY if one else NEVER, "meta")
    if case.faults.get("target") == MUST:  # the value of a target without data cannot be checked
        case.faults["target"] = MAY
    case.ordinary = case.judged = False


# A function that occurs more than once is drawn more often.
SPOILS = [*[values] * 3, *[zero_class_weights] * 2, dtype, shape, huge, target, *[option] * 2, wrong_type, meta]
