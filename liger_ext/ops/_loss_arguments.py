"""The arguments of the fused loss's op by name, and a call of the op without data.

The trace (csrc/trace) runs the op on the arguments of such a call, and ``_loss_plan.py`` chooses the call's plan.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import REDUCTIONS, condition_holds
from liger_ext.ops._compile import assume_constant_result
from liger_ext.ops._schema import argument_names

_op = torch.ops.liger_ext.fused_linear_cross_entropy.default
NAMES = argument_names(_op)
_Fields: Any = namedtuple("_Fields", NAMES, defaults=[_C.loss_defaults[n] for n in NAMES if n in _C.loss_defaults])


def _names_by_type(type_name: str) -> list[str]:
    return [argument.name for argument in _op._schema.arguments if type_name in str(argument.type)]


TENSORS = _names_by_type("Tensor")
OPTIONS = [name for name in NAMES if name not in TENSORS]

FLOATS, _FLAGS = _names_by_type("float"), _names_by_type("bool")
# The op gives these shapes to its tensors.
_SHAPES = {"x": ("rows", "hidden"), "weight": ("vocab", "hidden"), "target": ("rows",), "bias": ("vocab",)}
_SHAPES |= {"ce_weight": ("vocab",), "normalizer": (), "temperature": ("rows",)}


class Layout(NamedTuple):
    """A tensor without data. ``readable``: kernels and matmuls can read it where it lies, so the op does not copy it.
    Strides have no other effect on a plan; a key with strides would plan a call again for each length of a slice."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    readable: bool = True


_OTHER = 0.5  # a float option that differs from its default


@assume_constant_result
def _constant(name: str, differs: bool) -> Any:
    """Returns an option's default or ``_OTHER``. A graph stores it as a constant."""
    return _OTHER if differs else _C.loss_defaults[name]


def matmul_dtype(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the matmuls. The losses have the dtype of its accumulator."""
    return torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype


def wide_logits(values: dict[str, Any]) -> bool:
    """Whether the logits are wider than the operands of the matmuls. ``values``: arguments of the op."""
    compute = matmul_dtype(values["x"], values["weight"], values["compute_dtype"])
    return values["logits_dtype"] not in (None, compute)


class LossArguments(_Fields):
    """The op's arguments, in the order of its schema, with the defaults of csrc/checks."""

    __slots__ = ()

    def with_sizes(self, **sizes: int) -> LossArguments:
        """Returns arguments with contiguous tensors of these sizes: rows, hidden and vocab. A dtype may stand for a
        tensor."""
        found = {}
        for name, dimensions in _SHAPES.items():
            tensor = getattr(self, name)
            if tensor is not None:
                found[name] = Layout(tuple([sizes[n] for n in dimensions]), getattr(tensor, "dtype", tensor))
        return self._replace(**found)


_DEFAULTS = LossArguments(None, None, None)._asdict()


def with_defaults(**values: Any) -> dict[str, Any]:
    """Returns the op's arguments in their order. A graph must not read the defaults of floats from a global."""
    return LossArguments(**values)._asdict() if torch.compiler.is_compiling() else _DEFAULTS | values


def without_data(values: dict[str, Any]) -> LossArguments:
    """Returns the hashable arguments on which a plan depends: a Layout for each tensor; and for each float option only
    whether it differs from its default, so that a call with an annealed option is planned once. A graph ignores copies,
    and must not compare strides that it does not know."""
    in_graph = torch.compiler.is_compiling()
    found = {**values, "ignore_index": _constant("ignore_index", False)}
    for name in TENSORS:
        t = values[name]
        if t is not None:
            readable = (
                in_graph or t.is_contiguous() or (t.dim() == 2 and t.stride(1) == 1 and t.stride(0) >= t.shape[1])
            )
            found[name] = Layout(t.shape, t.dtype, readable)
    for name in FLOATS:
        value, default = values[name], _C.loss_defaults[name]
        if type(value) is float and not in_graph:  # fast
            found[name] = value if value == default else _OTHER
        elif value is not None:
            found[name] = _constant(name, condition_holds(value != default))
    for name in _FLAGS:
        if type(values[name]) is not bool:
            found[name] = bool(values[name])
    return LossArguments(*found.values())  # torch 2.11 breaks no graph with the result of _make


class FusedLossCall(NamedTuple):
    """A call of the op, without data, and facts about the code around it on which the plan depends, too.

    ``arguments``: from ``without_data``; sizes may be symbolic. ``device``: from ``device_index``.
    ``overlays``: the gradient of the logits may be stored in the memory that becomes dweight. ``all_rows``: the rows of
    x from which the op's rows are gathered, or 0. ``copies``: bytes of the copies that Python makes of arguments.
    ``free``: bytes beside the gradients that the call may use without raising the peak, since other code needs them at
    another time.
    """

    arguments: LossArguments
    device: int
    overlays: bool = True
    all_rows: int = 0
    copies: int = 0
    free: int = 0

    @classmethod
    def uniform(cls, rows, hidden, vocab, dtype, device, reduction="mean", **options) -> FusedLossCall:
        """Returns a call that computes dx and dweight, for x and weight of one dtype. ``options``: further arguments of
        the op, or others in place of these. A dtype stands for a tensor."""
        values = {"x": dtype, "weight": dtype, "target": torch.int64, "reduction": REDUCTIONS[reduction]}
        values |= {"need_dx": True, "need_dweight": True, **options}
        return cls(LossArguments(**values).with_sizes(rows=rows, hidden=hidden, vocab=vocab), device)

    def replaced(self, **arguments: object) -> FusedLossCall:
        """Returns the call with other arguments of the op."""
        return self._replace(arguments=self.arguments._replace(**arguments))

    def resized(self, **sizes: int) -> FusedLossCall:
        sizes = {"rows": self.rows, "hidden": self.hidden, "vocab": self.vocab, **sizes}
        return self._replace(arguments=self.arguments.with_sizes(**sizes))

    @property
    def rows(self) -> int:
        return self.arguments.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.arguments.weight.shape[1]

    @property
    def vocab(self) -> int:
        return self.arguments.weight.shape[0]

    @property
    def compute(self) -> torch.dtype:
        return matmul_dtype(self.arguments.x, self.arguments.weight, self.arguments.compute_dtype)

    @property
    def wide_logits(self) -> bool:
        return self.arguments.logits_dtype not in (None, self.compute)
