"""Gated linear units."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F

from benchmarks.installed import has


def swiglu(g, u):
    return F.silu(g) * u


def swiglu_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return {"liger": lambda g, u: LigerSiLUMulFunction.apply(g, u)}


def geglu(g, u, approximate="tanh"):
    return F.gelu(g, approximate=approximate) * u


def geglu_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return {"liger": lambda g, u: LigerGELUMulFunction.apply(g, u)}


def swiglu_packed(gate_up):
    return swiglu(*gate_up.chunk(2, -1))


EAGER = {"swiglu": swiglu, "geglu": geglu, "swiglu_packed": swiglu_packed}
PEERS = {"swiglu": swiglu_peers, "geglu": geglu_peers}
