"""The functions with which each op is compared. A module of this folder has, for the ops of a family, ``EAGER``: the
composition of PyTorch's functions that an op replaces, mostly as transformers writes it; and ``PEERS``: fused
implementations, mostly of other libraries, by name. All take the inputs of the op's record, in their order."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.installed import Peer, installed_functions
from liger_ext import functional
from liger_ext.records import RECORDS

_FAMILIES = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
EAGER: dict[str, Callable] = {op: f for family in _FAMILIES for op, f in family.EAGER.items()}
PEERS: dict[str, dict[str, Peer]] = {op: f for family in _FAMILIES for op, f in family.PEERS.items()}

if _missing := {name for name, record in RECORDS.items() if record.timed} - EAGER.keys():
    raise ImportError(f"benchmarks/ops: EAGER has no composition for {sorted(_missing)}")


def functions(op: str, options: Mapping[str, Any] | None = None, with_peers: bool = True) -> dict[str, Callable]:
    """Functions by provider; "torch" is the composition."""
    ours, plain = (partial(f, **options or {}) for f in (getattr(functional, op), EAGER[op]))
    return {"liger_ext": ours, **installed_functions(PEERS.get(op, {}) if with_peers else {}), "torch": plain}
