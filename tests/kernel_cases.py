"""Calls of every op that has a record, small, odd and large. host_kernels.py runs them on the host target (the GPU
kernels compiled for the CPU), and tests/amd on emulated AMD GPUs, where they and a few checks launch every kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ops
import torch
from torch import Tensor

from liger_ext.records import RECORDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call of an op of ``liger_ext.testing.OPS``. ``inputs()`` returns its arguments; those in ``frozen`` require
    no gradient."""

    op: str
    name: str
    dtype: torch.dtype
    inputs: Callable[[], dict[str, Any]]
    frozen: tuple[str, ...] = ()
    quick: bool = False  # part of a quick run, which has a few cases of each op

    def __str__(self) -> str:
        return f"{self.op} {self.name} {str(self.dtype).removeprefix('torch.')}"


def cases(only: str = "", quick: bool = False) -> Iterator[Case]:
    """Yields the cases in whose text ("rope partial float16") the regular expression ``only`` matches; ``quick``: a few
    of each op."""
    for dtype in DTYPES:
        for op, name, is_quick, inputs, *frozen in ops.kernel_cases(dtype):
            case = Case(op, name, dtype, inputs, tuple(frozen), is_quick)
            if (case.quick or not quick) and re.search(only, str(case)):
                yield case


def with_gradients(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """Makes the inputs of a case leaves that require a gradient, except frozen ones and constants (class weights,
    rope's tables)."""
    constants = (*RECORDS[case.op].constants, *case.frozen)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value.requires_grad_(value.is_floating_point() and name not in constants)
    return inputs
