"""RMSNorm, add + RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.installed import has


def rms_norm(x, w):
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm_peers() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if torch.__version__ >= "2.4":
        out["F.rms_norm"] = lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6)
    if has("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        out["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    if has("quack"):
        from quack.rmsnorm import rmsnorm

        out["quack"] = lambda x, w: rmsnorm(x, w, eps=1e-6)
    return out


def add_rms_norm(x, r, w):
    return rms_norm(x + r, w), x + r


def add_rms_norm_peers() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if has("liger_kernel"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        out["liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
    if has("quack"):
        from quack.rmsnorm import rmsnorm

        out["quack"] = lambda x, r, w: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)
    return out


def layer_norm(x, w, b):
    return F.layer_norm(x, x.shape[-1:], w, b, 1e-6)


def layer_norm_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return {"liger": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)}


EAGER = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm}
PEERS = {"rms_norm": rms_norm_peers, "add_rms_norm": add_rms_norm_peers, "layer_norm": layer_norm_peers}
