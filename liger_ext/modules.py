"""The functions as modules, with Liger-Kernel's constructor arguments and parameter names, so that checkpoints load."""

import typing as _typing

from torch.nn import Module as _Module

from liger_ext.ops import PUBLIC as _PUBLIC

if _typing.TYPE_CHECKING:  # editors and type checkers cannot run the code below
    from liger_ext.ops import *  # noqa: F403
else:
    __all__ = [name for name, value in _PUBLIC.items() if isinstance(value, type) and issubclass(value, _Module)]
    globals().update((name, _PUBLIC[name]) for name in __all__)
