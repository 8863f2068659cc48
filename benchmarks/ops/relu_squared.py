"""Squared ReLU."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F

from benchmarks.installed import has


def relu_squared(x):
    return F.relu(x).square()


def relu_squared_peers() -> dict[str, Callable]:
    if not has("liger_kernel"):
        return {}
    from liger_kernel.transformers.functional import liger_relu_squared

    return {"liger": liger_relu_squared}


EAGER = {"relu_squared": relu_squared}
PEERS = {"relu_squared": relu_squared_peers}
