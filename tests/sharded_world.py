"""Declares cases of test_sharded_vocabulary.py (``case``), and calls an op with a sharded vocabulary on the arguments
of all classes (``World.run``)."""

from functools import partial

import processes
import torch
from cases import host_target
from test_checks import differences

from liger_ext import functional as F
from liger_ext.testing import judge

PROCESSES = 2, 3
CASES = {}  # {name: (number of processes, function that each process calls)}


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


def check_ops(world, record, names):
    """Checks, in one process of two, which ops of a shard have run, and each of them."""
    if world.size == 2 and world.rank == 0:
        assert set(record.names) == {f"vocabulary_shard_{name}" for name in names}
        for op, args in record.calls:
            detached = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            torch.library.opcheck(op, tuple(detached))
            found = [] if host_target() else [*differences(op, detached)]
            assert not found, "\n".join(found)


class World(processes.World):
    def sizes(self, vocab):
        """Returns unequal sizes of the shards."""
        return [vocab // 2, vocab - vocab // 2] if self.size == 2 else [vocab - vocab // 2 - 1, 1, vocab // 2]

    def run(self, x, weight, target, bias=None, sizes=None, op=F.fused_linear_cross_entropy, **options):
        """Calls an op with this process's shard of the full arguments, which receive full gradients."""
        sizes = self.sizes(weight.shape[0]) if sizes is None else sizes
        bias = None if bias is None else ShardRows.apply(bias, self, sizes)
        weight = ShardRows.apply(weight, self, sizes)
        made = op(SameGradient.apply(x, self), weight, target, bias, process_group=self.group, **options)
        for t in (made,) if isinstance(made, torch.Tensor) else made:
            if t is not None:
                self.same(t)
        return made

    def judge(self, inputs, sizes=None):
        return judge("fused_linear_cross_entropy", inputs, run=partial(self.run, sizes=sizes))


class ShardRows(torch.autograd.Function):
    """The rows of this process's shard; the backward concatenates the gradients of all shards."""

    @staticmethod
    def forward(ctx, full, world, sizes):
        ctx.world = world
        return full.split(sizes)[world.rank].clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat(ctx.world.gathered(gradient)), None, None


class SameGradient(torch.autograd.Function):
    """The identity; the backward asserts that all processes have the same gradient."""

    @staticmethod
    def forward(ctx, x, world):
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.world.same(gradient)
        return gradient, None
