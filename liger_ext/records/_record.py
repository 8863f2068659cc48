"""What a record says of an op, and what the makers of its inputs are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.records._sizes import Tensors


@dataclass(frozen=True)
class Roundings:
    """``steps``: roundings in a row, in half ulps of the values' size; ``sums``: how often a row's sum enters."""

    steps: float
    sums: float = 0.0


@dataclass(frozen=True)
class Size:
    """Of a call: ``rows`` and ``cols`` of x, gate or logits; RoPE's positions of each of ``batch`` sequences and head
    dimension. ``heads``: RoPE's of q and of k, and the rotary dimension. ``hidden``: the hidden size in front of a
    head of ``cols`` classes."""

    rows: int
    cols: int
    heads: tuple[int, int, int] = (0, 0, 0)
    hidden: int = 0
    batch: int = 1

    def at(self, rows: int, cols: int) -> Size:
        """With other rows and columns; RoPE rotates all of the head then."""
        return replace(self, rows=rows, cols=cols, heads=(*self.heads[:2], cols) if any(self.heads) else self.heads)

    def __str__(self) -> str:
        q, k, rotary = self.heads
        if not q:
            return f"{self.rows}x{self.cols}"
        partial = f" of which {rotary}" if rotary < self.cols else ""
        return f"{self.batch}x{self.rows} positions, {q}+{k} heads of {self.cols}{partial}"


def sizes(*shapes: tuple[int, int]) -> tuple[Size, ...]:
    return tuple(Size(*shape) for shape in shapes)


def matrices(forward: int, backward: int, statistics: int = 0) -> Callable[[Size, int], tuple[int, int]]:
    """Record.moved of an op that moves so many matrices of its size each way, and bytes of each row's statistics."""

    def moved(size: Size, width: int) -> tuple[int, int]:
        matrix, rows = size.rows * size.cols * width, size.rows * statistics
        return forward * matrix + rows, backward * matrix + rows

    return moved


class Make:
    """Makes tensors for the inputs of an op: in one dtype unless another is said, on one device, from one generator (a
    CPU's by default: the same values on all devices). Every ``ignored``-th target is ignored; 0: none, for a
    measurement, in which all rows count."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        ignored: int = 7,
    ) -> None:
        self.dtype, self.device, self.ignored = dtype, device, ignored
        self.generator = generator or torch.Generator().manual_seed(0)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normally distributed; a gradient is wanted of it."""
        drawn = torch.randn(shape, generator=self.generator, device=self.generator.device)
        return drawn.mul_(scale).add_(mean).to(self.device, dtype or self.dtype).requires_grad_()

    def targets(self, rows: int, classes: int, ignore_index: int = -100) -> Tensor:
        """int64."""
        drawn = torch.randint(classes, (rows,), generator=self.generator, device=self.generator.device)
        if self.ignored:
            drawn[3 :: self.ignored] = ignore_index
        return drawn.to(self.device)

    def rope_tables(self, rows: int, rotary: int, batch: int = 1) -> dict[str, Tensor]:
        angle = torch.rand(batch, rows, rotary, generator=self.generator, device=self.generator.device) * 6.28
        return {name: f(angle).to(self.device, self.dtype) for name, f in (("cos", torch.cos), ("sin", torch.sin))}


