"""Cross entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F

from benchmarks.installed import has


def cross_entropy(x, t):
    return F.cross_entropy(x.float(), t)


def cross_entropy_peers() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if has("quack"):
        from quack.cross_entropy import cross_entropy as quack_cross_entropy

        out["quack"] = lambda x, t: quack_cross_entropy(x, t, reduction="mean")
    return out


EAGER = {"cross_entropy": cross_entropy}
PEERS = {"cross_entropy": cross_entropy_peers}
