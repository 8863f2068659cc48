"""The ops as ``nn.Module`` classes, with Liger-Kernel's constructor arguments and with its parameter names, so that its
checkpoints load."""

from torch.nn import Module as _Module

from liger_ext.ops import PUBLIC as _PUBLIC

__all__ = [name for name, value in _PUBLIC.items() if isinstance(value, type) and issubclass(value, _Module)]
globals().update((name, _PUBLIC[name]) for name in __all__)
