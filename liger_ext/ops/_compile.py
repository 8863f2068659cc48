"""What torch.compile has to be told, without an import of it: `torch.compiler`'s decorators import torch._dynamo, which
takes longer than all else that `import liger_ext` does.

Our ops are made known to its code generator, as it would do itself, before it meets them. Before torch 2.13 it
describes an op that it does not know in a text for its log, whether anybody reads that or not, with all that the op's
arguments come from, and all that those come from. For the loss of a model of 16 layers that took longer than anybody
waits.
"""

from __future__ import annotations

import contextlib
import functools
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
