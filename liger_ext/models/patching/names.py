"""Names by which pickle finds classes that liger_ext derives at run time, each from one transformers class.

The `__module__` of these classes is a module of liger_ext whose `__getattr__` calls `find_class_by_name`.
"""

import importlib

MODELS = "transformers.models."
REMOTE = "transformers_modules."  # code that comes with a model's weights (`trust_remote_code=True`)
_SEPARATOR = "__"


def pickle_name(cls: type) -> str:
    """Returns the module and the name of a class as one identifier."""
    return f"{cls.__module__.removeprefix(MODELS)}.{cls.__name__}".replace(".", _SEPARATOR)


def find_class_by_name(name: str) -> type | None:
    """Returns the transformers class whose `pickle_name` is `name`; None if there is no such class."""
    module, _, cls = name.rpartition(_SEPARATOR)
    if not module or name.startswith("_"):
        return None
    path = module.replace(_SEPARATOR, ".")
    try:
        return getattr(importlib.import_module(path if path.startswith("transformers.") else MODELS + path), cls, None)
    except ImportError:
        return None
