"""Counts and gathers the rows whose target is not ignored, so that the fused loss runs its matmuls on these rows only.

The rows are counted at the start of a forward, so that the GPU still has work while the host waits for the count.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from liger_ext import _C
from liger_ext.ops._checks import check_integer, check_tensors, class_targets, shape_text

__all__ = ["CountedRows", "count_rows"]

# The number of gathered rows is rounded up to a multiple of a sixteenth of all rows: with few different sizes, the
# allocator can reuse memory.
_SIXTEENTHS = 16


class CountedRows:
    """The rows of a target that are not ignored, as :func:`count_rows` returns them."""

    def __init__(
        self, order: Tensor, count: Tensor, event: torch.cuda.Event | None = None, max_rows: int | None = None
    ) -> None:
        self._order = order  # indices of all rows; first those that are not ignored
        self._count = count  # of rows that are not ignored; without max_rows the host reads it after the event
        self._event = event
        self._max_rows = max_rows

    def __repr__(self) -> str:
        return f"CountedRows(of {self._order.numel()} rows)"

    def index(self) -> Tensor | None:
        """Returns the rows that are not ignored, in order, int64 ``(n,)``. Ignored rows follow until n is a multiple of
        a sixteenth of all rows. None if n would be the number of all rows. The host waits until the rows are counted;
        with ``max_rows``, n is that number, and the host does not wait."""
        if self._max_rows is not None:
            return self._order[: self._max_rows]
        if self._event is not None:
            self._event.synchronize()  # other Python threads may run meanwhile
            torch.cuda.current_stream(self._order.device).wait_event(self._event)
        rows = self._order.numel()
        step = max(1, -(-rows // _SIXTEENTHS))
        n = min(rows, max(1, -(-int(self._count) // step)) * step)
        return None if n == rows else self._order[:n]

    def targets(self, op: str, index: Tensor, target: Tensor, ignore_index: int, looks: bool) -> Tensor:
        """Returns the targets of the rows in ``index``. All other rows of ``target`` must be ignored. If one is not,
        this raises an error with ``looks``; otherwise all targets are replaced by a value that the op reports as this
        error."""
        ordered = target.index_select(0, self._order)
        targets, others = ordered[: index.shape[0]], ordered[index.shape[0] :]
        left_out = others != ignore_index
        if not looks:
            return targets.masked_fill_(left_out.any(), _C.rows_left_out)
        if left_out.any():
            row = int(self._order[index.shape[0] :][left_out][0])
            raise ValueError(
                f"{op}: rows leaves out row {row}, whose target is {int(target[row])} and not ignore_index "
                f"({ignore_index}): rows was counted for other targets or for another ignore_index. Call count_rows "
                "with the target and the ignore_index of this loss"
            )
        return targets


def count_rows(target: Tensor, ignore_index: int = -100, max_rows: int | None = None) -> CountedRows | None:
    """Starts to count the rows of ``target`` that are not ``ignore_index``, for the fused loss's ``rows``.

    On a GPU the count runs on its own stream, after the work that is queued on the current stream, and the host waits
    for the count in the loss. So call this function well before the loss, at the start of a forward: then the GPU has
    work while the host waits. A patched model calls it itself.

    The loss must have the same target and the same ignore_index: it raises a ValueError if a row that is not ignored
    was not counted. On a GPU the loss is NaN instead, and the next liger_ext call on the device, or
    :func:`check_errors`, raises the error.

    Args:
        target: int64 or uint8, of any shape.
        ignore_index: as in :func:`cross_entropy`.
        max_rows: an upper bound of the number of rows that are not ignored. The loss then runs on this number of rows,
            the host does not wait, and both work in a graph. More rows are an error: here on a CPU, otherwise in the
            loss, as with another target.

    Returns:
        The rows, or None, which stands for all rows. It is None if ``max_rows`` is at least the number of all rows.
        Without ``max_rows`` it is None where the host cannot wait for a count: in graphs of torch.compile, while a CUDA
        graph is captured, and for tensors without data.

    Raises:
        ValueError: target has another dtype, max_rows is less than 1, or, on a CPU, less than the number of rows that
            are not ignored.
    """
    check_tensors("count_rows", target=target)
    check_integer("count_rows", ignore_index=ignore_index)
    target = class_targets(target)
    if target.dtype != torch.int64:
        raise ValueError(f"count_rows: target has dtype {target.dtype}, expected torch.int64")
    if max_rows is not None:
        return _at_most(target, ignore_index, max_rows)
    if torch.compiler.is_compiling() or type(target) is not Tensor or target.device.type not in ("cpu", "cuda"):
        return None
    if target.device.type == "cpu":
        return CountedRows(*_order_and_count(target, ignore_index))
    if torch.cuda.is_current_stream_capturing():
        return None
    with torch.cuda.device(target.device):
        order = target.new_empty(target.numel())
        stream = _stream(target.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ordered, count = _order_and_count(target, ignore_index)
            order.copy_(ordered)
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(count, non_blocking=True)
            event = stream.record_event()
        for t in (target, order):  # allocated on the current stream, used on the other
            t.record_stream(stream)
        return CountedRows(order, on_host, event)


def _at_most(target: Tensor, ignore_index: int, max_rows: int) -> CountedRows | None:
    check_integer("count_rows", max_rows=max_rows)
    if max_rows < 1:
        raise ValueError(f"count_rows: max_rows is {max_rows}, expected at least 1")
    if max_rows >= target.numel():
        return None
    order, count = _order_and_count(target, ignore_index)
    if target.device.type == "cpu" and not torch.compiler.is_compiling() and count > max_rows:
        raise ValueError(f"count_rows: max_rows is {max_rows}, but {int(count)} rows of target are not ignored")
    return CountedRows(order, count, max_rows=max_rows)


def _order_and_count(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    ignored = target.detach().reshape(-1) == ignore_index
    return torch.argsort(ignored, stable=True), ignored.numel() - ignored.sum()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def listed_rows(
    op: str, rows: CountedRows | Tensor, target: Tensor, vocab_size: int, ignore_index: int
) -> tuple[Tensor, Tensor] | None:
    """Returns the index of ``rows`` and their targets; None for all rows. A row that is out of range gets a target that
    is out of range, too.

    Raises:
        TypeError, ValueError, IndexError: ``rows`` does not fit ``target``, ``(n,)``. On a CPU also if a target is out
            of range: the op's own error would name its position among the listed rows.
    """
    n = target.numel()
    looks = target.device.type == "cpu" and not torch.compiler.is_compiling()
    if isinstance(rows, CountedRows):
        if rows._order.numel() != n or rows._order.device != target.device:
            raise ValueError(
                f"{op}: rows is of a target with {rows._order.numel()} rows on {rows._order.device}, expected {n} on "
                f"{target.device}"
            )
        index = rows.index()
        if index is None:
            return None
        targets = rows.targets(op, index, target, ignore_index, looks)
    else:
        check_tensors(op, rows=rows)
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise ValueError(f"{op}: rows has shape {shape_text(rows)} and dtype {rows.dtype}, expected (n,) and int64")
        if rows.device != target.device:
            raise ValueError(f"{op}: rows is on {rows.device}, expected {target.device}, as target is")
        wrong = (rows < 0) | (rows >= n)
        if looks and wrong.any():
            raise IndexError(f"{op}: rows has {rows[wrong][0].item()}, expected at least 0 and less than {n}")
        index = rows.clamp(0, max(n - 1, 0))
        targets = target.index_select(0, index).masked_fill(wrong, vocab_size)
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size)) if looks else None
    if looks and bad.any():
        at = int(index[bad].min())
        raise IndexError(
            f"{op}: target[{at}] is {int(target[at])}, expected a class in [0, {vocab_size}) or ignore_index "
            f"({ignore_index})"
        )
    return index, targets


class _Gathered(torch.autograd.Function):
    """``x[index]`` for an index without duplicates: the backward copies rows and need not add them."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        # In place, since autocast would cast the arguments of index_copy.
        return gradient.new_zeros(ctx.rows, gradient.shape[1]).index_copy_(0, index, gradient), None


def gather(x: Tensor, index: Tensor) -> Tensor:
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return x.index_select(0, index)  # the op raises the error for these modes
    return _Gathered.apply(x, index)


def for_all_rows(outputs, index: Tensor, rows: int, per_row: bool, *wanted: bool) -> tuple[Tensor, ...]:
    """Expands per-row results of the listed rows to all ``rows``. Ignored rows get 0, and -1 as predicted token."""
    expanded = []
    for nth, (values, want) in enumerate(zip(outputs, (True, *wanted), strict=False)):
        predicted = nth == 3
        if want and (per_row or predicted):
            values = values.new_full((rows,), -1 if predicted else 0).index_copy_(0, index, values)
        expanded.append(values)
    return tuple(expanded)
