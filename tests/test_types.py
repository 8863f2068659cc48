"""Types that users see: the stubs have exactly the public names and signatures, and every public name has types.

`make lint` runs mypy over the stubs and over a user's script, typed_user.py.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stubs import stubs

import liger_ext
from liger_ext import compat, doctor, functional, hub_kernels, models, testing

PACKAGE = Path(liger_ext.__file__).parent
UNTYPED = re.compile(
    r"\bAny\b|\b(Callable|[Tt]uple|[Dd]ict|[Ll]ist|[Tt]ype|Mapping|Sequence|Iterator|Iterable)\b(?!\[)"
)


def test_the_stubs_are_those_that_make_stubs_makes():
    made = stubs()
    assert set(made) == set(PACKAGE.rglob("*.pyi")) and (PACKAGE / "py.typed").exists()
    stale = [path.name for path, text in made.items() if path.read_text() != text]
    assert not stale, f"run `make stubs`: names or signatures are others than in {', '.join(stale)}"


def without_option(x: object, weight: object = None, *, new: bool = True) -> object:
    """Has another signature than the function that it replaces."""


@pytest.mark.parametrize(
    ("module", "name", "file"),
    [
        (functional, "cross_entropy", "functional.pyi"),
        (compat, "liger_fused_linear_cross_entropy", "compat.pyi"),
        (compat, "install", "compat.pyi"),
        (models, "apply_liger_kernel_to_gemma2", "models/__init__.pyi"),
        (functional, "rope", "functional.pyi"),
    ],
)
def test_another_signature_makes_another_stub(module, name, file, monkeypatch):
    monkeypatch.setattr(module, name, without_option, raising=False)
    path = PACKAGE / file
    assert stubs()[path] != path.read_text()


def public_functions() -> Iterator[tuple[str, Callable]]:
    """Functions, and of classes the constructor, and methods and properties that liger_ext defines."""
    places = [(liger_ext, liger_ext.__all__), (models, models.__all__), (compat, ["install"]), (doctor, ["main"])]
    places += [(testing, testing.__all__), (hub_kernels, ["mapping"])]
    for module, names in places:
        for name in names:
            value, shown = getattr(module, name), f"{module.__name__}.{name}"
            if isinstance(value, type):
                for method, found in public_methods(value).items():
                    yield f"{shown}.{method}", found
            elif callable(value):
                yield shown, value


def public_methods(cls: type) -> dict[str, Callable]:
    own = [base for base in cls.__mro__ if base.__module__.startswith("liger_ext.")]
    members = {name: value for base in reversed(own) for name, value in vars(base).items()}
    functions = {name: getattr(value, "__func__", getattr(value, "fget", value)) for name, value in members.items()}
    public = {name: f for name, f in functions.items() if name == "__init__" or not name.startswith("_")}
    return {name: f for name, f in public.items() if inspect.isfunction(f)}


def untyped(function: Callable) -> list[str]:
    """The arguments, and "return", whose type is missing or Any."""
    signature = inspect.signature(function)
    annotations = {name: p.annotation for name, p in signature.parameters.items() if name not in ("self", "cls")}
    if function.__name__ != "__init__":
        annotations["return"] = signature.return_annotation
    texts = {n: a if isinstance(a, str) else inspect.formatannotation(a) for n, a in annotations.items()}
    return [n for n, a in annotations.items() if a is inspect.Parameter.empty or UNTYPED.search(texts[n])]


def test_every_public_name_has_types():
    found = dict(public_functions())
    assert len(found) > 150 and {"liger_ext.LigerExperts.forward", "liger_ext.testing.judge"} <= found.keys()
    assert {name: missing for name, function in found.items() if (missing := untyped(function))} == {}


def test_a_missing_type_is_found():
    def function(a, b: "list", c: "dict[str, Any]", d: Callable, e: "list[int]", *f: int, **g) -> type: ...  # noqa: F821

    assert untyped(function) == ["a", "b", "c", "d", "g", "return"]
