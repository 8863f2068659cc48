"""Peers: functions of other libraries that an op is timed beside, where they can be imported and run."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


def has(module: str) -> bool:
    """Is it here, and is a GPU, which other libraries' kernels need?"""
    return module == "torch" or (torch.cuda.is_available() and importlib.util.find_spec(module) is not None)


@dataclass(frozen=True)
class Peer:
    """``name``: "module:function". ``call(function, *inputs)``, where it does not take an op's inputs as they are.
    ``cpu``: does it run without a GPU, too?"""

    name: str
    call: Callable | None = None
    cpu: bool = False

    def function(self) -> Callable:
        found = pkgutil.resolve_name(self.name)
        return partial(self.call, found) if self.call else found


def is_here(peer: Peer) -> bool:
    package = peer.name.partition(":")[0].split(".")[0]
    return has(package) or (peer.cpu and importlib.util.find_spec(package) is not None)


def functions_of(peers: dict[str, Peer]) -> dict[str, Callable]:
    """Of those that are here, functions of an op's inputs."""
    return {name: peer.function() for name, peer in peers.items() if is_here(peer)}
