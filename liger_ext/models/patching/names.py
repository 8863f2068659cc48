"""Names of classes that are made of a class of transformers each: pickles find them again by these.

A module that makes such classes gives them its own name as `__module__`, and has a `__getattr__` that calls `class_of`.
"""

import importlib

MODELS = "transformers.models."
REMOTE = "transformers_modules."  # code that comes with a model's weights (`trust_remote_code=True`)
_SEPARATOR = "__"


def name_of(cls: type) -> str:
    """One word of the module and the name of a class."""
    return f"{cls.__module__.removeprefix(MODELS)}.{cls.__name__}".replace(".", _SEPARATOR)


def class_of(name: str) -> type | None:
    """The class of transformers whose `name_of` is `name`; None if it is no such name."""
    module, _, cls = name.rpartition(_SEPARATOR)
    if not module or name.startswith("_"):
        return None
    path = module.replace(_SEPARATOR, ".")
    try:
        return getattr(importlib.import_module(path if path.startswith("transformers.") else MODELS + path), cls, None)
    except ImportError:
        return None
