"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.installed import has


def rope(q, k, cos, sin):
    rotary, cos, sin = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1)

    def embed(x):
        turned, passed = x[..., :rotary], x[..., rotary:]
        half = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), dim=-1)
        turned = turned * cos + half * sin
        return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned

    return embed(q), embed(k)


def rope_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.ops.rope import LigerRopeFunction

    # Its kernel writes over q and k: clones keep the comparison's inputs what they are, as a user of it must.
    return {"liger": lambda q, k, cos, sin: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)}


EAGER = {"rope": rope}
PEERS = {"rope": rope_peers}
