"""The arguments of the fused loss's op: by name, and without data, as ``_loss_plan.py`` and the trace read them."""

from __future__ import annotations

import operator
from collections import namedtuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import condition_holds
from liger_ext.ops._compile import assume_constant_result
from liger_ext.ops._schema import argument_names

_op = torch.ops.liger_ext.fused_linear_cross_entropy.default
NAMES = argument_names(_op)
_Fields: Any = namedtuple("_Fields", NAMES, defaults=[_C.loss_defaults[n] for n in NAMES if n in _C.loss_defaults])


def _of_type(type_name: str) -> list[str]:
    return [argument.name for argument in _op._schema.arguments if type_name in str(argument.type)]


TENSORS = _of_type("Tensor")
OPTIONS = [name for name in NAMES if name not in TENSORS]
select_options = operator.itemgetter(*OPTIONS)

_FLOATS = _of_type("float")
# The op gives these shapes to its tensors.
_SHAPES = {"x": ("rows", "hidden"), "weight": ("vocab", "hidden"), "target": ("rows",), "bias": ("vocab",)}
_SHAPES |= {"ce_weight": ("vocab",), "normalizer": (), "temperature": ("rows",)}


class Layout(NamedTuple):
    """A tensor without data."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@assume_constant_result
def _constant(name: str, differs: bool) -> Any:
    """Returns an option's default, or a number that stands for all others. A graph stores it as a constant."""
    return 0.5 if differs else _C.loss_defaults[name]


def matmul_dtype(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of the matmuls. The losses have the dtype of its accumulator."""
    return torch.promote_types(x.dtype, weight.dtype) if compute_dtype is None else compute_dtype


def wide_logits(x: Tensor, weight: Tensor, compute_dtype: torch.dtype | None, logits_dtype: torch.dtype | None) -> bool:
    """Whether the logits are wider than the operands of the matmuls."""
    return logits_dtype not in (None, matmul_dtype(x, weight, compute_dtype))


class LossArguments(_Fields):
    """The op's arguments, in the order of its schema, with the defaults of csrc/checks."""

    __slots__ = ()

    def without_data(self) -> LossArguments:
        """Returns the hashable arguments on which a plan depends: a Layout for each tensor; and for each float option
        only whether it differs from its default, so that a call with an annealed option is planned once."""
        found = {"ignore_index": _constant("ignore_index", False)}
        for name in TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                found[name] = Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        for name in _FLOATS:
            value, default = getattr(self, name), _constant(name, False)
            differs = value is not None and (default is None or condition_holds(value != default))
            found[name] = _constant(name, differs)
        return self._replace(**found)

    def with_sizes(self, **sizes: int) -> LossArguments:
        """Returns arguments with contiguous tensors of these sizes: rows, hidden and vocab. A dtype may stand for a
        tensor."""
        found = {}
        for name, dimensions in _SHAPES.items():
            tensor = getattr(self, name)
            if tensor is not None:
                shape = tuple([sizes[dimension] for dimension in dimensions])
                strides = (*shape[1:], 1)[: len(shape)]
                found[name] = Layout(shape, strides, getattr(tensor, "dtype", tensor))
        return self._replace(**found)
