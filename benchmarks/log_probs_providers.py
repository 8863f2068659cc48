"""Functions that compute log-probabilities of a head, for the suite `log_probs`: our op at each level of memory and
with limits in bytes, other libraries' functions, and full logits under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import liger_ext.functional as LF

from .installed import Peer, is_here

OURS, COMPILED = "liger_ext", "full logits, torch.compile"


@dataclass(frozen=True)
class Case:
    """A computation to time. ``entropy``: returned; ``entropy_gradient``: part of the loss; ``sizes``: also time
    numbers of bytes; ``compiled``: also time full logits under torch.compile."""

    name: str
    trained: bool = True
    gradients: bool = True
    entropy: bool = True
    entropy_gradient: bool = False
    autocast: bool = False
    sizes: bool = False
    compiled: bool = False

    @property
    def matmuls(self) -> int:
        """The number of matmuls that the case needs."""
        return (3 if self.trained else 2) if self.gradients else 1


Result = tuple[Tensor, "Tensor | None"]
Function = Callable[[Tensor, Tensor, Tensor, Case], Result]  # of hidden states, weight and targets


def _ours(x: Tensor, w: Tensor, t: Tensor, case: Case, memory: str | int = "auto") -> Result:
    found = LF.linear_log_probs(x, w, t, entropy=case.entropy, memory=memory)
    return (found.log_probs, found.entropy) if case.entropy else (found, None)


def full_logits(x: Tensor, w: Tensor, t: Tensor, case: Case) -> Result:
    return _full(x, w, t, case.entropy)


def _full(x: Tensor, w: Tensor, t: Tensor, entropy: bool) -> Result:
    log_p = (x @ w.T).float().log_softmax(-1)
    at_target = log_p.gather(1, t[:, None])[:, 0]
    return at_target, -(log_p.exp() * log_p).sum(-1) if entropy else None


def _trl(function, x: Tensor, w: Tensor, t: Tensor, case: Case) -> Result:
    """Runs TRL's function with TRL's chunk size."""
    return function(x, w, None, t, 1.0, 32768, None, 1.0, ("log_probs", *["entropy"] * case.entropy))[:2]


def _liger(function, x: Tensor, w: Tensor, t: Tensor, case: Case) -> Result:
    found = function(x, w, t, 1.0, -100, 1, case.entropy)
    return (-found[0], found[1]) if case.entropy else (-found, None)


def _liger_fallback(function, x: Tensor, w: Tensor, t: Tensor, case: Case) -> Result:
    found = function(x, w, t, 1.0, -100, case.entropy)
    return (-found[0], found[1]) if case.entropy else (-found, None)


_LIGER = "liger_kernel.ops.fused_linear_scaled_cross_entropy:"
PEERS = {
    "TRL": Peer("trl.kernels:ChunkedLogProbFunction.apply", _trl, cpu=True),
    "liger": Peer(f"{_LIGER}LigerFusedLinearScaledCrossEntropyFunction.apply", _liger, cpu=True),
    "liger, without CuTe": Peer(f"{_LIGER}_FusedLinearPPOFallbackFunction.apply", _liger_fallback, cpu=True),
    "liger, GRPO": Peer(
        "liger_kernel.chunked_loss.fused_linear_ppo:_ChunkedSelectiveLogProbFunction.apply",
        lambda f, x, w, t, case: (f(x, w, t, None, 1.0, 4096), None),
        cpu=True,
    ),
    "verl": Peer(
        "verl.utils.experimental.torch_functional:FusedLinearForPPOFunction.apply",
        lambda f, x, w, t, case: f(x, w, t, 1.0, 512),
        cpu=True,
    ),
    "verl, Triton": Peer(
        "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy",
        lambda f, x, w, t, case: f(x, w, t, 1.0, "none"),
    ),
}
# Run after all others: a kernel that fails may make the GPU unusable for this process, and compilation takes seconds.
LAST = {"verl, Triton", COMPILED}
_NEVER, _ALWAYS = {"liger, GRPO"}, {"verl", "verl, Triton"}  # return the entropy


def makers(case: Case, sizes: tuple[int, ...]) -> dict[str, Callable[[], Function]]:
    """For each provider a function that returns the one to measure, or raises its library's error. ``sizes``: MiB."""
    found: dict[str, Callable[[], Function]] = {OURS: lambda: _ours}
    memories = {"fast": "fast", "low": "low"} | {f"{mib:,} MiB": mib << 20 for mib in sizes if case.sizes}
    for name, memory in memories.items():
        found[f"{OURS}, {name}"] = partial(partial, _ours, memory=memory)
    for name, peer in PEERS.items():
        if is_here(peer) and name not in (_NEVER if case.entropy else _ALWAYS):
            found[name] = peer.function
    if case.compiled:
        found[COMPILED] = _compiled
    return found


def _compiled() -> Function:
    function = torch.compile(_full, dynamic=False, fullgraph=True)
    return lambda x, w, t, case: function(x, w, t, case.entropy)
