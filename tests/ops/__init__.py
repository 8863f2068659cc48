"""Calls of every op, for the tests. Each module of this folder defines the calls of one family of ops:

* ``EXAMPLES``: small calls with each of an op's options, for the tests of gradients, opcheck, compile, threads and
  sanitizers; one of them has the defaults and the op's name;
* ``KERNEL_CASES``: small, odd and large calls (tests/kernel_cases.py) that run every kernel at least once, on the host
  target and in an emulator;
* ``DRAWS``: for each op a function that draws a random call of it, for the tests of layouts and the fuzz test;
* ``BAD``: (op, name, arguments that it rejects, parts of the error text: argument, value, expectation; the first part
  is TypeError if it is no ValueError); a tuple among the arguments is the shape of a tensor;
* ``LARGE``: a function that returns the size of a call whose matrices have these rows and columns, unless it is
  ``Size(rows, columns)``;
* ``PROMISED``: for an op whose result is not one tensor like its first argument, a function of its arguments that
  returns the shape and the dtype (None: any) of each result, by name;
* ``EXACT``: calls in fp32 that are so large that the largest error is reproducible;
* ``PLAN_MODELS``: for each kernel a function that checks which elements a launch processes (tests/plan_model.py);
* ``MODULES``: an instance of each of its modules, if it has any;
* ``STREAMS``: for kernels that tests/test_amd_objects.py does not list, which accesses ("load", "store") should bypass
  caches.

The import of this file fails, and with it the collection of tests, if an op with a record lacks one of the first four
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
KERNEL_CASES = [case for family in FAMILIES for case in family.KERNEL_CASES]
EXACT = [case for family in FAMILIES for case in getattr(family, "EXACT", [])]
OPS = tuple(RECORDS)

BY_NAME = {example.name: example for example in EXAMPLES}
IDS = list(BY_NAME)
DEFAULT_EXAMPLES = [example for example in EXAMPLES if example.name == example.op]


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
    "kernel cases (KERNEL_CASES)": {case.op for case in KERNEL_CASES},
}
for _part, _ops in _PARTS.items():
    if _ops != RECORDS.keys():
        raise ImportError(
            f"tests/ops: without {_part}: {sorted(RECORDS.keys() - _ops)}; without a record in liger_ext/records: "
            f"{sorted(_ops - RECORDS.keys())}"
        )
