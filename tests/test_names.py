"""A lint of identifiers: names that cross a function boundary contain no word that carries no meaning there.

CONTRIBUTING.md, "How it is written", has the list of words. In Python the lint reads the names of functions, classes,
parameters and attributes, and those of variables of a module or class; in C++ and CUDA every identifier. Names of tests
are sentences, and exempt.
"""

import ast
import re
from collections.abc import Iterator

from cases import tracked_files

WORDS = {"of", "made", "own", "given", "said", "kept", "two", "usual"}
# Terms of C++, PyTorch and this field.
EXEMPT = {"all_of", "any_of", "none_of", "out_of_range", "out_of_memory", "OutOfMemory"}
TWO_PASS = re.compile("two_?pass", re.IGNORECASE)


def breaks_the_rule(name: str) -> bool:
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", TWO_PASS.sub("", name)).lower().split("_")
    return name not in EXEMPT and not name.startswith("test_") and not WORDS.isdisjoint(words)


def names_in_python(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    written = (name for name in ast.walk(statement) if isinstance(name, ast.Name))
                    yield from (name.id for name in written if isinstance(name.ctx, ast.Store))


def names_in_cpp(source: str) -> list[str]:
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', " ", source, flags=re.DOTALL)
    return re.findall(r"[A-Za-z_]\w*", code)


def test_no_name_has_a_word_without_meaning():
    readers = {".py": names_in_python, ".h": names_in_cpp, ".cpp": names_in_cpp, ".cu": names_in_cpp}
    files = [file for file in tracked_files() if file.suffix in readers]
    wrong = {
        f"{file}: {name}" for file in files for name in readers[file.suffix](file.read_text()) if breaks_the_rule(name)
    }
    assert len(files) > 300
    assert not wrong, "rename " + ", ".join(sorted(wrong))


def test_the_lint_reads_each_kind_of_name():
    lines = [
        "MADE, x = 1, 2",
        "class Kept:",
        "    own: int",
        "    def f(self, given, *two): self.x_of = of",
        "usual = said = 1",
    ]
    wrong = {name for name in names_in_python("\n".join(lines)) if breaks_the_rule(name)}
    assert wrong == {"MADE", "Kept", "own", "given", "two", "x_of", "usual", "said"}
    cpp = 'int sizeOf(x); // row_of\nf("made", twofold); /* kept\n*/ any_of(a);'
    assert {name for name in names_in_cpp(cpp) if breaks_the_rule(name)} == {"sizeOf"}
