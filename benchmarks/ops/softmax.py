"""The implementations with which our softmax is compared: PyTorch's, and QuACK's."""

from __future__ import annotations

from benchmarks.installed import Peer


def softmax(x):
    return x.softmax(-1)


EAGER = {"softmax": softmax}
PEERS = {"softmax": {"quack": Peer("quack.softmax:softmax")}}
