"""What the tests are made of: tensors in every memory layout, hypothesis strategies, and one small example of every
op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ext._load import library_folder

LOW = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "padded", "offset", "columns", "transposed", "expanded")


def dtypes_of(device: torch.device) -> tuple[torch.dtype, ...]:
    return LOW if device.type == "cuda" or host_target() else (*LOW, torch.float64)


def host_target() -> bool:
    """Are the ops of CPU tensors those of the GPU library, run on the host? See test_host_target."""
    return library_folder().name == "host"


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values (for "expanded": the first of the leading dimension, repeated) in another memory layout."""
    if t.dim() == 0 or t.numel() == 0:
        return t
    if layout == "padded":  # rows of a wider matrix: their starts are not aligned
        wide = t.new_zeros(*t.shape[:-1], t.shape[-1] + 3)
        wide[..., 1 : 1 + t.shape[-1]] = t
        return wide[..., 1 : 1 + t.shape[-1]]
    if layout == "offset":  # contiguous, one element past an aligned address
        flat = t.new_zeros(t.numel() + 1)
        flat[1:] = t.reshape(-1)
        return flat[1:].view(t.shape)
    if layout == "columns":  # every other column: the last dimension has stride 2
        wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1])
        wide[..., ::2] = t
        return wide[..., ::2]
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "expanded":
        return t[:1].expand_as(t) if t.dim() > 1 else t
    return t


def normal(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    mean: float = 0.0,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale + mean).to(dtype).to(device)


def rows_of_all_sizes(t: Tensor, seed: int) -> Tensor:
    """Scales each row by a power of two between 2^-10 and 2^4: eps decides in the small ones."""
    generator = torch.Generator().manual_seed(seed + 1)
    exponents = torch.randint(-10, 5, (*t.shape[:-1], 1), generator=generator)
    return torch.ldexp(t, exponents.to(t.device)).to(t.dtype)


hidden_sizes = st.integers(1, 70) | st.sampled_from(
    [127, 128, 129, 255, 257, 512, 576, 1000, 1023, 1025, 2048, 3072, 4100, 5120]
)
leading_shapes = st.one_of(
    st.tuples(st.integers(1, 12)),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.sampled_from([(), (0,), (1,), (2, 0), (67,), (1, 1, 3)]),
)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**16)


def random_targets(
    rows: int, vocab: int, *, device: Any = "cpu", seed: int = 0, ignored: float = 0.2, ignore_index: int = -100
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, vocab, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < ignored] = ignore_index
    return target.to(device)


@dataclass(frozen=True)
class Example:
    """One call of a public function: ``arguments(device, dtype)`` makes its keyword arguments, leaves that require
    gradients."""

    op: str
    arguments: Callable[[Any, torch.dtype], dict[str, Any]]
    name: str

    def __call__(self, arguments: dict[str, Any]) -> Any:
        import liger_ext.functional

        return getattr(liger_ext.functional, self.op)(**arguments)


def example(op: str, name: str = "", /, *, constants: Callable = lambda device, dtype: {}, **tensors: Any) -> Example:
    """Tensors by shape (a leaf that requires a gradient), anything else as it is."""

    def arguments(device: Any, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for seed, (key, value) in enumerate(tensors.items()):
            if isinstance(value, tuple):
                value = normal(*value, dtype=dtype, device=device, seed=seed).requires_grad_()
            made[key] = value
        return made | constants(device, dtype)

    return Example(op, arguments, f"{op}_{name}" if name else op)


def class_weights(vocab: int) -> Callable:
    """In the accumulator's dtype, as the ops take them."""

    def make(device: Any, dtype: torch.dtype) -> Tensor:
        return (torch.rand(vocab, generator=torch.Generator().manual_seed(3)) + 0.5).to(
            device, torch.float64 if dtype == torch.float64 else torch.float32
        )

    return make


def leaves_of(arguments: dict[str, Any]) -> list[Tensor]:
    return [v for v in arguments.values() if isinstance(v, Tensor) and v.requires_grad]


def losses_of(result: Any) -> list[Tensor]:
    """The differentiable outputs of a call."""
    from liger_ext.testing import outputs_of

    return [t for t in outputs_of(result).values() if t.requires_grad]


def gradients(example: Example, arguments: dict[str, Any], seed: int = 0, **kwargs: Any) -> tuple[Tensor, ...]:
    outputs = losses_of(example(arguments))
    grads = [normal(*t.shape, dtype=t.dtype, device=t.device, seed=seed + i) for i, t in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves_of(arguments), grads, **kwargs)


class RecordCalls(TorchDispatchMode):
    """Records the calls of liger_ext's ops, forward and backward, as (op, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_ext":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))
