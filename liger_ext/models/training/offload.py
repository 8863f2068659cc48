"""Keeps the inputs of checkpointed layers in host memory until the backward. A checkpointed step saves little else.

The copies run on a separate stream, at the same time as the matmuls: to the host while the layer runs, and back during
the backward of the next layer.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._autograd import _saved_tensors_hooks_is_enabled, _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

_WORTHWHILE = 1 << 20  # bytes; a copy of a smaller tensor costs more than it saves
_PIECE = 1 << 26  # bytes; torch rounds pinned memory up to powers of two, which wastes too much for a whole input


@contextlib.contextmanager
def inputs_on_host(x: Tensor) -> Iterator[None]:
    """A context in which a checkpoint that saves `x`, a layer's input, saves a copy on the host.

    It has no effect on a CPU, for small or non-contiguous tensors, or under saved-tensor hooks of others, which decide
    themselves where to store tensors.

    Raises:
        RuntimeError: `x` was modified inside the context.
    """
    free = _saved_tensors_hooks_is_enabled() and _top_saved_tensors_default_hooks(False) is None
    if not (x.is_cuda and x.is_contiguous() and type(x) is Tensor and x.nbytes >= _WORTHWHILE and free):
        yield
        return
    copies, version, address, shape = [], x._version, x.data_ptr(), x.shape

    def pack(saved: Tensor) -> Tensor | _OnHost:
        # autograd keeps this function as long as what it returns, so it must not refer to x itself
        if saved.data_ptr() != address or saved.shape != shape:
            return saved
        copies.append(_OnHost(saved))
        return copies[-1]

    with saved_tensors_hooks(pack, lambda saved: saved.get() if isinstance(saved, _OnHost) else saved):
        yield
    for copy in copies:
        copy.ready.wait()  # before the memory is used for something else
        if x._version != version:
            raise RuntimeError("the input of a checkpointed layer was modified by an inplace operation inside of it")


class _OnHost:
    """A tensor's values in pinned host memory, with the copy back to its device."""

    def __init__(self, tensor: Tensor) -> None:
        self.like = tensor.to("meta")
        self.device = tensor.device
        self.before = _last.get(self.device)  # the backward needs this one next
        _last[self.device] = weakref.ref(self)
        self.fetched: Tensor | None = None
        stream = _stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.pieces = [torch.empty_like(piece, device="cpu", pin_memory=True) for piece in _pieces(tensor)]
            for host, piece in zip(self.pieces, _pieces(tensor), strict=True):
                host.copy_(piece, non_blocking=True)
        self.ready = stream.record_event()

    def fetch(self) -> None:
        """Starts the copy to the device. It waits for the current stream, which allocates the memory and may still use
        its former contents."""
        self.fetched = torch.empty_like(self.like, device=self.device)
        self.owner, stream = torch.cuda.current_stream(self.device), _stream(self.device)
        stream.wait_stream(self.owner)
        with torch.cuda.stream(stream):
            for host, piece in zip(self.pieces, _pieces(self.fetched), strict=True):
                piece.copy_(host, non_blocking=True)
        self.ready = stream.record_event()

    def get(self) -> Tensor:
        if self.fetched is None:
            self.fetch()
        self.ready.wait()
        tensor, self.fetched = self.fetched, None
        before = self.before and self.before()
        if before is not None and before.fetched is None:
            before.fetch()
        return tensor

    def __del__(self) -> None:
        """Waits for a copy that no backward has read, so that its memory is not reused before the copy ends."""
        if getattr(self, "fetched", None) is not None:
            self.owner.wait_event(self.ready)


_last: dict[torch.device, weakref.ref[_OnHost]] = {}


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().view(-1).split(_PIECE // tensor.element_size())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
