"""Mutants of Python functions, for the tests of recognition: changed copies that must not be taken for known code.

A mutation is an edit that a release of transformers could contain: another operator, constant, name, attribute or
keyword argument, one at a time, at every place in a function's text; or two adjacent statements of its body exchanged.
"""

import ast
import importlib
import inspect
import io
import keyword
import tokenize
from collections.abc import Callable, Iterator

from liger_ext.models.patching.forwards import source_text

_OTHER = {"+": "-", "-": "+", "*": "/", "/": "*", "**": "*", "@": "*", "<": ">", ">": "<", "<=": "<", ">=": ">"}
_OTHER |= {"==": "!=", "!=": "==", "is": "==", "and": "or", "or": "and", "True": "False", "False": "True", "None": "0"}
_OTHER |= {"+=": "-=", "-=": "+=", "*=": "+=", "^": "|", "&": "|", "|": "&"}


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yields a description and the changed source for each change of `source`, a result of `source_text`."""
    yield from _with_another_token(source)
    yield from _with_statements_swapped(source)


def _with_another_token(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    names = list(dict.fromkeys(t.string for t in tokens if t.type == tokenize.NAME and not keyword.iskeyword(t.string)))
    for token in tokens:
        other = _another(token, names)
        if other is None:
            continue
        (row, start), (_, end) = token.start, token.end
        changed = lines.copy()
        changed[row - 1] = lines[row - 1][:start] + other + lines[row - 1][end:]
        if _parses("".join(changed)):
            yield f"line {row}: {lines[row - 1].strip()!r}, {token.string} -> {other}", "".join(changed)


def _another(token: tokenize.TokenInfo, names: list[str]) -> str | None:
    if token.string in _OTHER:
        return _OTHER[token.string]
    if token.type == tokenize.NUMBER:
        return f"{token.string}1" if "." in token.string or "e" in token.string else str(int(token.string, 0) + 1)
    if token.type == tokenize.STRING and token.string[0] in "'\"":
        return f"{token.string[:-1]}x{token.string[-1]}"
    if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
        return names[(names.index(token.string) + 1) % len(names)]
    return None


def _with_statements_swapped(source: str) -> Iterator[tuple[str, str]]:
    for index in range(len(ast.parse(source).body[0].body) - 1):
        tree = ast.parse(source)
        body = tree.body[0].body
        body[index], body[index + 1] = body[index + 1], body[index]
        if ast.dump(body[index]) != ast.dump(body[index + 1]):
            yield f"before {ast.unparse(body[index + 1])!r}: {ast.unparse(body[index])!r}", ast.unparse(tree)


def _parses(source: str) -> bool:
    try:
        compile(source, "a mutant", "exec")
    except SyntaxError:
        return False
    return True


def texts(functions: list[Callable]) -> dict[Callable, str]:
    return {inspect.unwrap(function): source_text(function) for function in functions}


def find_class(path: str) -> type:
    """Returns the class "gemma2.Gemma2MLP" of transformers.models, or one of another file: "blip_2.modeling_x.Name"."""
    folder, *file, name = path.split(".")
    return getattr(importlib.import_module(f"transformers.models.{folder}.{(file or [f'modeling_{folder}'])[0]}"), name)
