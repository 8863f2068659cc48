"""The implementations with which our squared ReLU is compared: a composition of PyTorch's functions, and peers."""

from __future__ import annotations

import torch.nn.functional as F

from benchmarks.installed import Peer


def relu_squared(x):
    return F.relu(x).square()


EAGER = {"relu_squared": relu_squared}
PEERS = {"relu_squared": {"liger": Peer("liger_kernel.transformers.functional:liger_relu_squared")}}
