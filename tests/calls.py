"""Random calls of the ops, for the tests of layouts and the fuzz test: ``Call`` holds valid arguments of small sizes,
and ``Draw`` draws them from a ``random.Random``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from liger_ext import functional

LEADING = [(), (1,), (2,), (3,), (5,), (17,), (67,), (0,), (2, 3), (4, 1), (1, 4), (2, 0), (2, 1, 3)]
COLUMNS = [0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 33, 40, 64, 65, 72, 128, 257]


@dataclass(frozen=True)
class Call:
    """A call of a public function: its ``arguments`` by name. ``constants`` names the tensors that receive no
    gradient."""

    op: str
    arguments: dict[str, Any]
    constants: tuple[str, ...] = ()

    def __call__(self) -> Any:
        return getattr(functional, self.op)(**self.arguments)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Call:
        return replace(self, arguments=self.arguments | tensors)

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def differentiable(self) -> list[str]:
        return [n for n, t in self.tensors().items() if n not in self.constants and t.dtype.is_floating_point]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={argument_text(value)}' for name, value in self.arguments.items())})"


def argument_text(value: Any) -> str:
    """Returns a short text for an argument: dtype, shape, strides, device."""
    if not isinstance(value, Tensor):
        return repr(value)
    place = "" if value.device.type == "cpu" else f" {value.device}"
    where = "" if value.is_contiguous() and not value.storage_offset() else f" strides {tuple(value.stride())}"
    where += f" + {value.storage_offset()}" if value.storage_offset() else ""
    wanted = " grad" if value.requires_grad else ""
    return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}{place}{wanted}>"


class Draw:
    """Draws arguments of calls from ``rng``, and the values of tensors from a generator that ``rng`` seeds."""

    def __init__(self, rng: Random, dtypes: tuple[torch.dtype, ...], device: Any = "cpu") -> None:
        self.rng, self.dtypes, self.device = rng, dtypes, device
        self._values = torch.Generator().manual_seed(rng.randrange(1 << 16))

    def dtype(self) -> torch.dtype:
        return self.rng.choice(self.dtypes)

    def other_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns ``dtype`` itself in most draws."""
        return dtype if self.rng.randrange(10) < 6 else self.dtype()

    def maybe(self, value: Any, tenths: int) -> Any:
        """Returns the value with a probability of ``tenths`` / 10, else None."""
        return value if self.rng.randrange(10) < tenths else None

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self._values) * scale + mean).to(self.device, dtype)

    def targets(self, shape: tuple[int, ...], classes: int, ignore_index: int) -> Tensor:
        found = torch.randint(0, classes, shape, generator=self._values)
        ignored = torch.rand(shape, generator=self._values) < self.rng.choice([0.0, 0.2, 0.2, 1.0])
        return torch.where(ignored, ignore_index, found).to(self.device)

    def rows(self) -> tuple[tuple[int, ...], int]:
        return self.rng.choice(LEADING), self.rng.choice(COLUMNS)
