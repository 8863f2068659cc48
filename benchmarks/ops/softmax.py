"""Softmax."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.installed import has


def softmax(x):
    return x.softmax(-1)


def softmax_peers() -> dict[str, Callable]:
    out: dict[str, Callable] = {}
    if has("quack"):
        from quack.softmax import softmax as quack_softmax

        out["quack"] = quack_softmax
    return out


EAGER = {"softmax": softmax}
PEERS = {"softmax": softmax_peers}
