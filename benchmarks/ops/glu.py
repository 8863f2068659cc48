"""The implementations with which our gated activations are compared: compositions of PyTorch's functions, and peers."""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.installed import Peer


def swiglu(g, u):
    return F.silu(g) * u


def geglu(g, u, approximate="tanh"):
    return F.gelu(g, approximate=approximate) * u


def swiglu_packed(gate_up):
    return swiglu(*gate_up.chunk(2, -1))


EAGER = {"swiglu": swiglu, "geglu": geglu, "swiglu_packed": swiglu_packed}
PEERS = {
    "swiglu": {"liger": Peer("liger_kernel.ops.swiglu:LigerSiLUMulFunction.apply")},
    "geglu": {"liger": Peer("liger_kernel.ops.geglu:LigerGELUMulFunction.apply")},
}
