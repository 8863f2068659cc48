"""The classes of the records. A ``Record`` describes an op. Its functions receive a ``Size`` (the sizes of a call) and
an ``InputFactory`` (which creates random tensors for the op's inputs). The field ``roundings`` holds ``Roundings``
(counts for the error bound), the field ``timed`` holds ``Timed`` (benchmarks)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext._op_calls import OpCalls
from liger_ext.ops._loss_devices import planned_for
from liger_ext.records._sizes import Tensors


@dataclass(frozen=True)
class Roundings:
    """The counts from which ``bounds.py`` derives the largest error of a result. ``steps``: the successive roundings
    between inputs and result, each at most half an ulp of the result's scale (``Record.scales``). ``sums``: the number
    of sums over a row in the result."""

    steps: float
    sums: float = 0.0


@dataclass(frozen=True)
class Size:
    """The sizes of a call. ``rows`` and ``cols``: of x, gate or logits; for RoPE, the positions of each of ``batch``
    sequences, and the head dimension. ``heads``: RoPE's numbers of heads of q and of k, and the rotary dimension.
    ``hidden``: for the fused loss, the hidden size of a head with ``cols`` classes; for GroupNorm, the elements of a
    channel."""

    rows: int
    cols: int
    heads: tuple[int, int, int] = (0, 0, 0)
    hidden: int = 0
    batch: int = 1

    def at(self, rows: int, cols: int) -> Size:
        """Returns this size with other rows and columns. The rotary dimension of RoPE becomes the head dimension."""
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
    """Returns a function for ``Record.moved``, for an op that moves ``forward`` and ``backward`` matrices of its size,
    and ``statistics`` bytes for each row."""

    def moved(size: Size, width: int) -> tuple[int, int]:
        matrix, rows = size.rows * size.cols * width, size.rows * statistics
        return forward * matrix + rows, backward * matrix + rows

    return moved


class InputFactory:
    """Creates random tensors for an op's inputs, in one dtype (unless a call names another) on one device.

    ``generator``: by default one on the CPU, which draws the same values for all devices. ``ignored``: every
    ``ignored``-th target is ``ignore_index``; 0: no target is, for measurements of time."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        generator: torch.Generator | None = None,
        ignored: int = 7,
    ) -> None:
        self.dtype, self.device, self.ignored = dtype, device, ignored
        self.generator = generator or torch.Generator().manual_seed(0)

    def _draw(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """Calls ``function`` with ``arguments``, the shape last. On meta no values are drawn."""
        if torch.device(self.device).type == "meta":
            dtype = torch.int64 if function is torch.randint else torch.float32
            return torch.empty(arguments[-1], dtype=dtype, device="meta")
        return function(*arguments, generator=self.generator, device=self.generator.device)

    def leaf(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Returns a normally distributed leaf that requires a gradient."""
        drawn = self._draw(torch.randn, shape)
        return drawn.mul_(scale).add_(mean).to(self.device, dtype or self.dtype).requires_grad_()

    def computed(self, function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        """Returns ``function(t)`` in the factory's dtype. On meta the function, which keeps the shape, is not called:
        torch would import torch._dynamo, which takes seconds."""
        return (t if t.is_meta else function(t)).to(self.device, self.dtype)

    def targets(self, rows: int, classes: int, ignore_index: int = -100) -> Tensor:
        """Returns random int64 targets, some of them ``ignore_index``."""
        drawn = self._draw(torch.randint, classes, (rows,))
        if self.ignored:
            drawn[3 :: self.ignored] = ignore_index
        return drawn.to(self.device)

    def rope_tables(self, rows: int, rotary: int, batch: int = 1) -> dict[str, Tensor]:
        angle = self._draw(torch.rand, (batch, rows, rotary)).mul_(6.28)
        return {name: self.computed(f, angle) for name, f in (("cos", torch.cos), ("sin", torch.sin))}


def other_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of ``Timed.other_dtype`` beside inputs in ``dtype``."""
    return torch.bfloat16 if dtype == torch.float32 else torch.float32


@dataclass(frozen=True)
class Timed:
    """A benchmark of an op, whose function is called with ``options`` and computes no gradients of ``frozen`` inputs.
    It is timed at ``sizes`` on a GPU, and at ``small`` on a CPU."""

    sizes: tuple[Size, ...]
    small: tuple[Size, ...]
    options: Mapping[str, Any] | None = None
    label: str = ""
    frozen: tuple[str, ...] = ()
    peers: bool = True  # other libraries' functions support these options, too
    other_dtype: tuple[str, ...] = ()  # inputs in float32, or in bfloat16 where the others are float32


class _Loss(torch.autograd.Function):
    """A scalar on the CPU whose gradients are contiguous tensors on meta. With gradients that the caller passes,
    torch.autograd.grad would import sympy, which takes seconds."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype) for t in outputs]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.like)


@dataclass(frozen=True, kw_only=True)
class Record:
    """The description of an op for the rest of the package, the tests and the benchmarks. The constructor raises a
    TypeError that names a missing field.

    The op's definition: ``reference`` is the formula (called in float64), ``baseline`` a composition of PyTorch's own
    functions, whose error limits the op's (rule.py). ``scales`` returns, by the result's name, the magnitude of the
    intermediate values from which a result is computed, for results that are small differences of large numbers. For a
    result without a scale, it is the largest value of the result's row. If there is a scale "dx bound", bounds.py uses
    it in place of "dx". ``roundings``: the counts of each result and gradient (bounds.py).
    """

    name: str
    reference: Callable[..., Any]
    baseline: Callable[..., Any]
    scales: Callable[[Mapping[str, Any], Tensors, Tensors], Mapping[str, Tensor | float]]
    roundings: Mapping[str, Roundings]
    outputs: tuple[str, ...] = ("out",)
    parameters: tuple[str, ...] = ()  # inputs whose gradient is a sum over rows
    constants: tuple[str, ...] = ()  # floating inputs that have no gradient
    computes_in: tuple[str, ...] = ()  # inputs whose promoted dtype is the compute dtype; (): the first floating input
    row_length: Callable[[Mapping[str, Any]], int] | None = None  # of its sums; None: the first floating input's
    stores: bool = False  # reference and baseline take the compute dtype as ``stored``
    native: bool = False  # the baseline runs in the inputs' dtypes, and rounding errors need not average out
    # Returns the results for which an intermediate value of their magnitude is rounded to the compute dtype.
    rounded: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda inputs: ()

    # The op's calls: the arguments by name, in the order of the function's parameters; the size of a call in a small
    # model with (tokens, hidden_size, vocab_size); the size of a call in a training step of an 8B Llama.
    inputs: Callable[[InputFactory, Size], dict[str, Any]]
    example: Callable[[int, int, int], Size]
    llama: Size

    # The op's costs: the bytes that forward and backward must move, from the size and the bytes of an element; the
    # benchmarks; the op whose kernels it runs, "" for its own; and the size and options that tune measures for the
    # Llama's call.
    moved: Callable[[Size, int], tuple[int, int]]
    timed: tuple[Timed, ...]
    same_kernels_as: str = ""
    as_tuned: Callable[[Size, torch.dtype, _C.DeviceProfile], tuple[Size, Mapping[str, Any]]] = lambda size, *_: (
        size,
        {},
    )

    @property
    def kernels(self) -> str:
        """The name of the op's kernels in the docs and in tuned plans."""
        return self.same_kernels_as or self.name

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
        """Returns the launches of a call with ``options`` of the function and without gradients of ``frozen`` inputs:
        those of forward and backward; or, with ``name``, those of the op or the backward of this name."""
        backward = {"": (False, True), self.kernels: (False,), f"{self.kernels}_backward": (True,)}.get(name)
        if backward is None:
            raise ValueError(f"name is {name!r}, expected {self.kernels}, {self.kernels}_backward or ''")
        inputs = self.inputs(InputFactory(dtype, "meta"), size) | dict(options or {})
        for frozen_name in frozen:
            if not isinstance(inputs.get(frozen_name), Tensor):
                raise ValueError(f"frozen has {frozen_name!r}, expected names of tensors among {', '.join(inputs)}")
            inputs[frozen_name].requires_grad_(False)
        leaves = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
        with torch.inference_mode(False), torch.enable_grad(), planned_for(profile), OpCalls() as calls:
            results = self.run(**inputs)
            outputs = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
            torch.autograd.grad(_Loss.apply(*(t for t in outputs if t.requires_grad)), leaves)
        return calls.launches(profile, knobs, lambda op: ("_backward" in op) in backward)

    def run(self, **arguments: Any) -> Any:
        """Calls the public function."""
        from liger_ext import functional

        return getattr(functional, self.name)(**arguments)

    def compute_dtype(self, inputs: Mapping[str, Any]) -> torch.dtype:
        floating = [v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
        return functools.reduce(torch.promote_types, [inputs[k].dtype for k in self.computes_in] or floating[:1])

    def length(self, inputs: Mapping[str, Any]) -> int:
        if self.row_length is not None:
            return self.row_length(inputs)
        return next(v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()).shape[-1]
