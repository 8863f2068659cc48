"""A language-model head that computes its loss inside its own call.

The fused loss reads the head's weight. Inside the head's call, the hooks of other libraries have prepared the weight:
FSDP and DeepSpeed gather it before the call, accelerate moves it to its device. Only for such a call the head needs a
class of ours. Until the first one its class stays `nn.Linear`: quantisers replace modules of exactly this class.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn.modules import linear

from liger_ext.models.patching.calls import has_global_hook, has_torch_call, module_hooks, only_forward_runs
from liger_ext.models.patching.handle import PatchHandle
from liger_ext.models.patching.swap import (
    derives_from,
    is_fsdp1,
    is_plain_tensor,
    replaces,
    swap_classes,
    torch_linear_is_intact,
)
from liger_ext.ops._compile import disabled_in_graphs

# loss(hidden_states, weight, bias) -> tensors
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple]

# Hooks of these packages prepare a call and clean up after it, whatever it returns; others may read logits.
_KNOWN_HOOKS = ("torch.distributed.fsdp.", "torch.distributed._composable.", "deepspeed.", "accelerate.")


@replaces(linear)
class Linear(nn.Linear):
    def forward(self, input: torch.Tensor, loss: Loss | None = None) -> torch.Tensor | tuple:
        """Returns `loss(input, weight, bias)`, or, without `loss`, the logits."""
        if loss is None:
            return nn.Linear.forward(self, input)
        return loss(input, self.weight, self.bias)


def called_reason(head: nn.Module) -> str | None:
    """Returns why `head` must be called for its logits: it is more than a linear layer (LoRA, quantised weights), or a
    user's hook on its call expects logits. None: its call may compute the loss."""
    path = _path(head)
    reason = _linear_reason(path[-1])
    if reason is not None or _runs_bare(path) or all(map(_takes_a_loss, path)):
        return reason
    return "the head has a hook, or a replaced function"


def _linear_reason(inner: nn.Module) -> str | None:
    """Returns why the call of a head without hooks is more than torch's linear layer."""
    if not _is_linear(inner):
        return f"the head is a {type(inner).__module__}.{type(inner).__name__}"
    if not _has_plain_weight(inner):
        return f"the head's weight is of class {type(inner.weight).__name__}"
    return None if torch_linear_is_intact() else "torch's function of linear layers was replaced"


def loss_caller(head: nn.Module) -> Callable[..., tuple] | None:
    """Returns a function that calls `head`, with the arguments `(hidden_states, loss=loss)`. None if `called_reason`
    has one."""
    path = _path(head)
    inner = path[-1]
    if _linear_reason(inner) is not None:
        return None
    if _runs_bare(path):
        return partial(Linear.forward, inner)
    if not all(map(_takes_a_loss, path)):
        return None
    if not isinstance(inner, Linear):
        _swap_head(inner)
    return head  # wrappers pass on their arguments


def _runs_bare(path: list[nn.Module]) -> bool:
    return all(map(only_forward_runs, path)) and not any(map(is_fsdp1, path))


_handles: weakref.WeakKeyDictionary[nn.Module, PatchHandle] = weakref.WeakKeyDictionary()  # of swapped heads
_swapping = threading.Lock()  # the first calls of a model may be simultaneous


@disabled_in_graphs
def _swap_head(head: nn.Module) -> None:
    with _swapping:
        swap_classes([head], Linear, _handles.setdefault(head, PatchHandle()))


def restore_heads(models: Iterable[nn.Module]) -> None:
    """Gives the heads of `models` the classes that they had before their first call with a loss."""
    for head in (head for model in models for head in _inside(model.lm_head)):
        _handles.pop(head, PatchHandle()).revert()


def used_linear(head: nn.Module) -> nn.Linear | None:
    """Returns the linear layer that a call of `head` runs: `head`, the module inside FSDP1's wrapper, or the copy that
    the active adapter of PEFT's ModulesToSaveWrapper trains. None if that module is no linear layer."""
    last = _path(head)[-1]
    return last if _is_linear(last) else None


def head_device(head: nn.Module) -> torch.device | None:
    """Returns the device of the weight of `used_linear(head)`, without computing that weight; None if not known."""
    # FSDP1 may leave a module without parameters, and store a view of its own buffer as the attribute `weight`.
    linear = used_linear(head)
    weight = next(linear.parameters(), vars(linear).get("weight"))
    return None if weight is None else weight.device


def _path(head: nn.Module) -> list[nn.Module]:
    """Returns the chain of modules that starts with `head`: a wrapper is followed by the module to which it passes its
    arguments."""
    if is_fsdp1(head):
        return [head, *_path(head.module)]
    if _has_copies(head):
        adapters, trained = head.active_adapters, head.modules_to_save
        use_original = head.disable_adapters or not adapters or any(name not in trained for name in adapters)
        return [head, *_path(head.original_module if use_original else trained[adapters[0]])]
    return [head]


def _inside(head: nn.Module) -> Iterator[nn.Module]:
    """Yields `head`, or, if it is a wrapper, all modules that it may call."""
    if is_fsdp1(head):
        yield from _inside(head.module)
    elif _has_copies(head):
        for module in (head.original_module, *head.modules_to_save.values()):
            yield from _inside(module)
    else:
        yield head


def _has_copies(head: nn.Module) -> bool:
    """Returns whether `head` is PEFT's wrapper that holds a copy of a module for each adapter."""
    return derives_from(head, "ModulesToSaveWrapper")


def _is_linear(module: nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)
    return isinstance(module, nn.Linear) and forward in (nn.Linear.forward, Linear.forward)


def _has_plain_weight(linear: nn.Module) -> bool:
    """Returns whether the weight is a plain tensor, or a DTensor, which FSDP2 gathers to a plain one before the call.
    Also True if the weight is computed (parametrizations, FSDP1)."""
    weight = linear._parameters.get("weight")
    return weight is None or is_plain_tensor(weight) or hasattr(weight, "placements")


def _takes_a_loss(module: nn.Module) -> bool:
    """Returns whether nothing around the call of `module` reads or changes its result."""
    if has_global_hook() or not has_torch_call(module) or not _hands_on(module):
        return False
    if any(not _is_from(hook, _KNOWN_HOOKS) for kind in module_hooks(module) for hook in kind.values()):
        return False
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    return _keeps_dtype(getattr(state, "_mp_policy", None), module)


def _keeps_dtype(policy: object, module: nn.Module) -> bool:
    """Returns whether FSDP2's policy for `module` leaves the dtype of a loss unchanged. Losses are fp32, or float64 of
    float64 weights."""
    output_dtype = getattr(policy, "output_dtype", None)
    if output_dtype is None:
        return True
    weights = (policy.param_dtype,) if policy.param_dtype else (p.dtype for p in module.parameters())
    return output_dtype == torch.float32 and torch.float64 not in weights


def _hands_on(module: nn.Module) -> bool:
    """Returns whether the instance has no `forward`, or accelerate's, which wraps the class's for its own hooks."""
    if "forward" not in module.__dict__:
        return True
    hook, inner = getattr(module, "_hf_hook", None), module.__dict__.get("_old_forward")
    is_classes = getattr(inner, "__func__", None) is type(module).forward
    return is_classes and all(_is_from(type(h), ("accelerate.",)) for h in getattr(hook, "hooks", (hook,)))


def _is_from(function: object, packages: tuple[str, ...]) -> bool:
    return (getattr(function, "__module__", None) or type(function).__module__).startswith(packages)
