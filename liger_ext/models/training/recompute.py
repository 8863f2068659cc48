"""Results that cost little to make again, and that their consumers then need not keep for the backward.

Linear layers keep their inputs: the norms' outputs, and the MLP's h = silu(gate) * up. Under torch.compile a checkpoint
around the op says that it runs again (`recomputed`). Without it `training.nodes` has nodes of the graph that keep less.
Where layers are not ours to change (LoRA, quantised weights, hooks), saved-tensor hooks around their call recognise the
result, whoever saves it, and keep how to make it (`remade`). A module's `liger_memory` of "fast" switches both off.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._C._autograd import _saved_tensors_hooks_is_enabled
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from liger_ext.models.patching.calls import is_exported


def in_training_graph(training: bool) -> bool:
    """Whether torch.compile makes a graph that a backward may follow.

    torch.export makes graphs as well, of public ops alone; a checkpoint in one has no gradients, or does not run.
    """
    return torch.compiler.is_compiling() and not is_exported() and training and torch.is_grad_enabled()


def recomputed(module: nn.Module, function: Callable, *args: object) -> object:
    """`function(*args)`; a compiled training step of `module` keeps `args` for the backward, and not the result.

    torch.compile chooses what to keep, but a matmul's input it always keeps, as the matmul's backward reads it, even
    where it is the result of an op that costs next to nothing. Nothing changes outside of torch.compile, where a
    checkpoint takes more of the host's time than such an op, nor in evaluation.

    `args` has all numbers that `function` takes. torch.compile(dynamic=True) makes a float that it first finds inside
    of a checkpoint, such as a default, an input of that checkpoint, and does not find it in the next one.
    """
    if in_training_graph(module.training) and module.liger_memory != "fast":
        return checkpoint(function, *args, use_reentrant=False)
    return function(*args)


def remade(
    module: nn.Module, tensor: Tensor, make: Callable[..., Tensor], *arguments: object
) -> AbstractContextManager:
    """Inside, who saves `tensor` for a backward keeps `make(*arguments)`, which runs when the first of them needs it.

    `make` gives the same bits again. Nothing changes where `tensor` is not part of a graph, whose nodes keep the
    arguments anyway, and under saved-tensor hooks of others (offloading, non-reentrant checkpoints), which count on
    seeing every tensor, or where hooks are forbidden.
    """
    if module.liger_memory == "fast" or torch.compiler.is_compiling() or not _saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    foreign = top is not None and not isinstance(getattr(top[0], "__self__", None), _Recipe)
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    has_memory = type(tensor) is Tensor and not tensor.is_meta  # by whose address it is recognised
    if foreign or not recorded or not has_memory:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_Recipe(tensor, make, arguments).pack, lambda saved: saved())


def _kept(tensor: Tensor) -> Callable[[], Tensor]:
    """What returns `tensor` without its place in the graph: an output's own node would hold itself."""
    detached, version = tensor.detach(), tensor._version

    def get() -> Tensor:
        if detached._version != version:  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(detached.shape)} is at version {detached._version}, expected {version}"
            )
        return detached

    return get


class _Recipe:
    def __init__(self, tensor: Tensor, make: Callable[..., Tensor], arguments: tuple) -> None:
        self.known = self.identity(tensor)
        self.offset = tensor.storage_offset()
        self.make = make
        self.arguments = [_kept(a) if isinstance(a, Tensor) else a for a in arguments]
        self.users = self.waiting = 0  # who has saved it, and who will still ask in this backward
        self.value: Tensor | None = None

    @staticmethod
    def identity(tensor: Tensor) -> tuple:
        return tensor.untyped_storage().data_ptr(), tensor._version, tensor.dtype

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        has_storage = type(tensor) is Tensor and tensor.layout is torch.strided
        if not has_storage or self.identity(tensor) != self.known:
            return _kept(tensor)
        self.users += 1
        self.waiting += 1
        return functools.partial(self.get, tensor.size(), tensor.stride(), tensor.storage_offset() - self.offset)

    def get(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        value = self.value
        if value is None:
            with torch.no_grad():
                value = self.value = self.make(*(a() if callable(a) else a for a in self.arguments))
        self.waiting -= 1
        if self.waiting == 0:  # a second backward through the same graph begins anew
            self.value, self.waiting = None, self.users
        return value.as_strided(size, stride, offset + value.storage_offset())
