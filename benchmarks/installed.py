"""Peers: functions of other libraries that are timed next to our ops, if they can be imported and run."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


def has(module: str) -> bool:
    """Returns whether the module is installed, and a GPU available, which other libraries' kernels need."""
    return module == "torch" or (torch.cuda.is_available() and importlib.util.find_spec(module) is not None)


@dataclass(frozen=True)
class Peer:
    """A function of another library. ``name``: "module:function". ``call(function, *inputs)``: calls it with the op's
    inputs, if its arguments differ. ``cpu``: whether the function also runs without a GPU."""

    name: str
    call: Callable | None = None
    cpu: bool = False

    def function(self) -> Callable:
        found = pkgutil.resolve_name(self.name)
        return partial(self.call, found) if self.call else found


def is_here(peer: Peer) -> bool:
    package = peer.name.partition(":")[0].split(".")[0]
    return has(package) or (peer.cpu and importlib.util.find_spec(package) is not None)


def installed_functions(peers: dict[str, Peer]) -> dict[str, Callable]:
    """The installed peers, as functions of an op's inputs."""
    return {name: peer.function() for name, peer in peers.items() if is_here(peer)}
