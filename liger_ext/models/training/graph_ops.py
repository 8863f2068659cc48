"""Functions of a training step that are one op each in a graph of torch.compile, which then does not look into them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from liger_ext.ops._compile import introduce

_LIBRARY = torch.library.Library("liger_ext_models", "FRAGMENT")  # apart from the public ops, which have records


def without_autocast(function: Callable) -> Callable:
    """The dtypes are those of the forward, wherever a backward is called."""

    @functools.wraps(function)
    def run(*args):
        device_type = next(a for a in args if isinstance(a, Tensor)).device.type
        if not torch.is_autocast_enabled(device_type):
            return function(*args)
        with torch.autocast(device_type, enabled=False):
            return function(*args)

    return run


def op_of_graphs(arguments: str) -> Callable:
    """A decorator: in a graph that torch.compile makes, the function is one op, of these arguments.

    What is kept, and in what dtype sums are made, is then decided in the function, not by the compiler, which would
    keep a matmul's input though it costs next to nothing, and add gradients by kernels. The function returns several
    tensors; an op has no None among its results: an empty tensor stands for it.
    """

    def decorate(function: Callable) -> Callable:
        @without_autocast
        def run(*args):
            results = function(*args)
            some = next(t for t in results if t is not None)
            return [some.new_empty(0) if t is None else t for t in results]

        name = function.__name__.removeprefix("_")
        _LIBRARY.define(f"{name}({arguments}) -> Tensor[]")
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_ext_models::{name}", run, lib=_LIBRARY)
        op = getattr(torch.ops.liger_ext_models, name).default
        introduce(op)

        def call(*args):
            return op(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate
