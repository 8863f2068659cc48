"""Tests that an op and its fake implementation agree: for any spoiled argument both raise the same error with the same
text, or both accept it and return the same shapes, dtypes and strides."""

from collections.abc import Iterator

import pytest
import torch
from cases import recorded
from ops import EXAMPLES, IDS
from torch._subclasses.fake_tensor import FakeTensorMode

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATING, torch.float8_e4m3fn, torch.int64, torch.uint16, torch.bool, torch.complex64)
NUMBERS = {int: (-(2**63), -8, -1, 0, 1, 2, 3, 5, 2**62), float: (float("nan"), -1.0, 0.0, 0.5, 1e300)}


def spoiled_tensors(t: torch.Tensor) -> Iterator[torch.Tensor | None]:
    yield None
    yield from (t.new_empty(0), t.new_empty(()), t.unsqueeze(0), t.unsqueeze(-1), t.flatten(), t.to("meta"))
    yield from (t.to(dtype) for dtype in DTYPES)
    for dim in range(t.dim()):
        yield t.narrow(dim, 0, t.shape[dim] // 2)
        yield t.movedim(dim, 0).contiguous().movedim(0, dim)  # other strides
        yield torch.cat([t, t], dim)


def spoiled(value: object, kind: str) -> Iterator[object]:
    """Yields other values of an argument whose type in the schema is ``kind``."""
    if isinstance(value, torch.Tensor):
        yield from spoiled_tensors(value)
    elif kind == "Optional[Tensor]":
        yield from (torch.ones(1), torch.ones(3, 4))
    elif kind == "bool":
        yield not value
    elif "float" in kind:
        yield from NUMBERS[float]
    else:
        yield from NUMBERS[int] if kind == "int" else (None, *DTYPES)


def facts(t: torch.Tensor) -> tuple:
    return tuple(t.shape), t.dtype, t.stride() if t.numel() else None


def outcome(op, arguments) -> object:
    try:
        results = op(*arguments)
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)
    return [facts(t) for t in (results if isinstance(results, tuple) else (results,))]


def differences(op, arguments) -> Iterator[str]:
    for at, argument in enumerate(op._schema.arguments):
        for value in spoiled(arguments[at], str(argument.type)):
            changed = [*arguments[:at], value, *arguments[at + 1 :]]
            if not any(isinstance(a, torch.Tensor) for a in changed):
                continue  # without a tensor the device is unknown
            try:
                real = outcome(op, changed)
            except IndexError:
                continue  # a target's value, which a fake tensor lacks
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = outcome(op, [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in changed])
            if real != fake:
                told = facts(value) if isinstance(value, torch.Tensor) else value
                yield f"{op} with {argument.name} = {told}: {real}, {fake}"


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_an_op_and_its_fake_refuse_the_same(example):
    found = [
        line
        for op, args in recorded(example, "cpu")
        for line in differences(op, [a.detach() if isinstance(a, torch.Tensor) else a for a in args])
    ]
    assert not found, "\n".join([f"{len(found)} differences", *found])
