"""Counts the bytes of the tensors that a Llama's forward saves for its backward, by kind of tensor ("norm outputs",
"gate and up", ...).

Saved-tensor hooks record what autograd saves; a storage that several operations save counts once, and parameters do not
count. A tensor's kind follows from the operations that compute and read it: an operation that reads the weight of
`gate_proj` computes "gate and up" from "norm outputs". A dispatch mode also records operations where modules are not
called (inside a fused one); hooks on modules would switch the patched model to its code path for modules with hooks.

Some providers save other tensors while hooks of other code are active, and are recorded in that state: so on a GPU the
total of the allocator is measured as well, without hooks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NORM_INPUT, _NORM_OUTPUT, _MLP, _QKV = "norm inputs", "norm outputs", "gate and up", "q, k, v"
_ACTIVATION, _PRODUCT, _ATTENTION, _LOGITS, _OTHER = "act(gate)", "h", "attention output", "logits", "other"
KINDS = (_MLP, _ACTIVATION, _PRODUCT, _NORM_INPUT, _NORM_OUTPUT, _QKV, _ATTENTION, _LOGITS, _OTHER)
"""Bottom to top in a picture. "norm inputs" are the residual stream and the intermediate tensors of stock's norm; "h"
is act(gate) * up, the input of down_proj; "logits" includes their fp32 copy and their gradient."""

# For each parameter: the kind of the result of an operation with it, and the kind of its input.
_ROLES = {
    **dict.fromkeys(("gate_proj", "up_proj"), (_MLP, _NORM_OUTPUT)),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (_QKV, _NORM_OUTPUT)),
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), (_NORM_INPUT, _NORM_INPUT)),
    "o_proj": (_NORM_INPUT, _ATTENTION),
    "down_proj": (_NORM_INPUT, _PRODUCT),
    "lm_head": (_LOGITS, _NORM_OUTPUT),
}
_INHERITED, _COMPUTED, _READ = range(3)  # a stronger reason for a kind overrides a weaker one


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Equal for tensors of one storage; while the reference exists, no other storage at the same address equals it."""
    return StorageWeakRef(tensor.untyped_storage())


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of each storage that is saved for a backward, without the model's parameters and buffers."""

    def __init__(self, model: torch.nn.Module):
        excluded = {_storage(t) for t in (*model.parameters(), *model.buffers())}
        self.bytes: dict[StorageWeakRef, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = _storage(tensor)
            if storage not in excluded:
                self.bytes[storage] = tensor.untyped_storage().nbytes()
            return tensor.detach()  # a saved output with its own node would never be freed

        super().__init__(pack, lambda tensor: tensor)


class _Kinds(TorchDispatchMode):
    """The kind of each storage that operations compute or read while the mode is active."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        names = model.named_parameters(remove_duplicate=False)  # a tied weight counts by its last name, the head's
        self.roles = {_storage(p): _ROLES.get(name.split(".")[-2]) for name, p in names}
        self.found: dict[StorageWeakRef, tuple[int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        # Indices, targets and masks have no kind.
        inputs, outputs = (
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]
            for tree in ((args, kwargs), results)
        )
        role = next(filter(None, (self.roles.get(_storage(t)) for t in inputs)), None)
        if "embedding" in func.name():
            self._name(outputs, _COMPUTED, _NORM_INPUT)
        elif "attention" in func.name():
            self._name(inputs[:3], _READ, _QKV)
            self._name(outputs, _COMPUTED, _ATTENTION)
        elif role is not None:
            computed, read = role
            self._name([t for t in inputs if _storage(t) not in self.roles], _READ, read)
            self._name(outputs, _COMPUTED, computed)
        elif not func.name().endswith("_like"):  # results of `_like` ops are empty, and unseen kernels fill them
            known = [self.found[_storage(t)][1] for t in inputs if _storage(t) in self.found]
            if known:
                self._name(outputs, _INHERITED, _ACTIVATION if known[0] == _MLP else known[0])
        return results

    def _name(self, tensors: list[torch.Tensor], reason: int, kind: str) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            if self.found.get(storage, (-1, ""))[0] < reason:
                self.found[storage] = reason, kind


def saved_bytes(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Bytes that ``forward``, which returns the loss, saves for the backward; ``model`` may be compiled."""
    saved = _SavedBytes(model)
    with saved:
        loss = forward()
    del loss
    return sum(saved.bytes.values())


def saved_by_kind(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    """``saved_bytes`` by kind, for a model that is not compiled: {kind: bytes}, all of ``KINDS`` in their order."""
    saved, kinds = _SavedBytes(model), _Kinds(model)
    with saved, kinds:
        loss = forward()
    del loss
    counted = Counter(dict.fromkeys(KINDS, 0))
    for storage, size in saved.bytes.items():
        counted[kinds.found.get(storage, (0, _OTHER))[1]] += size
    return dict(counted)
