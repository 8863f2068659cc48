"""Decorators that make a function of a training step one op in a graph of torch.compile, which does not trace it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from liger_ext.ops._compile import register_later
from liger_ext.ops._register import AUTOCAST_KEYS

_LIBRARY = torch.library.Library("liger_ext_models", "FRAGMENT")  # apart from the public ops, which have records


def without_autocast(function: Callable) -> Callable:
    """Returns `function` with autocast disabled: a backward then uses the forward's dtypes, wherever it is called."""

    @functools.wraps(function)
    def run(*args):
        device_type = next(a for a in args if isinstance(a, Tensor)).device.type
        if not torch.is_autocast_enabled(device_type):
            return function(*args)
        with torch.autocast(device_type, enabled=False):
            return function(*args)

    return run


def differentiable_once(backward: Callable) -> Callable:
    """Returns the `backward` of an autograd.Function, computed with gradients off. With create_graph=True its results
    raise an error if they are differentiated: autograd would treat them as constants."""

    @functools.wraps(backward)
    def run(ctx, *grads):
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        return _Refusing.apply(len(results), *results, *_leaves(ctx), *grads)

    return run


class _Refusing(torch.autograd.Function):
    """Returns its first `count` tensors. They depend on all, and raise an error if they are differentiated."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            "liger_ext's layers have no second derivative: double backward (create_graph=True) is not supported"
        )


def _leaves(node: torch.autograd.graph.Node) -> list[Tensor]:
    """Returns the tensors with a gradient on which the result of a node of the graph depends."""
    seen, found, waiting = set(), [], [node]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        waiting += following
    return found


def graph_op(arguments: str) -> Callable:
    """Returns a decorator that makes a function one op, with these arguments, in a graph of torch.compile.

    The function then decides which tensors are saved, and in which dtype sums are computed. The compiler would save a
    matmul's input even if it is cheap to recompute, and would add gradients by separate kernels. The function returns
    several tensors. An op cannot return None: an empty tensor stands for it.
    """

    def decorate(function: Callable) -> Callable:
        @without_autocast
        @torch.no_grad()
        def run(*args):
            results = function(*args)
            some = next(t for t in results if t is not None)
            return [some.new_empty(0) if t is None else t for t in results]

        name = function.__name__.removeprefix("_")
        _LIBRARY.define(f"{name}({arguments}) -> Tensor[]")
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_ext_models::{name}", run, lib=_LIBRARY)
        op = getattr(torch.ops.liger_ext_models, name).default
        register_later(op)

        def call(*args):
            if torch.compiler.is_compiling():
                return op(*args)
            if _get_current_dispatch_mode() is not None:  # selective checkpoints and FLOP counters look for aten.mm
                return function(*args)
            # Each op takes less time on the host without the dispatch of autograd, and of autocast.
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return function(*args)

        return call

    return decorate
