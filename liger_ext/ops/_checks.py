"""Checks of arguments that the public functions run before they call an op, and the names of the ops' integer modes.

C++ checks the arguments of the ops themselves (``csrc/checks``), in every call and while a graph is traced.
torch.compile traces the checks of this file. Sizes may be symbolic, so no function here may convert a size to int.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from liger_ext import _C

REDUCTIONS: Mapping[object, int] = {name: int(code) for name, code in _C.Reduction.__members__.items()}

ROPE_LAYOUTS: Mapping[object, int] = {name: int(code) for name, code in _C.RopeLayout.__members__.items()}

# Liger-Kernel's functions also accept the integers.
CASTING_MODES: Mapping[object, int] = {"llama": 0, "gemma": 1, "none": -1, 0: 0, 1: 1, -1: -1}


def mode_code(op: str, argument: str, value: object, codes: Mapping[object, int]) -> int:
    """Returns the integer of a named mode in an op's schema. Raises ValueError for an unknown name."""
    code = codes.get(value) if isinstance(value, (str, int)) else None
    if code is None:
        names = [repr(name) for name in codes if isinstance(name, str)]
        raise ValueError(f"{op}: {argument} is {value!r}, expected {', '.join(names[:-1])} or {names[-1]}")
    return code


def condition_holds(condition: bool | torch.SymBool, guards: bool = True) -> bool:
    """Returns whether a condition on sizes holds. While a graph is traced it is False for sizes that are known at run
    time only; without ``guards``, also if the answer would add a guard to the graph."""
    if not isinstance(condition, torch.SymBool) and not torch.compiler.is_compiling():
        return bool(condition)  # a tensor if torch.jit.trace replaced a size, numpy.bool for a NumPy option
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    return guard_or_false(condition) if guards else statically_known_true(condition)


def check_tensors(op: str, **arguments: object) -> None:
    """Raises TypeError for an argument that is not a tensor. torch's dispatcher does so, too, but only after the public
    function has read shapes."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, not {type(value).__name__}")


def check_constants(op: str, **arguments: object) -> None:
    """Raises ValueError for a tensor that requires a gradient, which the op would not compute."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires a gradient, but {op} takes it as a constant: detach() it")


def check_integer(op: str, expected: str = "an integer", /, **arguments: object) -> None:
    """Raises TypeError for an argument that is no integer. The dispatcher would accept True, a dtype or a tensor."""
    for name, value in arguments.items():
        if type(value) is not int and (
            isinstance(value, bool) or not isinstance(value, (numbers.Integral, torch.SymInt))
        ):
            raise TypeError(f"{op}: {name} is {value!r}, expected {expected}")


def check_classes(op: str, name: str, t: Tensor) -> None:
    """Raises ValueError for a tensor without classes. The message has the user's shape; the op's own check would print
    the reshaped one."""
    if t.dim() < 1 or t.shape[-1] == 0:
        raise ValueError(f"{op}: {name} has shape {shape_text(t)}, expected (..., vocab_size) with vocab_size > 0")


def class_targets(target: Tensor) -> Tensor:
    """Returns uint8 targets, which torch's losses accept, as int64, which the ops require."""
    return target.long() if target.dtype == torch.uint8 else target


def require(ok: bool, *parts: object) -> None:
    if not ok:
        raise ValueError("".join(map(str, parts)))


def shape_text(t: Tensor) -> str:
    return "(" + ", ".join(map(str, t.shape)) + ")"


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of statistics, losses and sums: float32, or float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32
