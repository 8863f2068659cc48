"""Binds the arguments and results of an op by their names, once, from the op's schema.

Functions that describe an op (fake implementations, autograd and flop formulas) name what they read by their
parameters. So a new argument of an op changes no such function, and a parameter that the schema lacks is an error at
import.
"""

from __future__ import annotations

import inspect
import operator
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch


def argument_names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def result_names(op: torch._ops.OpOverload) -> list[str]:
    """Returns the names of an op's results. The name of a single result may be empty."""
    return [result.name for result in op._schema.returns]


def selector(names: Sequence[str], wanted: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function that selects the values named ``wanted`` from values named ``names``.

    Raises:
        TypeError: a wanted name is not among ``names``.
    """
    for name in wanted:
        if name not in names:
            raise TypeError(f"the schema has no {name!r}; it has {', '.join(names)}")
    positions = [names.index(name) for name in wanted]
    if len(positions) == 1:
        return lambda values: (values[positions[0]],)
    return operator.itemgetter(*positions) if positions else lambda values: ()


def with_names(function: Callable, names: Sequence[str], first: int = 0) -> Callable:
    """Returns a function of values named ``names`` and of ``first`` further arguments. It calls ``function`` with the
    further arguments and then with the values that its other parameters name, or, if its only other parameter is
    ``values``, with a named tuple of all values."""
    parameters = list(inspect.signature(function).parameters)[first:]
    if parameters == ["values"]:
        named = namedtuple("Values", names)._make
        return lambda values, *others: function(*others, named(values))
    select = selector(names, parameters)
    return lambda values, *others: function(*others, *select(values))


def called_by_name(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns a function that calls the op with its arguments from a dict, which may have other items, too."""
    select = operator.itemgetter(*argument_names(op))
    return lambda values: op(*select(values))
