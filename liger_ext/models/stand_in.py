"""The name ``liger_kernel``, for libraries that look for it: what they import from there is liger_ext's."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path

from liger_ext.models.patch import PatchHandle

# Upstream's version whose names and arguments these are.
UPSTREAM_VERSION = "0.8.5"

_NAME = "liger_kernel"
_installed = 0  # by how many handles


def install() -> PatchHandle:
    """See `liger_ext.compat.install`."""
    global _installed
    if not _installed:
        found = importlib.util.find_spec(_NAME)
        if found is not None:
            raise RuntimeError(
                f"{_NAME} is installed ({found.origin}), and its name is taken: uninstall liger-kernel, or patch with "
                "liger_ext.apply_liger_kernel_to_instance(model) and without use_liger_kernel=True"
            )
        sys.modules.update({made.__name__: made for made in _modules()})
        sys.meta_path.append(_FINDER)
        _say_what_is_available(True)
    _installed += 1
    handle = PatchHandle()
    handle.callback(_uninstall)
    return handle


def _uninstall() -> None:
    global _installed
    _installed -= 1
    if _installed == 0:
        for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
            del sys.modules[name]
        sys.meta_path.remove(_FINDER)
        _say_what_is_available(False)


def _modules() -> list[types.ModuleType]:
    import liger_ext

    package = _module(_NAME, {})
    names = {name: _lazily(liger_ext, name) for name in liger_ext.__all__}
    names["_apply_liger_kernel"] = _lazily(liger_ext, "apply_liger_kernel")
    names["_apply_liger_kernel_to_instance"] = _lazily(liger_ext, "apply_liger_kernel_to_instance")
    parts = [_module(f"{_NAME}.transformers", names), _module(f"{_NAME}.chunked_loss", {})]
    for part in parts:
        setattr(package, part.__name__.rpartition(".")[2], part)
    return [package, *parts]


def _lazily(module: types.ModuleType, name: str) -> Callable[[], object]:
    return lambda: getattr(module, name)  # what patches imports transformers


def _module(name: str, names: dict[str, Callable[[], object]]) -> types.ModuleType:
    module = types.ModuleType(name, "liger_ext under the name of Liger-Kernel: liger_ext.compat.install()")
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, origin="liger_ext.compat", is_package=True)
    module.__path__ = []
    module.__version__ = UPSTREAM_VERSION

    def find(wanted: str) -> object:
        if wanted in names:
            return names[wanted]()
        if wanted.startswith(("Liger", "liger_", "apply_liger_kernel_to_")):
            return _absent(name, wanted)
        raise AttributeError(f"liger_ext, which answers to the name {name}, has no {wanted}")

    module.__getattr__ = find
    return module


def _absent(module: str, name: str) -> type:
    """Can be imported, since libraries import all that they may use."""

    def refuse(cls, *_, **__):
        raise NotImplementedError(f"liger_ext has no {name}, which {module} has: do without use_liger_kernel here")

    return type(name, (), {"__new__": refuse, "__module__": module})


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata.version() looks for, by which older versions of transformers find a package."""

    def read_text(self, filename: str) -> str | None:
        text = f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {UPSTREAM_VERSION}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *_) -> None:
        return None

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()) -> list[_Distribution]:  # noqa: B008
        asked = (context.name or "").replace("-", "_").lower()
        return [_Distribution()] if asked == _NAME else []


_FINDER = _Finder()


def _say_what_is_available(available: bool) -> None:
    """Others look for the package once."""
    for name in ("transformers.utils.import_utils", "trl.import_utils", "accelerate.utils.imports"):
        module = sys.modules.get(name)
        if hasattr(module, "_liger_kernel_available"):
            module._liger_kernel_available = available
        check = getattr(module, "is_liger_kernel_available", None)
        while check is not None and not hasattr(check, "cache_clear"):
            check = getattr(check, "__wrapped__", None)
        if check is not None:
            check.cache_clear()
