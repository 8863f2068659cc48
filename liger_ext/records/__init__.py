"""One record of each op (``Record``): what it means, how exact it is, how it is called and what it costs. The doctor,
tune, numerics, the tests and the benchmarks go through ``RECORDS``; none of them knows an op by its name.

A module of this folder holds the records of a family. A new op needs its module here and nothing else of this package.
"""

from __future__ import annotations

import importlib
import pkgutil

from liger_ext.records._record import Make, Record, Roundings, Size, Timed

__all__ = ["RECORDS", "Make", "Record", "Roundings", "Size", "Timed"]


def _found() -> dict[str, Record]:
    found: dict[str, Record] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            made = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
            records = {id(value): value for value in made if isinstance(value, Record)}
            if not records:
                raise ImportError(f"{__name__}.{module.name} has no Record: each module here describes ops")
            found |= {record.name: record for record in records.values()}
    return found


RECORDS: dict[str, Record] = _found()
"""Each op's record by the op's name."""
