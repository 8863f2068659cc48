"""Records the calls of this library's ops without their data, and returns their launches on any GPU.

csrc/trace runs an op on such arguments. So the launches are those of the op's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ext import _C


def without_data(argument: Any) -> Any:
    """Returns (shape, dtype, strides, bytes behind a multiple of 16) of a tensor, and any other argument itself."""
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape), argument.dtype, argument.stride(), argument.data_ptr() % 16


class OpCalls(TorchDispatchMode):
    """While it is active, ``calls`` receives the name and the arguments of each call of an op of this library."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True, torch's default, would import torch._dynamo, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_ext":
            self.calls.append((func._opname, tuple(map(without_data, args))))
        return func(*args, **(kwargs or {}))

    def launches(
        self, profile: _C.DeviceProfile, knobs: _C.Knobs | None = None, selects: Callable[[str], bool] = lambda op: True
    ) -> list[_C.NamedLaunch]:
        """Returns the launches of the calls of the ops that ``selects`` selects by name."""
        knobs = knobs or _C.Knobs()
        calls = [call for call in self.calls if selects(call[0])]
        return [launch for op, arguments in calls for launch in _C.plans(op, profile, arguments, knobs=knobs)]
