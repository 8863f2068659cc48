"""Several calls for one model: what a call patches that an earlier one had left out, what it cannot take back, and
which level of memory counts."""

import functools
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from liger_ext.models.patch import PatchHandle, changes_of, record_change
from liger_ext.models.warn import warn


def leave_out(modules: Iterable[nn.Module], patch: type[nn.Module], handle: PatchHandle | None) -> None:
    """Notes, until `handle` is reverted, that a call did not want `patch` for `modules`."""
    note = _LeftOut(patch)
    for module in modules:
        record_change(module, note, handle, None if note in changes_of(module) else _undo_nothing)


def were_left_out(modules: Iterable[nn.Module], patch: type[nn.Module]) -> bool:
    """Whether a call did not want `patch` for some of `modules`, which are still without it."""
    return any(_LeftOut(patch) in changes_of(module) and not isinstance(module, patch) for module in modules)


def tell(added: Iterable[str], kept: Iterable[str]) -> None:
    """Warns of the switches that an earlier call for the model has turned off, and this one turns on; and the other way
    round, where what that call has done stays."""
    if added:
        names = ", ".join(dict.fromkeys(added))
        warn(f"{names}: left out by an earlier call for this model, and patched now, as this call says")
    if kept:
        names = ", ".join(dict.fromkeys(kept))
        warn(f"{names}: patched by an earlier call, and stays so: revert its handle first")


def set_memory(modules: Iterable[nn.Module], level: str | None, handle: PatchHandle | None) -> None:
    """Gives a level of memory to those of `modules` that look at one, until `handle` is reverted: then the level of the
    call before it counts. None: each keeps what it has; one that has none gets what the others have, or "auto"."""
    modules = [module for module in modules if hasattr(module, "liger_memory")]
    found = [module.liger_memory for module in modules if _has_level(module)]
    for module in modules:
        if _has_level(module) and not _levels_of(module):  # a copy
            record_change(module, _Level(module.liger_memory), None, _undo_nothing)
        own = _Level(level or (module.liger_memory if _has_level(module) else (found or ["auto"])[0]))
        module.liger_memory = own.name
        record_change(module, own, handle, functools.partial(_drop_level, level=own))


class _LeftOut(NamedTuple):
    patch: type[nn.Module]


class _Level:
    """The level that one call gave to one module."""

    def __init__(self, name: str) -> None:
        self.name = name


def _has_level(module: nn.Module) -> bool:
    return "liger_memory" in module.__dict__


def _levels_of(module: nn.Module) -> list[_Level]:
    """In the order of the calls."""
    return [change for change in changes_of(module) if isinstance(change, _Level)]


def _drop_level(module: nn.Module, level: _Level) -> None:
    others = [other for other in _levels_of(module) if other is not level]
    if others:
        module.liger_memory = others[-1].name
    else:
        del module.liger_memory


def _undo_nothing(module: nn.Module) -> None:
    pass
