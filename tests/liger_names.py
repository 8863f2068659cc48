"""Writes docs/liger_kernel_names.md: the names of Liger-Kernel's modules, and whether each works under liger_ext.

    PYTHONPATH=. python tests/liger_names.py <the folder liger_kernel of its sources>

The command lists the names that Liger-Kernel's files define or import from one another, without its other backends and
its tests. tests/test_liger_kernel.py compares the page with the modules of liger_ext.
"""

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from liger_ext import compat, liger_kernel

PAGE = Path(__file__).parent.parent / "docs" / "liger_kernel_names.md"
STATES = {"works": "works", "raises": "raises NotImplementedError when it is used", "absent": "cannot be imported"}
_ABSENT = "Modules whose import raises ModuleNotFoundError"
_LEFT_OUT = "backends", "cute", "cutedsl", "cutile", "testing", "_nvidia_shared"
_PRIVATE = "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "_FSDPForwardRedirection"


def state(module: str, name: str) -> str:
    """Returns a key of STATES. The caller must have called liger_ext.compat.install()."""
    try:
        found = getattr(importlib.import_module(module), name)
    except AttributeError as error:
        return "works" if "needs triton" in str(error) else "absent"
    except ModuleNotFoundError:
        return "absent"
    placeholder = isinstance(found, type) and found.__module__ == module
    return "raises" if placeholder else "works"


def absent_modules() -> list[str]:
    """Returns the modules that the page lists as absent."""
    return re.findall(r"`(liger_kernel\.[\w.]+)`", PAGE.read_text().partition(f"## {_ABSENT}\n")[2])


def listed() -> dict[str, dict[str, list[str]]]:
    """Returns the names on the page, by module and state."""
    modules: dict[str, dict[str, list[str]]] = {}
    for line in PAGE.read_text().splitlines():
        if heading := re.fullmatch(r"## (liger_kernel[\w.]*)", line):
            modules[heading[1]] = names = {}
        elif entry := re.match(r"- ([\w ]+): ", line):
            names[next(s for s, words in STATES.items() if words == entry[1])] = now = re.findall(r"`(\w+)`", line)
        elif line.startswith("  ") and modules:
            now += re.findall(r"`(\w+)`", line)
    return modules


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign():
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.ImportFrom(module=str(module)) if module.startswith("liger_kernel"):
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.If() | ast.Try():
                yield from _defined([*node.body, *node.orelse])


def _write(folder: Path) -> None:
    head, marker, _ = PAGE.read_text().partition("<!-- made by tests/liger_names.py -->\n")
    text, absent = head + marker, []
    for path in sorted(folder.rglob("*.py")):
        module = ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
        if any(part in _LEFT_OUT for part in module.split(".")):
            continue
        if module not in liger_kernel.MODULES:
            absent.append(f"`{module}`")
            continue
        names = sorted(set(_defined(ast.parse(path.read_text()).body)))
        names = [name for name in names if name in _PRIVATE or not name.startswith("_")]
        if names:
            text += f"\n## {module}\n\n"
        for key, words in STATES.items():
            if of_state := [f"`{name}`" for name in names if state(module, name) == key]:
                text += textwrap.fill(f"- {words}: {', '.join(of_state)}", 160, subsequent_indent="  ") + "\n"
    PAGE.write_text(f"{text}\n## {_ABSENT}\n\n{textwrap.fill(', '.join(absent), 160)}\n")


if __name__ == "__main__":
    with compat.install():
        _write(Path(sys.argv[1]))
