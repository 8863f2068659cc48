"""The implementations with which our RMSNorm, add + RMSNorm and LayerNorm are compared: compositions of PyTorch's
functions, and peers."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.installed import Peer


def rms_norm(x, w):
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def add_rms_norm(x, r, w):
    return rms_norm(x + r, w), x + r


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-6)


EAGER = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm}
_LLAMA = (1e-6, 0.0, "llama", False)
PEERS = {
    "rms_norm": {
        "F.rms_norm": Peer("torch.nn.functional:rms_norm", lambda f, x, w: f(x, x.shape[-1:], w, 1e-6)),
        "liger": Peer("liger_kernel.ops.rms_norm:LigerRMSNormFunction.apply", lambda f, x, w: f(x, w, *_LLAMA)),
        "quack": Peer("quack.rmsnorm:rmsnorm", lambda f, x, w: f(x, w, eps=1e-6)),
    },
    "add_rms_norm": {
        "liger": Peer(
            "liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction.apply",
            lambda f, x, r, w: f(x, r, w, *_LLAMA),
        ),
        "quack": Peer("quack.rmsnorm:rmsnorm", lambda f, x, r, w: f(x, w, residual=r, eps=1e-6, prenorm=True)),
    },
    "layer_norm": {
        "liger": Peer("liger_kernel.ops.layer_norm:LigerLayerNormFunction.apply", lambda f, x, w, b: f(x, w, b, 1e-6))
    },
}
