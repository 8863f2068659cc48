"""What the public functions check themselves, and the names of the ops' integer modes.

An op's own arguments are checked in C++ (``csrc/checks``), in every call and while a graph is traced. Here is what has
to hold before an op can be called; torch.compile traces it. Sizes may be symbolic: nothing converts one to int.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext import _C

REDUCTIONS: Mapping[object, int] = {name: int(code) for name, code in _C.Reduction.__members__.items()}

ROPE_LAYOUTS: Mapping[object, int] = {name: int(code) for name, code in _C.RopeLayout.__members__.items()}

# Upstream also takes the integers.
CASTING_MODES: Mapping[object, int] = {"llama": 0, "gemma": 1, "none": -1, 0: 0, 1: 1, -1: -1}


def code_of(op: str, argument: str, value: object, codes: Mapping[object, int]) -> int:
    """The integer that stands for a named mode in an op's schema."""
    code = codes.get(value) if isinstance(value, (str, int)) else None
    if code is None:
        names = [repr(name) for name in codes if isinstance(name, str)]
        raise ValueError(f"{op}: {argument} is {value!r}, expected {', '.join(names[:-1])} or {names[-1]}")
    return code


def holds(condition: bool | torch.SymBool, guards: bool = True) -> bool:
    """Whether a condition on sizes holds; False where a graph is made and they are known at run time only. Without
    ``guards``, also where the graph would need a guard to know it."""
    if isinstance(condition, Tensor):  # torch.jit.trace makes tensors of sizes
        return bool(condition)
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    return guard_or_false(condition) if guards else statically_known_true(condition)


def check_tensors(op: str, **arguments: object) -> None:
    """Raises TypeError for what is no tensor; torch's dispatcher would, but after a function has asked for shapes."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, not {type(value).__name__}")


def check_integer(op: str, expected: str = "an integer", /, **arguments: object) -> None:
    """Raises TypeError for what is no integer; the dispatcher takes True, a dtype or a tensor for one."""
    for name, value in arguments.items():
        if type(value) is not int and (
            isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt))
        ):
            raise TypeError(f"{op}: {name} is {value!r}, expected {expected}")


def check_classes(op: str, name: str, t: Tensor) -> None:
    """In the shape that the user gave; the op gets rows."""
    if t.dim() < 1 or t.shape[-1] == 0:
        raise ValueError(f"{op}: {name} has shape {shape_text(t)}, expected (..., vocab_size) with vocab_size > 0")


def class_targets(target: Tensor) -> Tensor:
    """int64, which the ops take; torch's losses take uint8, too."""
    return target.long() if target.dtype == torch.uint8 else target


def require(ok: bool, *parts: object) -> None:
    if not ok:
        raise ValueError("".join(map(str, parts)))


def shape_text(t: Tensor) -> str:
    return "(" + ", ".join(map(str, t.shape)) + ")"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Statistics, losses and sums: float32, and float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32
