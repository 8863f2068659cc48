"""What torch.compile and torch's counter of flops have to be told, without an import of them: `torch.compiler`'s
decorators import torch._dynamo, and the counter imports triton. Each takes longer than all else in `import liger_ext`.

Our ops are made known to its code generator, as it would do itself, before it meets them. Before torch 2.13 it
describes an op that it does not know in a text for its log, whether anybody reads that or not, with all that the op's
arguments come from, and all that those come from. For the loss of a model of 16 layers that took longer than anybody
waits.
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

_ops: list[torch._ops.OpOverload] = []


def introduce(op: torch._ops.OpOverload) -> None:
    """Has `op` known from the next call of `make_known` on."""
    _ops.append(op)


def make_known() -> None:
    """Called while graphs are traced; the code generator is imported by then, if it is used at all."""
    graph = sys.modules.get("torch._inductor.graph")
    while _ops and graph is not None:
        op = _ops.pop()
        with contextlib.suppress(AttributeError):  # of a torch that has other names: it makes them known itself
            if op not in graph.lowerings:
                tag = graph.get_layout_constraint_tag(op, with_default=True)
                graph.make_fallback(op, layout_constraint=graph.tag_to_layout_constraint(tag))


def assume_constant_result(function: Callable) -> Callable:
    """As `torch.compiler.assume_constant_result`: a graph has the function's result in place of the call."""
    function._dynamo_marked_constant = True
    return function


def outside_of_graphs(function: Callable) -> Callable:
    """As `torch.compiler.disable`: a call ends the graph, and runs as it does where nothing is compiled."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if "torch._dynamo" in sys.modules:
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    call._torchdynamo_disable = True
    return call


def flop_formula(op: torch._ops.OpOverloadPacket) -> Callable:
    """As `torch.utils.flop_counter.register_flop_formula`, when that module is imported."""

    def register(formula: Callable) -> Callable:
        counter = sys.modules.get(_COUNTER)
        if counter is None:
            _formulas.append((op, formula))
        else:
            counter.register_flop_formula(op)(formula)
        return formula

    return register


_COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[torch._ops.OpOverloadPacket, Callable]] = []


class _CounterFinder(importlib.abc.MetaPathFinder):
    """Finds the counter's module as it would be found without this, and registers the formulas once it has run."""

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
                module.register_flop_formula(op)(formula)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = run_and_register
        return spec


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _CounterFinder())
