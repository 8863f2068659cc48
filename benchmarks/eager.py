"""The PyTorch compositions that the row ops replace, as transformers writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x, w):
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope(q, k, cos, sin):
    rotary, cos, sin = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1)

    def embed(x):
        turned, passed = x[..., :rotary], x[..., rotary:]
        half = torch.cat((-turned[..., rotary // 2 :], turned[..., : rotary // 2]), dim=-1)
        turned = turned * cos + half * sin
        return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned

    return embed(q), embed(k)


def add_rms_norm(x, r, w):
    return rms_norm(x + r, w), x + r


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-6)


def swiglu(g, u):
    return F.silu(g) * u


def geglu(g, u, approximate="tanh"):
    return F.gelu(g, approximate=approximate) * u


def swiglu_packed(gate_up):
    return swiglu(*gate_up.chunk(2, -1))


def softmax(x):
    return x.softmax(-1)


def cross_entropy(x, t):
    return F.cross_entropy(x.float(), t)
