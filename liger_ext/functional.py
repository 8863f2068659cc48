"""The public functions in one place. Inputs are never written; every function is differentiable and compiles.

Each computes in float32 (float64 for float64 tensors, which work on the CPU) with one rounding at the end, and takes
float32, bfloat16 and float16 tensors in any mixture of parameter and activation dtypes. Options (eps, beta, softcap,
...) are numbers, not tensors: one that requires a gradient raises TypeError, and torch.compile takes no tensor for one.
"""

from liger_ext import compat as _compat
from liger_ext import modules as _modules
from liger_ext.ops import PUBLIC as _PUBLIC

__all__ = [name for name in _PUBLIC if name not in {*_compat.__all__, *_modules.__all__}]
globals().update((name, _PUBLIC[name]) for name in __all__)
