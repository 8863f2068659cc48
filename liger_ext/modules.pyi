# Made by `make stubs`: see tests/stubs.py.
# fmt: off
# ruff: noqa

from typing import Generic, Literal, overload

import torch
from torch import Tensor
from typing_extensions import TypeVar

from liger_ext.functional import CrossEntropyOutput
from liger_ext.ops.glu import LigerBlockSparseTop2MLP as _LigerBlockSparseTop2MLP
from liger_ext.ops.cross_entropy import LigerCrossEntropyLoss as _LigerCrossEntropyLoss
from liger_ext.ops.glu import LigerExperts as _LigerExperts
from liger_ext.ops.glu import LigerFalconH1SwiGLUMLP as _LigerFalconH1SwiGLUMLP
from liger_ext.ops.rms_norm import LigerFusedAddRMSNorm as _LigerFusedAddRMSNorm
from liger_ext.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as _LigerFusedLinearCrossEntropyLoss
from liger_ext.ops.glu import LigerGEGLUMLP as _LigerGEGLUMLP
from liger_ext.ops.glu import LigerGEGLUMLPForGemma4 as _LigerGEGLUMLPForGemma4
from liger_ext.ops.group_norm import LigerGroupNorm as _LigerGroupNorm
from liger_ext.ops.glu import LigerHunyuanV1SwiGLUMLP as _LigerHunyuanV1SwiGLUMLP
from liger_ext.ops.jsd import LigerJSD as _LigerJSD
from liger_ext.ops.layer_norm import LigerLayerNorm as _LigerLayerNorm
from liger_ext.ops.glu import LigerPhi3SwiGLUMLP as _LigerPhi3SwiGLUMLP
from liger_ext.ops.glu import LigerQwen3MoeSwiGLUMLP as _LigerQwen3MoeSwiGLUMLP
from liger_ext.ops.rms_norm import LigerRMSNorm as _LigerRMSNorm
from liger_ext.ops.rms_norm import LigerRMSNormForGemma as _LigerRMSNormForGemma
from liger_ext.ops.rms_norm import LigerRMSNormForGemma2 as _LigerRMSNormForGemma2
from liger_ext.ops.rms_norm import LigerRMSNormForGemma3 as _LigerRMSNormForGemma3
from liger_ext.ops.rms_norm import LigerRMSNormForGemma4 as _LigerRMSNormForGemma4
from liger_ext.ops.rms_norm import LigerRMSNormForGlm4 as _LigerRMSNormForGlm4
from liger_ext.ops.rms_norm import LigerRMSNormForOlmo2 as _LigerRMSNormForOlmo2
from liger_ext.ops.rms_norm import LigerRMSNormForQwen3Next as _LigerRMSNormForQwen3Next
from liger_ext.ops.relu_squared import LigerReLUSquared as _LigerReLUSquared
from liger_ext.ops.softmax import LigerSoftmax as _LigerSoftmax
from liger_ext.ops.glu import LigerSwiGLUMLP as _LigerSwiGLUMLP

__all__ = [
    "LigerBlockSparseTop2MLP", "LigerCrossEntropyLoss", "LigerExperts", "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss", "LigerGEGLUMLP", "LigerGEGLUMLPForGemma4",
    "LigerGroupNorm", "LigerHunyuanV1SwiGLUMLP", "LigerJSD", "LigerLayerNorm", "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP", "LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4", "LigerRMSNormForGlm4", "LigerRMSNormForOlmo2", "LigerRMSNormForQwen3Next",
    "LigerReLUSquared", "LigerSoftmax", "LigerSwiGLUMLP",
]

_Result = TypeVar("_Result", bound=Tensor | CrossEntropyOutput, default=Tensor)

