"""The functions that patch Hugging Face models. transformers is imported when one of them is first used, so that
importing this package is cheap."""

import functools
import importlib
import importlib.metadata
import warnings

from liger_ext.models.model_types import FAMILIES

_MODULES = {
    "AutoLigerKernelForCausalLM": "auto",
    "LigerCausalLMOutputWithPast": "modules.loss",
    "PatchHandle": "patching.handle",
    "apply_liger_kernel": "auto",
    "apply_liger_kernel_to_instance": "auto",
    **{f"apply_liger_kernel_to_{family}": "families" for family in FAMILIES},
}
OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS = "4.51.3", "5.24"

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_transformers()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@functools.cache
def check_transformers() -> None:
    """Raises ImportError if transformers is missing or too old; warns, once, if it is newer than any tested version."""
    supported = f"transformers {OLDEST_TRANSFORMERS} to {NEWEST_TRANSFORMERS}"
    try:
        found = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"liger_ext patches models of {supported}, which is not installed: pip install 'liger_ext[transformers]', "
            "or '.[transformers]' in liger_ext's sources"
        ) from None
    release = _release(found)
    if release < _release(OLDEST_TRANSFORMERS):
        raise ImportError(f"liger_ext needs {supported}, but {found} is installed. Upgrade transformers.")
    if release[:2] > _release(NEWEST_TRANSFORMERS):
        warnings.warn(f"liger_ext is tested with {supported}; {found} is installed", stacklevel=3)


def _release(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (5, 24, 0) for "5.24.0.dev0"."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
