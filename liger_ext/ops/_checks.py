"""Argument checks of the fake implementations, in the words of the C++ ops, and the names of their integer modes.

They run while a graph is traced; the C++ ops check at run time. Sizes may be symbolic: nothing converts one to int.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

REDUCTIONS: Mapping[object, int] = {"none": 0, "mean": 1, "sum": 2}

# Upstream also takes the integers.
CASTING_MODES: Mapping[object, int] = {"llama": 0, "gemma": 1, "none": -1, 0: 0, 1: 1, -1: -1}


def code_of(argument: str, value: object, codes: Mapping[object, int]) -> int:
    """The integer that stands for a named mode in an op's schema."""
    code = codes.get(value)
    if code is None:
        names = [repr(name) for name in codes if isinstance(name, str)]
        raise ValueError(f"{argument} is {value!r}, expected {', '.join(names[:-1])} or {names[-1]}")
    return code


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds; False where a graph is made and they are known at run time only."""
    if isinstance(condition, Tensor):  # torch.jit.trace makes tensors of sizes
        return bool(condition)
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def check_tensors(op: str, **arguments: object) -> None:
    """Raises TypeError for what is no tensor; torch's dispatcher would, but after a function has asked for shapes."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{op}: {name} must be a Tensor, not {type(value).__name__}")


def require(ok: bool, *parts: object) -> None:
    if not ok:
        raise ValueError("".join(map(str, parts)))


def shape_text(t: Tensor) -> str:
    return "(" + ", ".join(map(str, t.shape)) + ")"


def check_dtype(dtype: torch.dtype, name: str, device: torch.device) -> None:
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return
    on_gpu = device.type == "cuda"
    if dtype == torch.float64 and not on_gpu:
        return
    raise ValueError(
        f"{name} has dtype {dtype}, expected float32, bfloat16 or float16"
        + (" (float64 works on the CPU only)" if on_gpu else ", or float64")
    )


def check_rows(op: str, t: Tensor, name: str) -> None:
    """A floating tensor of rows over its last dimension."""
    require(t.dim() >= 1, op, ": ", name, " has no dimensions, expected (..., hidden_size)")
    check_dtype(t.dtype, name, t.device)


def check_device(op: str, t: Tensor, name: str, like: Tensor, like_name: str) -> None:
    require(
        t.device == like.device, op, ": ", name, " is on another device than ", like_name, "; move both to one device"
    )


def check_same_shape(op: str, t: Tensor, name: str, like: Tensor, like_name: str) -> None:
    if t.shape != like.shape:
        raise ValueError(f"{op}: {name} has shape {shape_text(t)}, expected that of {like_name}, {shape_text(like)}")


def check_same_dtype(op: str, t: Tensor, name: str, like: Tensor, like_name: str) -> None:
    require(
        t.dtype == like.dtype,
        op,
        ": ",
        name,
        " has dtype ",
        t.dtype,
        ", expected that of ",
        like_name,
        ", ",
        like.dtype,
    )


def check_parameter(op: str, parameter: Tensor | None, name: str, like: Tensor, size, like_name: str = "x") -> None:
    """An optional vector of ``size`` elements."""
    if parameter is None:
        return
    check_device(op, parameter, name, like, like_name)
    if parameter.dim() != 1 or parameter.shape[0] != size:
        raise ValueError(f"{op}: {name} has shape {shape_text(parameter)}, expected ({size})")
    check_dtype(parameter.dtype, name, like.device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Statistics, losses and sums: float32, and float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32
