"""Made by tests/stubs.py (`make stubs`)."""

from liger_ext.ops.glu import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
from liger_ext.ops.cross_entropy import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_ext.ops.glu import LigerExperts as LigerExperts
from liger_ext.ops.glu import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
from liger_ext.ops.rms_norm import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_ext.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from liger_ext.ops.glu import LigerGEGLUMLP as LigerGEGLUMLP
from liger_ext.ops.glu import LigerGEGLUMLPForGemma4 as LigerGEGLUMLPForGemma4
from liger_ext.ops.group_norm import LigerGroupNorm as LigerGroupNorm
from liger_ext.ops.glu import LigerHunyuanV1SwiGLUMLP as LigerHunyuanV1SwiGLUMLP
from liger_ext.ops.jsd import LigerJSD as LigerJSD
from liger_ext.ops.layer_norm import LigerLayerNorm as LigerLayerNorm
from liger_ext.ops.glu import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from liger_ext.ops.glu import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
from liger_ext.ops.rms_norm import LigerRMSNorm as LigerRMSNorm
from liger_ext.ops.rms_norm import LigerRMSNormForGemma as LigerRMSNormForGemma
from liger_ext.ops.rms_norm import LigerRMSNormForGemma2 as LigerRMSNormForGemma2
from liger_ext.ops.rms_norm import LigerRMSNormForGemma3 as LigerRMSNormForGemma3
from liger_ext.ops.rms_norm import LigerRMSNormForGemma4 as LigerRMSNormForGemma4
from liger_ext.ops.rms_norm import LigerRMSNormForGlm4 as LigerRMSNormForGlm4
from liger_ext.ops.rms_norm import LigerRMSNormForOlmo2 as LigerRMSNormForOlmo2
from liger_ext.ops.rms_norm import LigerRMSNormForQwen3Next as LigerRMSNormForQwen3Next
from liger_ext.ops.relu_squared import LigerReLUSquared as LigerReLUSquared
from liger_ext.ops.softmax import LigerSoftmax as LigerSoftmax
from liger_ext.ops.glu import LigerSwiGLUMLP as LigerSwiGLUMLP
