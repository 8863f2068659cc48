# Made by `make stubs`: see tests/stubs.py.
# fmt: off
# ruff: noqa

from typing import Generic, Literal, overload

import torch
from torch import Tensor

from liger_ext.ops.check_errors import check_errors as check_errors
from liger_ext.ops.count_rows import CountedRows as CountedRows
from liger_ext.ops.count_rows import count_rows as count_rows
from liger_ext.ops.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_ext.ops.dequantize_4bit import dequantize_4bit as dequantize_4bit
from liger_ext.ops.glu import geglu as geglu
from liger_ext.ops.glu import geglu_packed as geglu_packed
from liger_ext.ops.glu import swiglu as swiglu
from liger_ext.ops.glu import swiglu_packed as swiglu_packed
from liger_ext.ops.group_norm import group_norm as group_norm
from liger_ext.ops.jsd import jsd as jsd
from liger_ext.ops.layer_norm import layer_norm as layer_norm
from liger_ext.ops.linear_log_probs import LogProbsOutput as LogProbsOutput
from liger_ext.ops.relu_squared import relu_squared as relu_squared
from liger_ext.ops.rms_norm import add_rms_norm as add_rms_norm
from liger_ext.ops.rms_norm import rms_norm as rms_norm
from liger_ext.ops.softmax import softmax as softmax

__all__ = [
    "CountedRows", "CrossEntropyOutput", "LogProbsOutput", "add_rms_norm", "check_errors", "count_rows",
    "cross_entropy", "dequantize_4bit", "fused_linear_cross_entropy", "geglu", "geglu_packed", "group_norm", "jsd",
    "layer_norm", "linear_log_probs", "relu_squared", "rms_norm", "rope", "softmax", "swiglu", "swiglu_packed",
]

@overload
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = 'mean', label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: Literal[False] = ..., return_token_accuracy: Literal[False] = ...,
    return_predicted_tokens: Literal[False] = ...,
) -> Tensor: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = 'mean', label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: Literal[True] = ..., return_token_accuracy: Literal[True] = ...,
    return_predicted_tokens: Literal[True] = ...,
) -> CrossEntropyOutput: ...
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    reduction: str = 'mean', label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Tensor | CrossEntropyOutput: ...

@overload
def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: Literal[False] = ..., accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: Literal[False] = ...,
    return_predicted_tokens: Literal[False] = ..., *, memory: str | int = 'auto',
    normalizer: Tensor | float | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor: ...
@overload
def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: Literal[True] = ..., accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: Literal[True] = ...,
    return_predicted_tokens: Literal[True] = ..., *, memory: str | int = 'auto',
    normalizer: Tensor | float | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> CrossEntropyOutput: ...
@overload
def fused_linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False, *,
    memory: str | int = 'auto', normalizer: Tensor | float | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | CrossEntropyOutput: ...

@overload
def linear_log_probs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float | Tensor = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100,
    entropy: Literal[False] = ..., mean_logits: Literal[False] = ..., is_top1: Literal[False] = ...,
    log_sum_sq_probs: Literal[False] = ..., memory: str | int = 'auto', logits_dtype: torch.dtype | None = None,
    rows: CountedRows | Tensor | None = None, process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor: ...
@overload
def linear_log_probs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float | Tensor = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, entropy: Literal[True] = ...,
    mean_logits: Literal[True] = ..., is_top1: Literal[True] = ..., log_sum_sq_probs: Literal[True] = ...,
    memory: str | int = 'auto', logits_dtype: torch.dtype | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> LogProbsOutput: ...
@overload
def linear_log_probs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float | Tensor = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100, entropy: bool = False,
    mean_logits: bool = False, is_top1: bool = False, log_sum_sq_probs: bool = False, memory: str | int = 'auto',
    logits_dtype: torch.dtype | None = None, rows: CountedRows | Tensor | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Tensor | LogProbsOutput: ...

@overload
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, layout: str = 'halves',
    half_tables: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def rope(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, layout: str = 'halves',
    half_tables: bool = False,
) -> tuple[Tensor, None]: ...
