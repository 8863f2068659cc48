"""What torch.compile computes a second time in the backward, so as not to keep it from the forward."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(module: nn.Module, function: Callable, *args: object) -> object:
    """`function(*args)`; a compiled training step of `module` keeps `args` for the backward, and not the result.

    torch.compile chooses what to keep, but a matmul's input it always keeps, as the matmul's backward reads it, even
    where it is the result of an op that costs next to nothing. Nothing changes outside of torch.compile, where a
    checkpoint takes more of the host's time than such an op, nor in evaluation.

    `args` has all numbers that `function` takes. torch.compile(dynamic=True) makes a float that it first finds inside
    of a checkpoint, such as a default, an input of that checkpoint, and does not find it in the next one.
    """
    if torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False)
    return function(*args)
