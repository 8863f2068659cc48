"""The names of ``liger_kernel.transformers`` that liger_ext lacks or defines differently: patch functions with
Liger-Kernel's behaviour, the functions and tables that find one by model type, the auto class, and the loss
(``LigerForCausalLMLoss``) for users who write a model's forward.

A patch function of this file differs from liger_ext's function of the same name in its interface. A switch that is None
is off. The signature is Liger-Kernel's, since callers inspect it. A model that it has patched returns None as
``output.logits`` if no logits were computed (``models.modules.as_liger_kernel``). A second call for a model keeps the
first call's options and logs a message (``logging.getLogger("liger_ext")``).
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_ext.functional import CrossEntropyOutput
from liger_ext.models import auto, families
from liger_ext.models.model_types import FUNCTION_TYPES
from liger_ext.models.modules.as_liger_kernel import current_fused_loss
from liger_ext.models.modules.loss import VALUE_OPTIONS, LigerCausalLMOutputWithPast, shift
from liger_ext.models.patching.handle import PatchHandle
from liger_ext.models.patching.swap import is_fsdp1

__all__ = [
    "MODEL_TYPE_TO_APPLY_LIGER_FN",
    "AutoLigerKernelForCausalLM",
    "LigerCausalLMOutputWithPast",
    "LigerForCausalLMLoss",
    "patch_function",
]


@functools.cache
def _family_patch(family: str) -> Callable[..., PatchHandle]:
    return families.patch_function(family, as_liger_kernel=True)


def patch_function(name: str) -> Callable[..., PatchHandle]:
    """Returns the function ``apply_liger_kernel_to_<model type>``. For the type of a part of a model, it returns the
    function of the whole model."""
    return _family_patch(FUNCTION_TYPES[name.removeprefix("apply_liger_kernel_to_")])


# Callers look up model types in this table, and may add functions.
MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _family_patch(family) for model_type, family in FUNCTION_TYPES.items()}


def _patch_function(model_type: str) -> Callable[..., PatchHandle]:
    return MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type) or _family_patch(model_type)


def _apply_liger_kernel(model_type: str, **options) -> PatchHandle:
    """Calls the patch function of a model type, as :func:`liger_ext.apply_liger_kernel`."""
    return auto.patch_type(model_type, options, MODEL_TYPE_TO_APPLY_LIGER_FN, _patch_function)


def _apply_liger_kernel_to_instance(model: nn.Module, **options) -> PatchHandle:
    """Patches a model, as :func:`liger_ext.apply_liger_kernel_to_instance`."""
    return auto.patch_instance(model, options, MODEL_TYPE_TO_APPLY_LIGER_FN, _patch_function)


class AutoLigerKernelForCausalLM(auto.AutoLigerKernelForCausalLM):
    _patch_function = staticmethod(_patch_function)


def LigerForCausalLMLoss(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs,
) -> Tensor | CrossEntropyOutput:
    """Computes the loss of the logits ``hidden_states @ lm_head_weight.T`` by the fused loss.

    Args:
        hidden_states: ``[..., hidden_size]``.
        lm_head_weight: ``[vocab_size, hidden_size]``.
        labels: ``[...]`` int64; the target of a position is the label of the next position.
        shift_labels: ``[...]`` int64, labels that are already shifted; then ``labels`` is not read.
        num_items_in_batch: the divisor of the summed loss. None: the number of targets that are not ignored.
        final_logit_softcapping: ``softcap`` of :func:`liger_ext.functional.fused_linear_cross_entropy`.
        kwargs: more options of fused_linear_cross_entropy, by name. Other arguments, which callers pass on from a
            model's forward, have no effect.

    Returns:
        The loss; with one of the two ``return_*`` options a :class:`CrossEntropyOutput`.
    """
    options = {name: value for name, value in kwargs.items() if name in _LOSS_OPTIONS}
    targets = shift(labels, ignore_index) if shift_labels is None else shift_labels
    result = current_fused_loss()(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        targets.reshape(-1).to(hidden_states.device),
        normalizer=num_items_in_batch,
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **options,
    )
    wants_more = return_token_accuracy or return_predicted_tokens
    return result if isinstance(result, Tensor) or wants_more else result.loss


_LOSS_OPTIONS = (*VALUE_OPTIONS, "accum_dtype", "bias", "memory")


class _FSDPForwardRedirection:
    """Calls ``method(*args, **kwargs)`` in place of the wrapped module's forward. FullyShardedDataParallel (FSDP1) then
    gathers that module's weights for the call."""

    def __call__(self, wrapper_module: nn.Module, method: Callable, *args: Any, **kwargs: Any) -> Any:
        if not is_fsdp1(wrapper_module):
            raise TypeError(
                f"wrapper_module is of {type(wrapper_module)}, expected torch's FullyShardedDataParallel (FSDP1)"
            )
        inner = wrapper_module.module
        previous = vars(inner).get("forward")

        def restore() -> None:
            vars(inner).pop("forward", None)
            if previous is not None:
                inner.forward = previous

        def forward(*args: Any, **kwargs: Any) -> Any:
            restore()  # `method` may call it
            return method(*args, **kwargs)

        inner.forward = forward
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
