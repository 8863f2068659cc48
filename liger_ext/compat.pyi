# Made by `make stubs`: see tests/stubs.py.
# fmt: off
# ruff: noqa

from typing import Generic, Literal, overload

import torch
from torch import Tensor

from liger_ext.functional import CountedRows, CrossEntropyOutput
from liger_ext.models.patching.handle import PatchHandle as _PatchHandle
from liger_ext.ops.glu import liger_geglu as liger_geglu
from liger_ext.ops.glu import liger_swiglu as liger_swiglu
from liger_ext.ops.group_norm import liger_group_norm as liger_group_norm
from liger_ext.ops.jsd import liger_jsd as liger_jsd
from liger_ext.ops.layer_norm import liger_layer_norm as liger_layer_norm
from liger_ext.ops.relu_squared import liger_relu_squared as liger_relu_squared
from liger_ext.ops.rms_norm import liger_fused_add_rms_norm as liger_fused_add_rms_norm
from liger_ext.ops.rms_norm import liger_rms_norm as liger_rms_norm
from liger_ext.ops.rope import liger_rope as liger_rope
from liger_ext.ops.rope import liger_rotary_pos_emb as liger_rotary_pos_emb
from liger_ext.ops.rope import liger_rotary_pos_emb_gpt_oss as liger_rotary_pos_emb_gpt_oss
from liger_ext.ops.rope import liger_rotary_pos_emb_vision as liger_rotary_pos_emb_vision
from liger_ext.ops.softmax import liger_softmax as liger_softmax

__all__ = [
    "liger_cross_entropy", "liger_fused_add_rms_norm", "liger_fused_linear_cross_entropy", "liger_geglu",
    "liger_group_norm", "liger_jsd", "liger_layer_norm", "liger_relu_squared", "liger_rms_norm", "liger_rope",
    "liger_rotary_pos_emb", "liger_rotary_pos_emb_gpt_oss", "liger_rotary_pos_emb_vision", "liger_softmax",
    "liger_swiglu",
]

@overload
def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = 'mean', label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: Literal[False] = ...,
    return_token_accuracy: Literal[False] = ..., return_predicted_tokens: Literal[False] = ...,
) -> Tensor: ...
@overload
def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = 'mean', label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: Literal[True] = ...,
    return_token_accuracy: Literal[True] = ..., return_predicted_tokens: Literal[True] = ...,
) -> CrossEntropyOutput: ...
@overload
def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = 'mean', label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput: ...

@overload
def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: Literal[False] = ..., accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: Literal[False] = ...,
    return_predicted_tokens: Literal[False] = ..., chunk_mem_const: int = 1, *, memory: str | int = 'auto',
    normalizer: Tensor | float | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: Literal[True] = ..., accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: Literal[True] = ...,
    return_predicted_tokens: Literal[True] = ..., chunk_mem_const: int = 1, *, memory: str | int = 'auto',
    normalizer: Tensor | float | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> CrossEntropyOutput: ...
@overload
def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1, *, memory: str | int = 'auto', normalizer: Tensor | float | None = None,
    rows: CountedRows | Tensor | None = None, process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | CrossEntropyOutput: ...

def install() -> _PatchHandle: ...
