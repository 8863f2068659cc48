"""Types for users (PEP 561): stubs, annotations of what is public, and what mypy makes of both."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import stubs

import liger_ext
from liger_ext import compat, models

ROOT = Path(__file__).parent.parent


def test_stubs_are_those_of_the_signatures():
    texts = stubs.stubs()
    assert (stubs.PACKAGE / "py.typed").exists()
    assert {path.name for path in texts} == {path.name for path in stubs.PACKAGE.rglob("*.pyi")}
    for path, text in texts.items():
        assert path.read_text() == text, f"{path} is not of these signatures: make stubs"


def test_everything_public_has_types():
    names = {name: getattr(liger_ext, name) for name in liger_ext.__all__}
    names |= {name: getattr(models, name) for name in models.__all__} | {"install": compat.install}
    functions = {}
    for name, value in names.items():
        if isinstance(value, type):
            public = [member for member in vars(value) if not member.startswith("_") or member == "__init__"]
            of_class = {f"{name}.{member}": getattr(value, member) for member in public}
            functions |= {key: member for key, member in of_class.items() if inspect.isroutine(member)}
        else:
            functions[name] = value
    assert len(functions) > 120
    unknown = []
    for name, function in functions.items():
        signature = inspect.signature(function)
        types = [p.annotation for p in signature.parameters.values() if p.name not in ("self", "cls")]
        if not name.endswith("__init__"):
            types.append(signature.return_annotation)
        if any(annotation is signature.empty or "Any" in str(annotation) for annotation in types):
            unknown.append(name)
    assert unknown == []


# `make lint` checks tests/typed_user.py. These are wrong.
WRONG = {
    "LigerRMSNorm(8, epsilon=1.0)": '"epsilon" for "LigerRMSNorm"',
    "LF.softmax(x, dims=-1)": '"dims" for "softmax"',
    "apply_liger_kernel_to_llama(geglu=True)": '"geglu" for "apply_liger_kernel_to_llama"',
    "y: Tensor = LF.cross_entropy(x, x, return_z_loss=True)": 'expression has type "CrossEntropyOutput"',
    "LF.rope(x, None, x, x)[1].sum()": '"None" has no attribute "sum"',
    "LF.no_such_function(x)": 'no attribute "no_such_function"',
}


@pytest.mark.slow
def test_mypy_finds_mistakes(tmp_path):
    file = tmp_path / "wrong.py"
    names = "LigerRMSNorm, apply_liger_kernel_to_llama, functional as LF"
    head = f"from liger_ext import {names}\nfrom torch import Tensor\ndef f(x: Tensor) -> None:\n"
    file.write_text(head + "".join(f"    {line}\n" for line in WRONG))
    command = [sys.executable, "-m", "mypy", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(WRONG), done.stdout + done.stderr
    for error, words in zip(errors, WRONG.values(), strict=True):
        assert words in error
