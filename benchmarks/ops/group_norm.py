"""The implementations with which our GroupNorm is compared: a composition of PyTorch's functions, and peers."""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.installed import Peer


def group_norm(x, num_groups, w, b):
    return F.group_norm(x, num_groups, w, b, 1e-6)


EAGER = {"group_norm": group_norm}
PEERS = {
    "group_norm": {
        "liger": Peer(
            "liger_kernel.ops.group_norm:LigerGroupNormFunction.apply",
            lambda f, x, groups, w, b: f(x, w, b, x.shape[1], groups, 1e-6),
        )
    }
}
