"""The table ``RECORDS``: a record (``Record``) of each op with its formula, error bounds, example inputs and costs.

The doctor, tune, numerics, the benchmarks and the tests of kernels loop over ``RECORDS``. Each module of this folder
has the records of one family of ops. A record's main parts:

- the formula (``reference``), which is evaluated in float64 for exact results;
- the baseline, a composition of PyTorch's own functions, whose error limits the op's error (``rule.py``);
- the scales: for each result, the magnitude of the intermediate values from which it is computed. Rounding errors
  are proportional to that magnitude (``bounds.py``);
- the benchmarks: the sizes and options with which ``benchmarks rows`` times the op.

A new op needs a record in a module of this folder; ``RECORDS`` is built from all modules.
"""

from __future__ import annotations

import importlib
import pkgutil

from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, other_dtype

__all__ = ["RECORDS", "InputFactory", "Record", "Roundings", "Size", "Timed", "other_dtype"]


def _found() -> dict[str, Record]:
    found: dict[str, Record] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
            records = {id(value): value for value in values if isinstance(value, Record)}
            if not records:
                raise ImportError(f"{__name__}.{module.name} has no Record: each module here describes ops")
            found |= {record.name: record for record in records.values()}
    return found


RECORDS: dict[str, Record] = _found()
"""The records by the ops' names."""
