"""Calls of every op, for the tests. Each module of this folder defines the calls of one family of ops:

* ``EXAMPLES``: small calls with each of an op's options, for the tests of gradients, opcheck, compile, threads and
  sanitizers; one of them has the defaults and the op's name;
* ``kernel_cases(dtype)``: (op, name, part of a quick run?, function that returns the inputs, frozen inputs ...): small,
  odd and large calls that run every kernel at least once, on the host target and in an emulator;
* ``DRAWS``: for each op a function that draws a random call of it, for the tests of layouts and the fuzz test;
* ``BAD``: (op, name, arguments that it rejects, parts of the error text: argument, value, expectation; the first part
  is TypeError if it is no ValueError); a tuple among the arguments is the shape of a tensor;
* ``LARGE``: for each op a function of two matrices of the same shape and a vector of their columns, or None. It calls
  the op with those that the op has an argument for, as inputs and parameter, and returns one result;
* ``PROMISED``: for an op whose result is not one tensor like its first argument, a function of its arguments that
  returns the shape and the dtype (None: any) of each result, by name;
* ``exact_cases()``: (name, op, inputs) in fp32, large enough that the largest error is reproducible;
* ``PLAN_MODELS``: for each kernel a function that checks which elements a launch processes (tests/plan_model.py);
* ``MODULES``: an instance of each of its modules, if it has any;
* ``STREAMS``: for kernels that tests/test_amd_objects.py does not list, which accesses ("load", "store") should bypass
  caches.

The import of this file fails, and with it the collection of tests, if an op with a record lacks one of the first five
or an entry has no record.
"""

from __future__ import annotations

import importlib
import pkgutil
from random import Random
from typing import Any

import torch
from calls import Call, Draw
from cases import Example, normal

from liger_ext.records import RECORDS

FAMILIES = [importlib.import_module(f"ops.{module.name}") for module in pkgutil.iter_modules(__path__)]
EXAMPLES: list[Example] = [example for family in FAMILIES for example in family.EXAMPLES]
DRAWS = {op: draw for family in FAMILIES for op, draw in family.DRAWS.items()}
BAD = [
    (op, name, {key: normal(*v) if isinstance(v, tuple) else v for key, v in arguments.items()}, parts)
    for family in FAMILIES
    for op, name, arguments, parts in getattr(family, "BAD", [])
]
LARGE = {op: call for family in FAMILIES for op, call in getattr(family, "LARGE", {}).items()}
PROMISED = {op: told for family in FAMILIES for op, told in getattr(family, "PROMISED", {}).items()}
PLAN_MODELS = {name: model for family in FAMILIES for name, model in getattr(family, "PLAN_MODELS", {}).items()}
STREAMS = {name: kinds for family in FAMILIES for name, kinds in getattr(family, "STREAMS", {}).items()}
MODULES = [module for family in FAMILIES for module in getattr(family, "MODULES", [])]
OPS = tuple(RECORDS)

BY_NAME = {example.name: example for example in EXAMPLES}
IDS = list(BY_NAME)
DEFAULT_EXAMPLES = [example for example in EXAMPLES if example.name == example.op]


def kernel_cases(dtype: torch.dtype) -> Any:
    for family in FAMILIES:
        yield from family.kernel_cases(dtype)


def exact_cases() -> Any:
    for family in FAMILIES:
        yield from getattr(family, "exact_cases", tuple)()


def draw_call(rng: Random, op: str, dtypes: tuple[torch.dtype, ...], device: Any = "cpu") -> Call:
    return DRAWS[op](Draw(rng, dtypes, device))


def promised(op: str, arguments: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    """Returns shape and dtype of each result of a call."""
    if op in PROMISED:
        return PROMISED[op](arguments)
    first = next(iter(arguments.values()))
    return {"out": (tuple(first.shape), first.dtype)}


_PARTS = {
    "an example with its defaults (EXAMPLES)": {example.op for example in DEFAULT_EXAMPLES},
    "a draw (DRAWS)": set(DRAWS),
    "a call that it refuses (BAD)": {op for op, *_ in BAD},
    "a call with large tensors (LARGE)": set(LARGE),
    "kernel cases (kernel_cases)": {op for op, *_ in kernel_cases(torch.float32)},
}
for _part, _ops in _PARTS.items():
    if _ops != RECORDS.keys():
        raise ImportError(
            f"tests/ops: without {_part}: {sorted(RECORDS.keys() - _ops)}; without a record in liger_ext/records: "
            f"{sorted(_ops - RECORDS.keys())}"
        )
