"""The composition of PyTorch's functions and the peers with which softmax is compared."""

from __future__ import annotations

from benchmarks.installed import Peer


def softmax(x):
    return x.softmax(-1)


EAGER = {"softmax": softmax}
PEERS = {"softmax": {"quack": Peer("quack.softmax:softmax")}}
