"""The public functions in one place. Inputs are never written; every function is differentiable and compiles.

Each computes in float32 (float64 for float64 tensors, which work on the CPU) with one rounding at the end, and takes
float32, bfloat16 and float16 tensors in any mixture of parameter and activation dtypes.
"""

from liger_ext.ops import stream_copy as _stream_copy  # noqa: F401  (registers it)
from liger_ext.ops.check_errors import check_errors
from liger_ext.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_ext.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_ext.ops.glu import geglu, geglu_packed, swiglu, swiglu_packed
from liger_ext.ops.group_norm import group_norm
from liger_ext.ops.jsd import jsd
from liger_ext.ops.layer_norm import layer_norm
from liger_ext.ops.relu_squared import relu_squared
from liger_ext.ops.rms_norm import add_rms_norm, rms_norm
from liger_ext.ops.rope import rope
from liger_ext.ops.softmax import softmax

__all__ = [
    "CrossEntropyOutput",
    "add_rms_norm",
    "check_errors",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "geglu",
    "geglu_packed",
    "group_norm",
    "jsd",
    "layer_norm",
    "relu_squared",
    "rms_norm",
    "rope",
    "softmax",
    "swiglu",
    "swiglu_packed",
]
