"""The processes of test_sharded_vocabulary.py: ``python sharded_processes.py <rank> <processes> <folder>``.

Each case of sharded_cases.py runs in a process group of its own, so that one that fails disturbs no other; what it
raised is written to ``<folder>/<rank>.json``.
"""

import datetime
import json
import sys
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from sharded_cases import CASES

from liger_ext import functional as F
from liger_ext.testing import judge

TIMEOUT = datetime.timedelta(seconds=60)


class World:
    """The processes of a case. ``group`` is their process group."""

    def __init__(self, ranks):
        self.size, self.rank = len(ranks), dist.get_rank()
        self.group = dist.new_group(ranks, timeout=TIMEOUT)

    def gathered(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def same(self, t):
        """In all processes, bit by bit."""
        for other in self.gathered(t.detach()):
            assert torch.equal(other.nan_to_num(7e7), t.detach().nan_to_num(7e7)), (other, t)

    def sizes(self, vocab):
        """Of shards: unequal."""
        return [vocab // 2, vocab - vocab // 2] if self.size == 2 else [vocab - vocab // 2 - 1, 1, vocab // 2]

    def run(self, x, weight, target, bias=None, sizes=None, **options):
        """The op, of its full arguments, with their full gradients."""
        sizes = self.sizes(weight.shape[0]) if sizes is None else sizes
        bias = None if bias is None else Part.apply(bias, self, sizes)
        weight = Part.apply(weight, self, sizes)
        made = F.fused_linear_cross_entropy(
            Same.apply(x, self), weight, target, bias, process_group=self.group, **options
        )
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


def main(rank, processes, folder):
    torch.set_num_threads(1)
    file = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=file, rank=rank, world_size=processes, timeout=TIMEOUT)
    results = {}
    for name, run in CASES.items():
        for size in range(2, processes + 1):
            world = World(list(range(size)))
            if rank >= size:
                continue
            try:
                run(world)
                results[f"{name} {size}"] = None
            except Exception:
                results[f"{name} {size}"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
