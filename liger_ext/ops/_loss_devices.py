"""The table of devices for which the fused loss chooses plans, with the profile of each device and its rates: flop/s of
matmuls, bytes/s of memory and seconds of a kernel launch.

A call stores the index of its device in ``DEVICES``, since torch.compile can store an integer as a constant of a graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch

from liger_ext import _C, _tuned
from liger_ext.ops._compile import assume_constant_result


class Device(NamedTuple):
    """A device's profile (None for a CPU) and rates."""

    profile: _C.DeviceProfile | None
    rates: _C.Rates


DEVICES: list[Device] = []


# The index of the device for which the calls of this thread are planned.
_planned: ContextVar[int | None] = ContextVar("_planned", default=None)


@contextlib.contextmanager
def planned_for(profile: _C.DeviceProfile) -> Iterator[None]:
    """Chooses the plans of this thread's calls, with tensors on any device, such as meta, for a GPU of this profile."""
    before = _planned.set(profile_index(profile))
    try:
        yield
    finally:
        _planned.reset(before)


@assume_constant_result
def device_index(device: torch.device) -> int:
    """Returns the index of the device of a tensor."""
    if (index := _planned.get()) is not None:
        return index
    return _gpu(device.index) if device.type == "cuda" else profile_index(None)


@functools.cache
def profile_index(profile: _C.DeviceProfile | None) -> int:
    """Adds a GPU of this profile, which need not be in this machine, or a CPU (None). Returns its index."""
    DEVICES.append(Device(profile, _C.device_rates(None) if profile is None else _tuned.device_rates(profile)))
    return len(DEVICES) - 1


@functools.cache
def _gpu(index: int | None) -> int:
    from liger_ext._devices import running_profile

    index = torch.cuda.current_device() if index is None else index
    profile = running_profile(index)
    if profile is None:  # there is no GPU library: the op itself raises the error
        profile = _C.DeviceProfile()
        profile.memory_bytes = torch.cuda.get_device_properties(index).total_memory
    return profile_index(profile)
