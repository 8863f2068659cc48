"""The fused loss with a vocabulary that is sharded over the processes of a case, called as if it were not; and what
declares such a case."""

from functools import partial

import processes
import torch

from liger_ext import functional as F
from liger_ext.testing import judge

PROCESSES = 2, 3
CASES = {}  # by name: how many processes, and what each calls


def case(f):
    CASES.update({f"{f.__name__} {size}": (size, f) for size in PROCESSES})
    return f


def raises(error, match, f, *args, **options):
    try:
        f(*args, **options)
    except error as raised:
        assert match in str(raised), raised
    else:
        raise AssertionError(f"no {error.__name__}")


class World(processes.World):
    def sizes(self, vocab):
        """Of shards: unequal."""
        return [vocab // 2, vocab - vocab // 2] if self.size == 2 else [vocab - vocab // 2 - 1, 1, vocab // 2]

    def run(self, x, weight, target, bias=None, sizes=None, op=F.fused_linear_cross_entropy, **options):
        """An op, of its full arguments, with their full gradients."""
        sizes = self.sizes(weight.shape[0]) if sizes is None else sizes
        bias = None if bias is None else Part.apply(bias, self, sizes)
        weight = Part.apply(weight, self, sizes)
        made = op(Same.apply(x, self), weight, target, bias, process_group=self.group, **options)
        for t in (made,) if isinstance(made, torch.Tensor) else made:
            if t is not None:
                self.same(t)
        return made

    def judge(self, inputs, sizes=None):
        return judge("fused_linear_cross_entropy", inputs, run=partial(self.run, sizes=sizes))


class Part(torch.autograd.Function):
    """A process's rows; the backward joins the gradients."""

    @staticmethod
    def forward(ctx, full, world, sizes):
        ctx.world = world
        return full.split(sizes)[world.rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat(ctx.world.gathered(gradient)), None, None


class Same(torch.autograd.Function):
    """Itself, whose gradient is the same everywhere."""

    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.world.same(gradient)
        return gradient, None
