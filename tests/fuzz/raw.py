"""Calls forward and backward ops directly, with spoiled arguments, most of which no public function would pass."""

from __future__ import annotations

from typing import Any

import torch
from calls import argument_text
from cases import RecordCalls
from layouts import Guarded, bits, draw_layout
from torch import Tensor

from fuzz import verdict
from fuzz.spoil import EXTREMES, FLOATS, INTEGERS, Case
from liger_ext.testing import named_outputs

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]


class Unacceptable(Exception):
    def __init__(self, text: str, kind: str = "exception") -> None:
        super().__init__(text)
        self.kind = kind


def spoiled(value: Any, case: Case) -> Any:
    """Returns another value for an argument of an op, mostly of the same type."""
    rng = case.rng
    if rng.randrange(12) == 0:
        return None
    if isinstance(value, Tensor):
        return spoiled_tensor(value, case)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(INTEGERS)
    if isinstance(value, float) or value is None:
        return rng.choice(FLOATS)
    return rng.choice(DTYPES)


def spoiled_tensor(t: Tensor, case: Case) -> Tensor:
    rng = case.rng
    how = rng.choice(["layout", "layout", "dtype", "shorter", "longer", "empty", "flat", "value", "meta", "dimension"])
    if how == "value" and t.numel():
        changed = t.clone(memory_format=torch.contiguous_format)
        value = rng.choice(INTEGERS if not t.is_floating_point() else EXTREMES)
        changed.view(-1)[rng.randrange(t.numel())] = value if not t.is_floating_point() else float(value)
        return changed
    changes = {
        "layout": lambda: Guarded().place("", t, draw_layout(rng, t.shape)),
        "dtype": lambda: t.to(rng.choice(DTYPES)),
        "shorter": lambda: t[:-1] if t.dim() else t,
        "longer": lambda: torch.cat([t, t]) if t.dim() else t,
        "empty": lambda: t.new_empty(0),
        "flat": t.flatten,
        "meta": lambda: t.to("meta"),
    }
    return changes.get(how, lambda: t.unsqueeze(rng.choice([0, -1])))()


def recorded(case: Case) -> list[tuple[Any, tuple[Any, ...]]]:
    call = case.call
    leaves = {n: call.arguments[n].detach().requires_grad_() for n in call.differentiable()}
    try:
        with RecordCalls() as mode:
            outputs = [t for t in named_outputs(call.with_tensors(leaves)()).values() if t.requires_grad]
            torch.autograd.grad(outputs, list(leaves.values()), list(map(torch.randn_like, outputs)), allow_unused=True)
    except Exception as error:
        raise Unacceptable(f"{type(error).__name__}: {error}", "refused") from None
    return mode.calls


def call_directly(case: Case) -> None:
    """Calls one of the ops that a public call runs, with one or two arguments spoiled."""
    calls = recorded(case)
    if not calls:
        return
    op, arguments = case.rng.choice(calls)
    names = [argument.name for argument in op._schema.arguments]
    changed = list(arguments)
    for _ in range(case.rng.choice([1, 1, 2])):
        at = case.rng.randrange(len(changed))
        changed[at] = spoiled(changed[at], case)
    case.notes = [f"{op}: " + ", ".join(f"{n}={argument_text(v)}" for n, v in zip(names, changed, strict=True))]
    kept = [
        (name, value, value.clone()) for name, value in zip(names, changed, strict=True) if isinstance(value, Tensor)
    ]
    try:
        op(*changed)
    except Exception as error:
        if not verdict.acceptable(error, names):
            raise Unacceptable(f"{op._schema.name}: {type(error).__name__}: {error}") from None
    for name, value, before in kept:
        if value.device.type != "meta" and not torch.equal(bits(value), bits(before)):
            raise Unacceptable(f"{op._schema.name}: {name} was written to")
