"""liger_ext: Liger-Kernel's training kernels as native PyTorch ops for NVIDIA and AMD GPUs and the CPU."""

import importlib

from liger_ext import _load, _tuned  # noqa: F401  (_load loads the libraries: first)
from liger_ext._C import version as __version__  # noqa: F401
from liger_ext.compat import (
    liger_cross_entropy,
    liger_fused_add_rms_norm,
    liger_fused_linear_cross_entropy,
    liger_geglu,
    liger_group_norm,
    liger_jsd,
    liger_layer_norm,
    liger_relu_squared,
    liger_rms_norm,
    liger_rope,
    liger_rotary_pos_emb,
    liger_softmax,
    liger_swiglu,
)
from liger_ext.functional import (
    CrossEntropyOutput,
    add_rms_norm,
    check_errors,
    cross_entropy,
    fused_linear_cross_entropy,
    geglu,
    geglu_packed,
    group_norm,
    jsd,
    layer_norm,
    relu_squared,
    rms_norm,
    rope,
    softmax,
    swiglu,
    swiglu_packed,
)
from liger_ext.modules import (
    LigerCrossEntropyLoss,
    LigerFusedAddRMSNorm,
    LigerFusedLinearCrossEntropyLoss,
    LigerGEGLUMLP,
    LigerGroupNorm,
    LigerJSD,
    LigerLayerNorm,
    LigerReLUSquared,
    LigerRMSNorm,
    LigerSoftmax,
    LigerSwiGLUMLP,
)

_tuned.load()

# Patching needs transformers, which is imported when one of these is first used.
_PATCHING = (
    "AutoLigerKernelForCausalLM",
    "apply_liger_kernel",
    "apply_liger_kernel_to_instance",
    "apply_liger_kernel_to_llama",
)

__all__ = [
    *_PATCHING,
    "CrossEntropyOutput",
    "LigerCrossEntropyLoss",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerJSD",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSwiGLUMLP",
    "add_rms_norm",
    "check_errors",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "geglu",
    "geglu_packed",
    "group_norm",
    "jsd",
    "layer_norm",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_rotary_pos_emb",
    "liger_relu_squared",
    "liger_softmax",
    "liger_swiglu",
    "rms_norm",
    "rope",
    "relu_squared",
    "softmax",
    "swiglu",
    "swiglu_packed",
]


def __getattr__(name: str):
    if name in _PATCHING:
        return getattr(importlib.import_module("liger_ext.models"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PATCHING})
