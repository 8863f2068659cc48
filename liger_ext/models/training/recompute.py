"""Recomputes cheap results in the backward, so that the modules that read them need not save them.

Linear layers save their inputs: the norms' outputs, and the MLP's h = silu(gate) * up. Two functions avoid this:

- `recomputed`, under torch.compile, puts the op that computes the input into a checkpoint.
- `recompute_when_saved`, without torch.compile, is for linear layers that must be called as modules (hooks,
  DoRA, most quantised weights). Saved-tensor hooks around the call recognise the input, whichever op saves it, and
  store the function that computes it instead. (Other linear layers run in `training.nodes`, which save less by
  themselves.)

Neither has an effect if a module's `liger_memory` is "fast".
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
    """Returns whether torch.compile traces a graph that a backward may follow.

    It is False for a graph of torch.export: that contains only public ops, and a checkpoint in it has no gradients, or
    does not run.
    """
    return torch.compiler.is_compiling() and not is_exported() and training and torch.is_grad_enabled()


def recomputed(module: nn.Module, function: Callable, *args: object) -> object:
    """Returns `function(*args)`. A compiled training step of `module` saves `args` for the backward, not the result.

    torch.compile chooses which tensors to save. It always saves a matmul's input, which the matmul's backward reads,
    even if a cheap op computes it. Outside torch.compile, and in evaluation, `recomputed` only calls `function`: a
    checkpoint would take more of the host's time than a cheap op.

    `args` must contain all numbers that `function` takes. torch.compile(dynamic=True) turns a float that it first finds
    inside a checkpoint, such as a default, into an input of that checkpoint, and does not find it in the next one.
    """
    if in_training_graph(module.training) and module.liger_memory != "fast":
        return checkpoint(function, *args, use_reentrant=False)
    return function(*args)


def recompute_when_saved(
    module: nn.Module, tensor: Tensor, make: Callable[..., Tensor], *arguments: object
) -> AbstractContextManager:
    """Returns a context in which ops that save `tensor` for their backward save `make(*arguments)` in its place. The
    first of their backwards calls it.

    `make` must return the same bits again. The context has no effect under torch.compile, or if `tensor` requires no
    gradient (only the nodes of a graph save the arguments anyway), if other saved-tensor hooks are active (offloading,
    non-reentrant checkpoints), which must receive every tensor, or if hooks are disabled.
    """
    if module.liger_memory == "fast" or torch.compiler.is_compiling() or not _saved_tensors_hooks_is_enabled():
        return contextlib.nullcontext()
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    foreign = top is not None and not isinstance(getattr(top[0], "__self__", None), _Recipe)
    recorded = torch.is_grad_enabled() and tensor.requires_grad
    has_memory = type(tensor) is Tensor and not tensor.is_meta  # its address identifies it
    if foreign or not recorded or not has_memory:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_Recipe(tensor, make, arguments).pack, lambda saved: saved())


def _detached_reader(tensor: Tensor) -> Callable[[], Tensor]:
    """Returns a function that returns `tensor` detached: a node that saves its own output would otherwise keep itself
    alive."""
    detached, version = tensor.detach(), tensor._version

    def get() -> Tensor:
        if detached._version != version:  # torch does not check this under hooks
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
        self.arguments = [_detached_reader(a) if isinstance(a, Tensor) else a for a in arguments]
        self.users = self.waiting = 0  # ops that have saved it, and those that have yet to read it in this backward
        self.value: Tensor | None = None

    @staticmethod
    def identity(tensor: Tensor) -> tuple:
        return tensor.untyped_storage().data_ptr(), tensor._version, tensor.dtype

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        has_storage = type(tensor) is Tensor and tensor.layout is torch.strided
        if not has_storage or self.identity(tensor) != self.known:
            return _detached_reader(tensor)
        self.users += 1
        self.waiting += 1
        return functools.partial(self.get, tensor.size(), tensor.stride(), tensor.storage_offset() - self.offset)

    def get(self, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        value = self.value
        if value is None:
            with torch.no_grad():
                value = self.value = self.make(*(a() if callable(a) else a for a in self.arguments))
        self.waiting -= 1
        if self.waiting == 0:  # a second backward through the same graph starts anew
            self.value, self.waiting = None, self.users
        return value.as_strided(size, stride, offset + value.storage_offset())
