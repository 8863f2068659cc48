"""GroupNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F

from benchmarks.installed import has


def group_norm(x, num_groups, w, b):
    return F.group_norm(x, num_groups, w, b, 1e-6)


def group_norm_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    return {"liger": lambda x, g, w, b: LigerGroupNormFunction.apply(x, w, b, x.shape[1], g, 1e-6)}


EAGER = {"group_norm": group_norm}
PEERS = {"group_norm": group_norm_peers}
