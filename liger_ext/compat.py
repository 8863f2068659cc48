"""Liger-Kernel's function names and argument orders, and, by :func:`install`, its module name. New code wants
:mod:`liger_ext.functional`.

``in_place`` arguments are accepted and have no effect: nothing is ever written over.
"""

import typing as _typing

from liger_ext.models.stand_in import install  # noqa: F401
from liger_ext.ops import PUBLIC as _PUBLIC

if _typing.TYPE_CHECKING:  # editors and type checkers cannot run the code below
    from liger_ext.ops import *  # noqa: F403
else:
    __all__ = [name for name in _PUBLIC if name.startswith("liger_")]
    globals().update((name, _PUBLIC[name]) for name in __all__)
