"""Helpers that many tests share: tensors in several memory layouts, hypothesis strategies, example calls of an op, a
recorder of op calls, a meter of memory and child Pythons."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_ext._load import library_folder

ROOT = Path(__file__).parent.parent
LOW = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "padded", "offset", "columns", "transposed", "expanded")


def slow_if(condition: Any, *values: Any) -> Any:
    """Returns the parameters of a test, marked ``slow`` if the condition holds."""
    return pytest.param(*values, marks=[pytest.mark.slow] * bool(condition))


def device_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    return LOW if device.type == "cuda" or host_target() else (*LOW, torch.float64)


def host_target() -> bool:
    """Returns whether CPU tensors run the GPU kernels on the host (test_host_target) instead of the CPU kernels."""
    return library_folder().name == "host"


def ahead_target() -> bool:
    """Returns whether the library is the host target with clusters and with copies that prefetch rows."""
    return host_target() and library_folder().parent.name == "ahead"


def laid_out(t: Tensor, layout: str) -> Tensor:
    """Returns the values of ``t`` in another memory layout. "expanded" repeats the first slice of the leading
    dimension."""
    if t.dim() == 0 or t.numel() == 0:
        return t
    if layout == "padded":  # rows of a wider matrix: their addresses are unaligned
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


def scaled_rows(t: Tensor, seed: int) -> Tensor:
    """Scales each row by a power of two between 2^-10 and 2^4: in the small rows eps determines the result."""
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


def draw_tensor(
    data: Any,
    device: torch.device,
    *shape: int,
    dtype: torch.dtype | None = None,
    layouts: st.SearchStrategy[str] = layouts,
    all_sizes: bool = False,
    **values: float,
) -> Tensor:
    """Draws a normally distributed tensor in one of the layouts; without ``dtype``, in any dtype of the device."""
    dtype, seed = dtype or data.draw(st.sampled_from(device_dtypes(device))), data.draw(seeds)
    t = normal(*shape, dtype=dtype, device=device, seed=seed, **values)
    return laid_out(scaled_rows(t, seed) if all_sizes else t, data.draw(layouts))


def draw_leaf(data: Any, device: torch.device, *shape: int, **options: Any) -> Tensor:
    """Draws a tensor like ``draw_tensor``; ``requires_grad`` is drawn, too."""
    return draw_tensor(data, device, *shape, **options).requires_grad_(data.draw(st.booleans()))


def draw_parameter(data: Any, device: torch.device, size: int, mean: float) -> Tensor | None:
    if data.draw(st.integers(0, 5)) == 0:
        return None
    kinds = st.sampled_from(["contiguous", "offset", "columns"])
    return draw_leaf(data, device, size, layouts=kinds, mean=mean, scale=0.5)


@dataclass(frozen=True)
class Example:
    """One call of a public function: ``arguments(device, dtype)`` returns its keyword arguments. Their tensors are
    leaves that require gradients, and constants such as targets."""

    op: str
    arguments: Callable[[Any, torch.dtype], dict[str, Any]]
    name: str

    def __call__(self, arguments: dict[str, Any]) -> Any:
        import liger_ext.functional

        return getattr(liger_ext.functional, self.op)(**arguments)


def example(op: str, name: str = "", /, *, constants: Callable = lambda device, dtype: {}, **tensors: Any) -> Example:
    """Builds an example. A tuple is the shape of a leaf that requires a gradient; any other value is passed unchanged.
    ``constants(device, dtype)`` returns further arguments."""

    def arguments(device: Any, dtype: torch.dtype) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for seed, (key, value) in enumerate(tensors.items()):
            if isinstance(value, tuple):
                value = normal(*value, dtype=dtype, device=device, seed=seed).requires_grad_()
            made[key] = value
        return made | constants(device, dtype)

    return Example(op, arguments, f"{op}_{name}" if name else op)


def class_weights(vocab: int) -> Callable:
    """Returns a function that draws class weights in the accumulator's dtype, which the ops require."""

    def make(device: Any, dtype: torch.dtype) -> Tensor:
        return (torch.rand(vocab, generator=torch.Generator().manual_seed(3)) + 0.5).to(
            device, torch.float64 if dtype == torch.float64 else torch.float32
        )

    return make


def tensor_leaves(arguments: dict[str, Any]) -> list[Tensor]:
    return [v for v in arguments.values() if isinstance(v, Tensor) and v.requires_grad]


def differentiable_outputs(result: Any) -> list[Tensor]:
    """Returns the differentiable outputs of a call."""
    from liger_ext.testing import named_outputs

    return [t for t in named_outputs(result).values() if t.requires_grad]


def grads_for(outputs: list[Tensor]) -> list[Tensor]:
    """Returns an upstream gradient for each output of a call."""
    return [normal(*t.shape, dtype=t.dtype, device=t.device, seed=i) for i, t in enumerate(outputs)]


def gradients(example: Example, arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    outputs = differentiable_outputs(example(arguments))
    return torch.autograd.grad(outputs, tensor_leaves(arguments), grads_for(outputs))


class RecordCalls(TorchDispatchMode):
    """Records the calls of liger_ext's ops, forward and backward, as (op, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger_ext":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Names of the recorded ops, such as "rms_norm_backward"."""
        return [op.__name__.split(".")[0] for op, _ in self.calls]


def recorded(example: Example, device: Any, dtype: torch.dtype = torch.float32) -> list[tuple[Any, tuple[Any, ...]]]:
    """Returns the op calls of a forward and a backward. The recorded arguments of the forward keep their
    requires_grad."""
    with RecordCalls() as record:
        gradients(example, example.arguments(device, dtype))
    return record.calls


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Sets torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tracked_files() -> list[Path]:
    """Returns the repository's files, without those that only this machine has."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name]


def environment() -> dict[str, str]:
    """Returns the environment for a child Python that imports the modules of this one."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def python(*arguments: Any, **changed: str) -> str:
    """Runs a child Python with the modules of this one and returns its stdout; fails if its exit status is not 0."""
    env = environment() | changed
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def library_lines(function: str) -> list[str]:
    """Calls a function of libliger_ext_cpu.so that returns text, and returns the lines."""
    tell = getattr(ctypes.CDLL(str(library_folder() / "libliger_ext_cpu.so")), function)
    tell.restype = ctypes.c_char_p
    return tell().decode().splitlines()


def most_bytes(device: torch.device, run: Callable[[], Any]) -> int:
    """Returns the peak memory of the tensors that ``run`` allocates, its result included."""
    if device.type == "cuda":
        one = torch.ones(1, 1, device=device, requires_grad=True)
        (one @ one).backward()  # cuBLAS allocates a workspace once for the forward's and the backward's thread
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = run()
    del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler recorded no allocation"
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
