"""The public functions. They never write to their inputs; those that call an op are differentiable and work under
torch.compile.

Each op takes float32, bfloat16 and float16 tensors (float64 on the CPU), and parameters may have another dtype than
activations. It computes in float32 (float64 for float64 tensors), mostly with one rounding at the end. Options (eps,
beta, softcap, ...) are numbers, not tensors, and torch.compile accepts no tensor for most options. An option, a class
weight or another argument without a gradient raises ValueError if it is a tensor that requires one.
"""

from liger_ext import compat as _compat
from liger_ext import modules as _modules
from liger_ext.ops import PUBLIC as _PUBLIC

__all__ = [name for name in _PUBLIC if name not in {*_compat.__all__, *_modules.__all__}]
globals().update((name, _PUBLIC[name]) for name in __all__)
