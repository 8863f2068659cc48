"""Functions with Liger-Kernel's names and argument orders, and :func:`install`, which provides its module name.
New code should use :mod:`liger_ext.functional`.

``in_place`` arguments are accepted and have no effect: inputs are never overwritten.
"""

import typing as _typing

from liger_ext.ops import PUBLIC as _PUBLIC

if _typing.TYPE_CHECKING:
    from liger_ext.models.patching.handle import PatchHandle as _PatchHandle

__all__ = [name for name in _PUBLIC if name.startswith("liger_")]
globals().update((name, _PUBLIC[name]) for name in __all__)


def install() -> "_PatchHandle":
    """Provides the module ``liger_kernel`` in this process, so that ``Trainer(use_liger_kernel=True)`` patches with
    liger_ext. Call it before ``trl`` is imported, since ``trl`` looks for the module at import.

    The modules under this name contain this library's classes, functions and patches in place of Liger-Kernel's:
    docs/liger_kernel_names.md lists them. Other ``Liger*``, ``liger_*`` and ``apply_*`` names can be imported, and
    raise NotImplementedError when they are called. A model that is patched under this name has ``output.logits`` None
    after a training step.

    Returns:
        A handle, whose ``.revert()`` removes the name again. As a context manager it reverts at the end.

    Raises:
        RuntimeError: Liger-Kernel itself is installed, and ``python -m liger_ext run`` has not started the program.
    """
    from liger_ext import liger_kernel  # here, since only install() needs the patching code

    return liger_kernel.install()
