"""The devices for which the fused loss chooses plans: the profile and the rates of each. A call has the index of its
device in ``DEVICES``, since a graph of torch.compile takes an integer for a constant."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from liger_ext import _C, _tuned
from liger_ext.ops._compile import assume_constant_result


class Device(NamedTuple):
    """``profile``: None for a CPU."""

    profile: _C.DeviceProfile | None
    rates: _C.Rates


DEVICES: list[Device] = []


@assume_constant_result
def device_of(device: torch.device) -> int:
    """The device that tensors are on."""
    return _gpu(device.index) if device.type == "cuda" else device_with(None)


@functools.cache
def device_with(profile: _C.DeviceProfile | None) -> int:
    """A GPU of this profile, which need not be here; None: a CPU."""
    DEVICES.append(Device(profile, _C.device_rates(None) if profile is None else _tuned.rates_of(profile)))
    return len(DEVICES) - 1


@functools.cache
def _gpu(index: int | None) -> int:
    from liger_ext._devices import running_profile

    index = torch.cuda.current_device() if index is None else index
    profile = running_profile(index)
    if profile is None:  # without a GPU library, the op raises an error of its own
        profile = _C.DeviceProfile()
        profile.memory_bytes = torch.cuda.get_device_properties(index).total_memory
    return device_with(profile)
