"""The implementations with which our rotary position embedding is compared: a composition of PyTorch's functions, and
peers."""

from __future__ import annotations

import torch

from benchmarks.installed import Peer


def rope(q, k, cos, sin, layout="halves"):
    rotary, cos, sin = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1)

    def embed(x):
        turned, passed = x[..., :rotary], x[..., rotary:]
        if layout == "interleaved":
            half = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
        else:
            half = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), dim=-1)
        turned = turned * cos + half * sin
        return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned

    return embed(q), embed(k)


EAGER = {"rope": rope}
# Its kernel works in place: the clones keep the inputs of the comparison unchanged, as its users must do.
_LIGER = Peer(
    "liger_kernel.ops.rope:LigerRopeFunction.apply", lambda f, q, k, cos, sin: f(q.clone(), k.clone(), cos, sin)
)
PEERS = {"rope": {"liger": _LIGER}}
