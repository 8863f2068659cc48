"""Calls of every op that has a record, small, odd and large. host_kernels.py runs them on the host target (the GPU
kernels compiled for the CPU), and tests/amd on emulated AMD GPUs, where they and a few checks launch every kernel.

A ``Case`` changes the inputs of the op's record: layouts, dtypes, options, values. The modules of tests/ops list them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from cases import laid_out, normal
from torch import Tensor

from liger_ext.records import RECORDS, InputFactory, Size, other_dtype

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call of an op with the inputs of its record.

    ``in_vectors``: columns and hidden size count vectors of 16 bytes. ``options``: further arguments, or others; a
    function is called with device and dtype. ``layout`` (``cases.laid_out``; "": the record's) is that of the tensors
    in ``moved``, or of all tensors with as many dimensions as the first. ``other_dtype``: inputs in float32, or in
    bfloat16 where the others are float32. ``frozen``: inputs without a gradient. ``change`` changes values in place.
    ``quick``: part of a quick run, which has a few cases of each op.
    """

    op: str
    size: Size
    dtype: torch.dtype = torch.float32
    note: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    layout: str = ""
    moved: tuple[str, ...] = ()
    other_dtype: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    change: Callable[[dict[str, Any]], None] | None = None
    in_vectors: bool = False
    quick: bool = False

    def __str__(self) -> str:
        given = [name if callable(value) else f"{name}={value}" for name, value in self.options.items()]
        words = [self.op, str(self.size), self.note or " ".join(given), self.layout, *self.moved]
        for what, names in (("other dtype", self.other_dtype), ("frozen", self.frozen)):
            words += [what, *names] if names else []
        return " ".join(filter(None, [*words, str(self.dtype).removeprefix("torch.")]))

    def inputs(self) -> dict[str, Any]:
        """Returns the arguments by name. Each tensor is new, and requires no gradient."""
        vector = 16 // self.dtype.itemsize if self.in_vectors else 1
        size = replace(self.size, cols=self.size.cols * vector, hidden=self.size.hidden * vector)
        found = RECORDS[self.op].inputs(InputFactory(self.dtype), size)
        for name, value in self.options.items():
            found[name] = value("cpu", self.dtype) if callable(value) else value
        found = {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}
        if self.change:
            self.change(found)
        for name in self.other_dtype:
            found[name] = found[name].to(other_dtype(self.dtype))
        dims = next(iter(found.values())).dim()
        moved = self.moved or [n for n, t in found.items() if isinstance(t, Tensor) and t.dim() == dims]
        for name in moved if self.layout else ():
            found[name] = laid_out(found[name].contiguous(), self.layout)
        return found


def kernel_cases(
    ops: str, *sizes: Size | tuple[int, int], quick: bool | Collection[Any] = (), **fields: Any
) -> list[Case]:
    """Returns a case of each op at each size. ``quick``: whether, or at which sizes, they are part of a quick run."""
    quick_sizes = sizes if quick is True else quick or ()
    return [
        Case(op, size if isinstance(size, Size) else Size(*size), quick=size in quick_sizes, **fields)
        for size in sizes
        for op in ops.split()
    ]


def parameter(size: int, seed: int = 3) -> Callable:
    """Returns a function that draws a vector in the case's dtype."""
    return lambda device, dtype: normal(size, dtype=dtype, device=device, seed=seed)


def cases(only: str = "", quick: bool = False) -> Iterator[Case]:
    """Yields the cases in whose text ("rope .* float16") the regular expression ``only`` matches; ``quick``: a few of
    each op."""
    from ops import KERNEL_CASES

    for dtype in DTYPES:
        for case in (replace(case, dtype=dtype) for case in KERNEL_CASES):
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