@dataclass(frozen=True)
class Timed:
    """A row of the benchmarks: the op with ``options``, without gradients of ``frozen`` inputs, at ``sizes`` on a GPU
    and ``small`` ones on a CPU."""

    sizes: tuple[Size, ...]
    small: tuple[Size, ...]
    options: Mapping[str, Any] | None = None
    label: str = ""
    frozen: tuple[str, ...] = ()
    peers: bool = True  # other libraries' functions can do it, too
    other_dtype: tuple[str, ...] = ()  # inputs in float32, or in bfloat16 where the others are float32


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that the rest of the package, the tests and the benchmarks need to know of an op. A part that is missing is a
    TypeError with its name when the record is made.

    Its meaning: ``reference`` is the formula (called in float64), ``baseline`` a composition of PyTorch's own
    functions, ``scales`` the sizes of intermediate values by the results' names, for results that are small differences
    of large numbers; one called "dx bound" stands in for that of dx where ``bound`` is asked. ``roundings``: of each
    result and gradient (bounds.py).
    """

    name: str
    reference: Callable[..., Any]
    baseline: Callable[..., Any]
    scales: Callable[[Mapping[str, Any], Tensors, Tensors], Mapping[str, Tensor | float]]
    roundings: Mapping[str, Roundings]
    outputs: tuple[str, ...] = ("out",)
    parameters: tuple[str, ...] = ()  # inputs whose gradient is a sum over rows
    constants: tuple[str, ...] = ()  # floating inputs that have no gradient
    computes_in: tuple[str, ...] = ()  # inputs whose dtypes promote to the one computed in; none: the first floating
    row_length: Callable[[Mapping[str, Any]], int] | None = None  # of its sums; None: the first floating input's
    stores: bool = False  # its functions take the dtype that is computed in as ``stored``
    native: bool = False  # PyTorch runs in the inputs' dtypes, and rounding errors need not average out
    # Results with a value of their size that is rounded to the dtype computed in on the way.
    rounded: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda inputs: ()

    # How it is called: arguments by name, in the order of the function's; the size of a call in a small model of
    # (tokens, hidden_size, vocab_size); that of a training step of an 8B Llama.
    inputs: Callable[[Make, Size], dict[str, Any]]
    example: Callable[[int, int, int], Size]
    llama: Size

    # What it costs: of the bytes of an element, those that must be moved forward, and backward; what is timed; the op
    # whose kernels it runs, "" being its own; what ``_C.plans`` asks of a call beside rows and columns, on a GPU with
    # so many bytes of memory and with such options; and the call, and its options, that tune measures for the Llama's.
    moved: Callable[[Size, int], tuple[int, int]]
    timed: tuple[Timed, ...]
    launched_as: str = ""
    launch_options: Callable[[Size, torch.dtype, _C.DeviceProfile, Mapping[str, Any]], Mapping[str, Any]] = (
        lambda size, *of: {}
    )
    as_tuned: Callable[[Size, torch.dtype, _C.DeviceProfile], tuple[Size, Mapping[str, Any]]] = lambda size, *of: (
        size,
        {},
    )

    @property
    def kernels(self) -> str:
        """The name under which ``_C.plans`` and docs know its kernels."""
        return self.launched_as or self.name

    def plans(
        self,
        profile: _C.DeviceProfile,
        size: Size,
        dtype: torch.dtype,
        name: str = "",
        knobs: _C.Knobs | None = None,
        options: Mapping[str, Any] | None = None,
        frozen: Collection[str] = (),
    ) -> list[_C.NamedLaunch]:
        """The launches of a call: forward, then backward; or those of the op, or its backward, called ``name``. With
        ``options`` of the function, and without gradients of ``frozen`` inputs."""
        options = options or {}
        missing = any(name in options and options[name] is None for name in self.parameters)
        call = {
            "frozen": bool(self.parameters) and not missing and set(self.parameters) <= set(frozen),
            "per_row": options.get("reduction") == "none",
            **self.launch_options(size, dtype, profile, options),
        }
        named, rows = str(dtype).removeprefix("torch."), size.batch * size.rows
        forward, backward = self.kernels, f"{self.kernels}_backward"
        return [
            launch
            for n in ((name,) if name else (forward, backward))
            for launch in _C.plans(
                n, profile, rows, size.cols, named, **call, mixed=missing and n == forward, knobs=knobs or _C.Knobs()
            )
        ]

    def run(self, **arguments: Any) -> Any:
        """The public function."""
        from liger_ext import functional

        return getattr(functional, self.name)(**arguments)

    def compute_dtype(self, inputs: Mapping[str, Any]) -> torch.dtype:
        floating = [v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
        return functools.reduce(torch.promote_types, [inputs[k].dtype for k in self.computes_in] or floating[:1])

    def length(self, inputs: Mapping[str, Any]) -> int:
        if self.row_length is not None:
            return self.row_length(inputs)
        return next(v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()).shape[-1]
