"""Other implementations, used where they can be imported: Liger-Kernel's Triton kernels and QuACK."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch


def _has(module: str) -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec(module) is not None


def rms_norm() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if torch.__version__ >= "2.4":
        out["F.rms_norm"] = lambda x, w: torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-6)
    if _has("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        out["liger"] = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    if _has("quack"):
        from quack.rmsnorm import rmsnorm

        out["quack"] = lambda x, w: rmsnorm(x, w, eps=1e-6)
    return out


def add_rms_norm() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if _has("liger_kernel"):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        out["liger"] = lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, "llama", False)
    if _has("quack"):
        from quack.rmsnorm import rmsnorm

        out["quack"] = lambda x, r, w: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)
    return out


def layer_norm() -> dict[str, Callable]:
    if not _has("liger_kernel"):
        return {}
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return {"liger": lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)}


def swiglu() -> dict[str, Callable]:
    if not _has("liger_kernel"):
        return {}
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {"liger": lambda g, u: LigerSiLUMulFunction.apply(g, u)}


def geglu() -> dict[str, Callable]:
    if not _has("liger_kernel"):
        return {}
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return {"liger": lambda g, u: LigerGELUMulFunction.apply(g, u)}


def rope() -> dict[str, Callable]:
    if not _has("liger_kernel"):
        return {}
    from liger_kernel.ops.rope import LigerRopeFunction

    # Its kernel writes over q and k: clones keep the comparison's inputs what they are, as a user of it must.
    return {"liger": lambda q, k, cos, sin: LigerRopeFunction.apply(q.clone(), k.clone(), cos, sin)}


def softmax() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if _has("quack"):
        from quack.softmax import softmax as quack_softmax

        out["quack"] = quack_softmax
    return out


def cross_entropy() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if _has("quack"):
        from quack.cross_entropy import cross_entropy as quack_cross_entropy

        out["quack"] = lambda x, t: quack_cross_entropy(x, t, reduction="mean")
    return out