class LigerBlockSparseTop2MLP(_LigerBlockSparseTop2MLP):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerCrossEntropyLoss(_LigerCrossEntropyLoss, Generic[_Result]):
    @overload
    def __init__(
        self: LigerCrossEntropyLoss[Tensor], weight: Tensor | None = None, ignore_index: int = -100,
        lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: Literal[False] = ..., return_token_accuracy: Literal[False] = ...,
        return_predicted_tokens: Literal[False] = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: LigerCrossEntropyLoss[CrossEntropyOutput], weight: Tensor | None = None, ignore_index: int = -100,
        lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: Literal[True] = ..., return_token_accuracy: Literal[True] = ...,
        return_predicted_tokens: Literal[True] = ...,
    ) -> None: ...
    @overload
    def __init__(
        self: LigerCrossEntropyLoss[Tensor | CrossEntropyOutput], weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None: ...
    def __call__(self, _input: Tensor, target: Tensor) -> _Result: ...

class LigerExperts(_LigerExperts):
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor: ...

class LigerFusedLinearCrossEntropyLoss(_LigerFusedLinearCrossEntropyLoss, Generic[_Result]):
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor], ce_weight: Tensor | None = None, ignore_index: int = -100,
        lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: Literal[False] = ..., accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False, return_token_accuracy: Literal[False] = ...,
        return_predicted_tokens: Literal[False] = ..., *, memory: str | int = 'auto',
    ) -> None: ...
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[CrossEntropyOutput], ce_weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: Literal[True] = ..., accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False, return_token_accuracy: Literal[True] = ...,
        return_predicted_tokens: Literal[True] = ..., *, memory: str | int = 'auto',
    ) -> None: ...
    @overload
    def __init__(
        self: LigerFusedLinearCrossEntropyLoss[Tensor | CrossEntropyOutput], ce_weight: Tensor | None = None,
        ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = 'mean',
        softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False, *,
        memory: str | int = 'auto',
    ) -> None: ...
    def __call__(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> _Result: ...

class LigerJSD(_LigerJSD):
    def __call__(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor: ...

class LigerPhi3SwiGLUMLP(_LigerPhi3SwiGLUMLP):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerReLUSquared(_LigerReLUSquared):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerSoftmax(_LigerSoftmax):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerFusedAddRMSNorm(_LigerFusedAddRMSNorm):
    def __call__(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

class LigerGEGLUMLP(_LigerGEGLUMLP):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerGroupNorm(_LigerGroupNorm):
    def __call__(self, hidden_states: Tensor) -> Tensor: ...

class LigerLayerNorm(_LigerLayerNorm):
    def __call__(self, hidden_states: Tensor) -> Tensor: ...

class LigerRMSNorm(_LigerRMSNorm):
    def __call__(self, hidden_states: Tensor) -> Tensor: ...

class LigerSwiGLUMLP(_LigerSwiGLUMLP):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerFalconH1SwiGLUMLP(_LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP):
    def __call__(self, x: Tensor) -> Tensor: ...

class LigerGEGLUMLPForGemma4(_LigerGEGLUMLPForGemma4, LigerGEGLUMLP): ...

class LigerHunyuanV1SwiGLUMLP(_LigerHunyuanV1SwiGLUMLP, LigerSwiGLUMLP): ...

class LigerQwen3MoeSwiGLUMLP(_LigerQwen3MoeSwiGLUMLP, LigerSwiGLUMLP): ...

class LigerRMSNormForGemma(_LigerRMSNormForGemma, LigerRMSNorm): ...

class LigerRMSNormForGemma4(_LigerRMSNormForGemma4, LigerRMSNorm): ...

class LigerRMSNormForGlm4(_LigerRMSNormForGlm4, LigerRMSNorm): ...

class LigerRMSNormForOlmo2(_LigerRMSNormForOlmo2, LigerRMSNorm): ...

class LigerRMSNormForGemma2(_LigerRMSNormForGemma2, LigerRMSNormForGemma): ...

class LigerRMSNormForGemma3(_LigerRMSNormForGemma3, LigerRMSNormForGemma): ...

class LigerRMSNormForQwen3Next(_LigerRMSNormForQwen3Next, LigerRMSNormForGemma): ...
