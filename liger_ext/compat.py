"""Liger-Kernel's function names and argument orders, and, by :func:`install`, its module name. New code wants
:mod:`liger_ext.functional`.

``in_place`` arguments are accepted and have no effect: nothing is ever written over.
"""

import typing as _typing

from liger_ext.ops import PUBLIC as _PUBLIC

if _typing.TYPE_CHECKING:
    from liger_ext.models.patching.swap import PatchHandle as _PatchHandle

__all__ = [name for name in _PUBLIC if name.startswith("liger_")]
globals().update((name, _PUBLIC[name]) for name in __all__)


def install() -> "_PatchHandle":
    """Answers to the name ``liger_kernel`` in this process, so that ``Trainer(use_liger_kernel=True)`` patches with
    liger_ext. To be called before ``trl`` is imported, which looks for the name then.

    Its modules have this library's classes, functions and patches where Liger-Kernel has its own:
    docs/liger_kernel_names.md lists them. ``Liger*``, ``liger_*`` and ``apply_*`` names that this library does
    not have can be imported, and raise NotImplementedError when they are used. Models that are patched there have
    ``output.logits`` None after a training step.

    Returns:
        A handle, whose ``.revert()`` takes the name away again. As a context manager it reverts at the end.

    Raises:
        RuntimeError: Liger-Kernel itself is installed.
    """
    from liger_ext import liger_kernel  # the mechanism of patching is not needed before

    return liger_kernel.install()
