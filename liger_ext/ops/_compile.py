"""Registers the ops with torch.compile and torch's flop counter without importing either.

`torch.compiler`'s decorators import torch._dynamo, and the flop counter imports triton. Each takes longer than the rest
of `import liger_ext`.

The ops are registered with Inductor before it first meets them. For an op without a lowering, Inductor registers the
same fallback itself; but before torch 2.13 it also builds a log text that describes the op's arguments, their inputs,
and so on, whether the log is on or not. For the loss of a model of 16 layers that practically never ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable

import torch

from liger_ext.ops._schema import argument_names, with_names

_ops: list[torch._ops.OpOverload] = []


def register_later(op: torch._ops.OpOverload) -> None:
    """Adds `op` to the ops that the next call of `register_with_inductor` registers with Inductor."""
    _ops.append(op)


def register_with_inductor() -> None:
    """Registers the ops of `register_later` with Inductor. It is called while a graph is traced: then Inductor, if it
    is used, is imported."""
    graph = sys.modules.get("torch._inductor.graph")
    while _ops and graph is not None:
        op = _ops.pop()
        with contextlib.suppress(AttributeError):  # in a torch with other names, Inductor registers the op itself
            if op not in graph.lowerings:
                tag = graph.get_layout_constraint_tag(op, with_default=True)
                graph.make_fallback(op, layout_constraint=graph.tag_to_layout_constraint(tag))


def assume_constant_result(function: Callable) -> Callable:
    """Does what `torch.compiler.assume_constant_result` does: a graph contains the function's result as a constant."""
    function._dynamo_marked_constant = True
    return function


def disabled_in_graphs(function: Callable) -> Callable:
    """Does what `torch.compiler.disable` does: a call breaks the graph and runs eagerly."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    call._torchdynamo_disable = True
    return call


def flop_formula(op: torch._ops.OpOverloadPacket) -> Callable:
    """Does what `torch.utils.flop_counter.register_flop_formula` does, as soon as that module is imported. The
    parameters of the formula name the op's arguments that it reads, tensors included."""
    names = argument_names(op.default)

    def register(formula: Callable) -> Callable:
        bound = with_names(formula, names)

        def flops(*args, out_val=None, **kwargs):
            return bound([*args, *(kwargs[name] for name in names[len(args) :])])

        counter = sys.modules.get(_COUNTER)
        if counter is None:
            _formulas.append((op, flops))
        else:
            counter.register_flop_formula(op, get_raw=True)(flops)
        return formula

    return register


_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[torch._ops.OpOverloadPacket, Callable]] = []


class _CounterFinder(importlib.abc.MetaPathFinder):
    """Finds the flop counter's module through the other finders, and registers the formulas once the module has run."""

    _looks = False

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER or self._looks:
            return None
        self._looks = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looks = False
        run = spec.loader.exec_module

        def run_and_register(module: object) -> None:
            run(module)
            while _formulas:
                op, formula = _formulas.pop()
                module.register_flop_formula(op, get_raw=True)(formula)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = run_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _CounterFinder())
