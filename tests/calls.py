"""One call of any op, drawn from a ``random.Random``: its arguments, whose values make sense, at small sizes."""

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
    """``arguments`` of a public function by name; ``constants`` names the tensors that take no gradient."""

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
        return f"{self.op}({', '.join(f'{name}={described(value)}' for name, value in self.arguments.items())})"


def described(value: Any) -> str:
    """An argument in a few words."""
    if not isinstance(value, Tensor):
        return repr(value)
    place = "" if value.device.type == "cpu" else f" {value.device}"
    where = "" if value.is_contiguous() and not value.storage_offset() else f" strides {tuple(value.stride())}"
    where += f" + {value.storage_offset()}" if value.storage_offset() else ""
    wanted = " grad" if value.requires_grad else ""
    return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}{place}{wanted}>"


class Draw:
    """Values for the arguments of a call, from one generator that ``rng`` seeds."""

    def __init__(self, rng: Random, dtypes: tuple[torch.dtype, ...], device: Any = "cpu") -> None:
        self.rng, self.dtypes, self.device = rng, dtypes, device
        self._values = torch.Generator().manual_seed(rng.randrange(1 << 16))

    def dtype(self) -> torch.dtype:
        return self.rng.choice(self.dtypes)

    def other_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Mostly the same."""
        return dtype if self.rng.randrange(10) < 6 else self.dtype()

    def maybe(self, value: Any, tenths: int) -> Any:
        """The value, so often in ten times."""
        return value if self.rng.randrange(10) < tenths else None

    def normal(self, *shape: int, dtype: torch.dtype, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=self._values) * scale + mean).to(self.device, dtype)

    def targets(self, shape: tuple[int, ...], classes: int, ignore_index: int) -> Tensor:
        found = torch.randint(0, classes, shape, generator=self._values)
        ignored = torch.rand(shape, generator=self._values) < self.rng.choice([0.0, 0.2, 0.2, 1.0])
        return torch.where(ignored, ignore_index, found).to(self.device)

    def rows(self) -> tuple[tuple[int, ...], int]:
        return self.rng.choice(LEADING), self.rng.choice(COLUMNS)

    def norm_options(self) -> dict[str, Any]:
        return {"eps": self.rng.choice([1e-6, 1e-5, 0.1]), "offset": self.rng.choice([0.0, 1.0])} | {
            "casting_mode": self.rng.choice(["llama", "gemma", "none"])
        }

    def multipliers(self) -> dict[str, float]:
        choices = [1.0, 1.0, 0.7, -1.3]
        return {"gate_multiplier": self.rng.choice(choices), "down_multiplier": self.rng.choice(choices)}

    def loss_options(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "reduction": rng.choice(["mean", "sum", "none"]),
            "label_smoothing": rng.choice([0.0, 0.0, 0.1, 1.0]),
            "lse_square_scale": rng.choice([0.0, 0.0, 1e-2]),
            "softcap": rng.choice([None, None, 5.0]),
            "return_z_loss": rng.randrange(10) < 3,
            "return_token_accuracy": rng.randrange(10) < 3,
            "return_predicted_tokens": rng.randrange(10) < 3,
        }

    def rms_norm(self) -> Call:
        (lead, n), dtype = self.rows(), self.dtype()
        weight = self.normal(n, dtype=self.other_dtype(dtype), mean=1, scale=0.3)
        x = self.normal(*lead, n, dtype=dtype)
        return Call("rms_norm", {"x": x, "weight": self.maybe(weight, 8), **self.norm_options()})

    def add_rms_norm(self) -> Call:
        (lead, n), dtype = self.rows(), self.dtype()
        x, residual = self.normal(*lead, n, dtype=dtype), self.normal(*lead, n, dtype=self.other_dtype(dtype))
        weight = self.normal(n, dtype=self.other_dtype(dtype), mean=1, scale=0.3)
        arguments = {"x": x, "residual": residual, "weight": self.maybe(weight, 8), **self.norm_options()}
        return Call("add_rms_norm", arguments)

    def layer_norm(self) -> Call:
        (lead, n), dtype = self.rows(), self.dtype()
        weight, bias = (self.maybe(self.normal(n, dtype=self.other_dtype(dtype), mean=1), 8) for _ in range(2))
        x = self.normal(*lead, n, dtype=dtype)
        return Call("layer_norm", {"x": x, "weight": weight, "bias": bias, "eps": self.rng.choice([1e-6, 0.1])})

    def _gate_and_up(self) -> dict[str, Tensor]:
        (lead, n), dtype = self.rows(), self.dtype()
        return {name: self.normal(*lead, n, dtype=dtype) for name in ("gate", "up")}

    def _gate_up(self) -> dict[str, Tensor]:
        (lead, n), dtype = self.rows(), self.dtype()
        return {"gate_up": self.normal(*lead, 2 * n, dtype=dtype)}

    def swiglu(self) -> Call:
        return Call("swiglu", self._gate_and_up() | self.multipliers())

    def swiglu_packed(self) -> Call:
        return Call("swiglu_packed", self._gate_up() | self.multipliers())

    def geglu(self) -> Call:
        return Call("geglu", self._gate_and_up() | {"approximate": self.rng.choice(["tanh", "none"])})

    def geglu_packed(self) -> Call:
        return Call("geglu_packed", self._gate_up() | {"approximate": self.rng.choice(["tanh", "none"])})

    def rope(self) -> Call:
        rng, dtype, tables = self.rng, self.dtype(), self.dtype()
        batch, seq = rng.choice([0, 1, 1, 2, 3]), rng.choice([0, 1, 2, 5, 9])
        dim = rng.choice([0, 2, 4, 6, 8, 16, 20, 32, 64])
        rotary = rng.choice([dim, dim, dim // 4 * 2, min(dim, 2), 0])
        unsqueeze_dim, made = rng.choice([1, 1, 2]), {}
        for name, most in (("q", 5), ("k", 3)):
            heads = rng.randint(0 if rng.randrange(10) < 1 else 1, most)
            inner = (heads, seq) if unsqueeze_dim == 1 else (seq, heads)
            made[name] = self.normal(batch, *inner, dim, dtype=dtype)
        lead = rng.choice([(), (1,), (batch,)])
        angle = self.normal(*lead, seq, rotary, dtype=torch.float32, scale=3)
        made |= {"cos": angle.cos().to(tables), "sin": angle.sin().to(tables)}
        return Call("rope", made | {"unsqueeze_dim": unsqueeze_dim}, ("cos", "sin"))

    def softmax(self) -> Call:
        (lead, n), dtype = self.rows(), self.dtype()
        return Call("softmax", {"x": self.normal(*lead, n, dtype=dtype, scale=3)})

    def _class_weight(self, classes: int, dtype: torch.dtype) -> Tensor | None:
        made = torch.rand(classes, generator=self._values) + 0.5
        return self.maybe(made.to(self.device, dtype), 3)

    def cross_entropy(self) -> Call:
        (lead, _), dtype, ignore_index = self.rows(), self.dtype(), self.rng.choice([-100, 0, 2])
        classes = self.rng.choice(COLUMNS[1:])
        arguments = {
            "logits": self.normal(*lead, classes, dtype=dtype, scale=3),
            "target": self.targets(lead, classes, ignore_index),
            "weight": self._class_weight(classes, self.dtype()),
            "ignore_index": ignore_index,
        }
        return Call("cross_entropy", arguments | self.loss_options(), ("weight",))

    def fused_linear_cross_entropy(self) -> Call:
        rng, dtype, ignore_index = self.rng, self.dtype(), self.rng.choice([-100, 0, 2])
        # More than 128 rows are several chunks where memory=1.
        lead, memory = rng.choice([(rng.choice(LEADING), rng.choice(["auto", 1])), ((rng.choice([129, 261]),), 1)])
        hidden, classes = rng.choice([0, 1, 3, 4, 8, 16, 33]), rng.choice([1, 2, 7, 16, 33, 64, 75])
        weight_dtype = self.other_dtype(dtype)
        arguments = {
            "x": self.normal(*lead, hidden, dtype=dtype),
            "weight": self.normal(classes, hidden, dtype=weight_dtype, scale=0.3),
            "target": self.targets(lead, classes, ignore_index),
            "bias": self.maybe(self.normal(classes, dtype=self.other_dtype(dtype)), 4),
            "ce_weight": self._class_weight(classes, self.dtype()),
            "ignore_index": ignore_index,
            "memory": memory,
            "use_token_scaling": rng.randrange(10) < 2,
            "accum_dtype": rng.choice([None, None, torch.promote_types(dtype, weight_dtype)]),
            "normalizer": rng.choice([None, None, 17.0, self.normal(dtype=torch.float32).abs() + 1]),
        }
        arguments |= self.loss_options()
        if arguments["reduction"] == "none":
            arguments["normalizer"] = None
        return Call("fused_linear_cross_entropy", arguments, ("ce_weight", "normalizer"))


OPS = (
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "swiglu",
    "swiglu_packed",
    "geglu",
    "geglu_packed",
    "rope",
    "softmax",
    "cross_entropy",
    "fused_linear_cross_entropy",
)


def draw_call(rng: Random, op: str, dtypes: tuple[torch.dtype, ...], device: Any = "cpu") -> Call:
    return getattr(Draw(rng, dtypes, device), op)()
