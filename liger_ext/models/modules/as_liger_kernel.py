"""Liger-Kernel's behaviour for models that were patched under the name liger_kernel (`liger_ext.compat.install`). Code
that was written for Liger-Kernel depends on it:

- `output.logits` of a training step without logits is None. (Under our own names reading it raises an error.)
- The loss is the function in `liger_kernel.transformers.functional`, which other code may replace: axolotl replaces it
  to set `use_token_scaling`.
"""

import sys
from collections.abc import Callable, Iterable

from torch import nn
from transformers.modeling_outputs import ModelOutput

from liger_ext import functional
from liger_ext.models.patching.handle import PatchHandle

_FUNCTIONAL = "liger_kernel.transformers.functional"
_MARK = "_as_liger_kernel"


def mark(modules: Iterable[nn.Module], handle: PatchHandle) -> None:
    """Marks the patched heads among `modules` for this behaviour, until `handle` is reverted."""
    for module in modules:
        if hasattr(module, "OUTPUT_WITHOUT"):
            handle.replace(module, _MARK, True)


def output_class(head: nn.Module, without_cache: bool) -> type[ModelOutput]:
    """Returns the class of `head`'s output for a step that computes no logits and, with `without_cache`, no cache."""
    return head.OUTPUT if hasattr(head, _MARK) else head.OUTPUT_WITHOUT[without_cache]


def head_loss_function(head: nn.Module) -> Callable:
    """Returns the function that computes the loss of `head`: our own, or for a marked head `current_fused_loss()`."""
    return current_fused_loss() if hasattr(head, _MARK) else functional.fused_linear_cross_entropy


def current_fused_loss() -> Callable:
    """Returns the function that `liger_kernel.transformers.functional` has now. It takes the arguments of
    `functional.fused_linear_cross_entropy`, which is returned if nobody has imported that module."""
    module = sys.modules.get(_FUNCTIONAL)
    return functional.fused_linear_cross_entropy if module is None else module.liger_fused_linear_cross_entropy
