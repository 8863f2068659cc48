"""The PyTorch compositions that the row ops replace, as transformers writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x, w):
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope(q, k, cos, sin):
    def rotate(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def add_rms_norm(x, r, w):
    return rms_norm(x + r, w), x + r


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-6)


def swiglu(g, u):
    return F.silu(g) * u


def geglu(g, u):
    return F.gelu(g, approximate="tanh") * u


def softmax(x):
    return x.softmax(-1)


def cross_entropy(x, t):
    return F.cross_entropy(x.float(), t)
