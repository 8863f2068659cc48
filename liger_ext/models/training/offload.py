"""Layers' inputs that wait in host memory for the backward: with gradient checkpointing, nearly all that is kept.

Copies run beside the matmuls, on a stream of their own: to the host while the layer runs, and back while the backward
of the layer after it does.
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

_WORTHWHILE = 1 << 20  # bytes; of anything smaller, the copy costs more than it is worth
_PIECE = 1 << 26  # bytes; torch rounds pinned memory up to powers of two, which is too much for a whole input


@contextlib.contextmanager
def inputs_on_host(x: Tensor) -> Iterator[None]:
    """Inside, a checkpoint that saves `x`, a layer's input, saves a copy on the host.

    Nothing changes on a CPU, and under saved-tensor hooks of others, which see to it themselves.

    Raises:
        RuntimeError: `x` was written meanwhile.
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
    """Values in pinned host memory, and how to bring them back."""

    def __init__(self, tensor: Tensor) -> None:
        self.like = tensor.to("meta")
        self.device = tensor.device
        self.before = _last.get(self.device)  # whose turn in the backward is next
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
        """Begins to copy; the memory is the current stream's, which may still use what was there before."""
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
        """What was fetched for a backward that went no further must not be used for something else while it comes."""
        if getattr(self, "fetched", None) is not None:
            self.owner.wait_event(self.ready)


_last: dict[torch.device, weakref.ref[_OnHost]] = {}


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.detach().view(-1).split(_PIECE // tensor.element_size())


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
