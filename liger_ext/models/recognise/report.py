"""Reports which code of the installed transformers is known, and drafts entries of the table `known.json` for the rest.

`python -m liger_ext.models.recognise` prints the report. docs/adding_a_model.md shows how to use it for a new model.
"""

import ast
import difflib
import functools
import importlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import transformers
from torch import nn

from liger_ext.models.patching.forwards import functions_read, parse_function
from liger_ext.models.recognise.known import ENDS, Entry, candidate_forms, entries, look_up, ropes_in
from liger_ext.models.recognise.reading import Form


class Seen(NamedTuple):
    """A class of a model of transformers."""

    path: str  # "llama.LlamaMLP"
    cls: type[nn.Module]
    entry: Entry | None  # None: the code is not known
    ropes: tuple[str, ...] = ()  # known functions that apply rotary embeddings in an attention

    @property
    def forms(self) -> dict[str, Form]:
        """The forms of the class, by part of the table."""
        return {part: form for part, form in candidate_forms(self.cls) if form is not None}

    @property
    def folder(self) -> str:
        return self.path.partition(".")[0]

    @property
    def is_known(self) -> bool:
        return self.entry is not None or bool(self.ropes)

    @property
    def is_missed(self) -> bool:
        """True if the class has the name of a part that can be fused, and its code is not known."""
        rotates = self.kind != "attention" or "apply_rotary_" in _text(self.cls)
        return self.kind is not None and rotates and not self.is_known

    @property
    def has_changed(self) -> bool:
        """True if the table has the class as an example, and its code is not known."""
        return not self.is_known and any(entry.example == self.path for entry in entries())

    @property
    def kind(self) -> str | None:
        return _part_kind(self.path)


def _part_kind(path: str) -> str | None:
    """Returns the part that the name of a class stands for, if it can be fused."""
    return next((kind for kind, ends in ENDS.items() if path.endswith(ends)), None)


def look(folders: Iterable[str] = ()) -> Iterator[Seen]:
    """Yields the classes with their own `forward` in these folders of `transformers.models`, or in all folders.

    Skips a module that cannot be imported because a package is missing.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folders = set(folders)
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if path.name.startswith(("modeling_tf_", "modeling_flax_")) or (folders and path.parent.name not in folders):
            continue
        name = f"transformers.models.{path.parent.name}.{path.stem}"
        try:
            module = importlib.import_module(name)
        except (ImportError, RuntimeError):  # a package is missing
            continue
        for cls in list(vars(module).values()):
            if not isinstance(cls, type) or not issubclass(cls, nn.Module):
                continue
            if cls.__module__ == name and "forward" in vars(cls):
                yield _see(f"{path.parent.name}.{cls.__name__}", cls)


def _see(path: str, cls: type[nn.Module]) -> Seen:
    found = look_up(cls)
    return Seen(path, cls, None, tuple(ropes_in(cls))) if found is None else Seen(path, cls, found[0])


def report(folders: Iterable[str] = ()) -> str:
    """Returns the report: a line for each model, and for each unknown part the nearest known code, the difference, and
    the entry that would make the part known. For more than ten models, only changed parts have these details."""
    seen, by_folder = [], {}
    for each in look(folders):
        if each.folder not in by_folder and sys.stderr.isatty():
            print(f"\r{each.folder:40}", end="", file=sys.stderr, flush=True)
        seen.append(each)
        by_folder.setdefault(each.folder, []).append(each)
    unknown = [each for each in seen if each.is_missed]
    lines = [
        f"transformers {transformers.__version__}: {sum(each.is_known for each in seen)} classes are known, "
        f"{len(unknown)} have the name of a part that can be fused and are not",
        "",
    ]
    for folder, classes in by_folder.items():
        known = sum(each.is_known for each in classes)
        others = [f"{each.cls.__name__}{' (changed)' * each.has_changed}" for each in classes if each in unknown]
        lines.append(f"{folder}: {known} known{'; not known: ' if others else ''}{', '.join(others)}")
    for each in unknown if len(by_folder) <= 10 else [each for each in unknown if each.has_changed]:
        lines += ["", *_describe(each, seen)]
    if len(by_folder) > 10 and unknown:
        lines += ["", "Name folders as arguments to see how their other classes differ from known ones."]
    return "\n".join(lines)


def _describe(unknown: Seen, seen: list[Seen]) -> list[str]:
    state = "changed since it was put into the table" if unknown.has_changed else "new"
    nearest = _nearest(unknown, seen)
    if nearest is None:
        return [f"{unknown.path}: {state}; no class like it is known"]
    part, known = nearest
    texts = [_text(each.cls) for each in (known, unknown)]
    changes = difflib.unified_diff(*(text.splitlines() for text in texts), known.path, unknown.path, lineterm="", n=1)
    return [
        f"{unknown.path}: {state}; the nearest known code is {known.path} ({known.entry.replacement})",
        *(f"    {line}" for line in changes),
        "  If liger_ext.models computes the same, this line in known.json makes it known:",
        f"    {json.dumps(_entry(unknown, part, known))}",
    ]


def _nearest(unknown: Seen, seen: list[Seen]) -> tuple[str, Seen] | None:
    """Returns the known class of the same kind whose text is most like that of `unknown`, and the part of the table for
    it. The classes in the table's `example` are candidates whatever folders the report covers."""
    candidates = [each for each in (*seen, *_examples(unknown.kind)) if each.kind == unknown.kind]
    candidates = [each for each in candidates if each.entry is not None and each.entry.replacement is not None]
    if not candidates:
        return None
    ratio = difflib.SequenceMatcher(b=_text(unknown.cls), autojunk=False)

    def likeness(each: Seen) -> float:
        ratio.set_seq1(_text(each.cls))
        return ratio.ratio()

    nearest = max(candidates, key=likeness)
    return nearest.entry.part if nearest.entry.part in unknown.forms else "module", nearest


@functools.cache
def _examples(kind: str) -> list[Seen]:
    replaced = [entry.example for entry in entries() if entry.replacement is not None]
    return list(look(path.partition(".")[0] for path in replaced if _part_kind(path) == kind))


@functools.cache
def _text(cls: type[nn.Module]) -> str:
    """Returns the source of a class's `forward`, and of the functions that this calls."""
    definitions = map(parse_function, functions_read(cls.forward, cls))
    return "\n".join(ast.unparse(definition) for definition in definitions if definition is not None)


def _entry(unknown: Seen, part: str, known: Seen) -> dict[str, object]:
    """Returns the entry of `known` with the digest and the attributes of `unknown`. An attribute gets the word in
    capitals of the known attribute with the same name or, if both have as many attributes, at the same position. The
    others keep their names; a person must check them."""
    form, entry = unknown.forms[part], known.entry
    theirs = known.forms[part].attributes
    by_name = dict(zip(theirs, entry.attributes, strict=False))
    if len(theirs) == len(form.attributes):
        by_name = dict(zip(form.attributes, entry.attributes, strict=False)) | by_name
    words = {name: word for name, word in by_name.items() if word.isupper()}
    attributes = " ".join(words.get(name, name) for name in form.attributes) if entry.attributes else ""
    made = {"part": part, "digest": form.digest, "replacement": entry.replacement, "attributes": attributes}
    made |= {"options": entry.options, "example": unknown.path, "versions": transformers.__version__}
    return {name: value for name, value in made.items() if value not in ("", {})}


def main(arguments: list[str]) -> int:
    if any(argument.startswith("-") for argument in arguments):
        print(__doc__, "\nusage: python -m liger_ext.models.recognise [FOLDER OF transformers.models ...]", sep="\n")
        return 0 if {"-h", "--help"} & {*arguments} else 2
    there = {path.parent.name for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py")}
    wrong = [folder for folder in arguments if folder not in there]
    if wrong:
        print(f"transformers {transformers.__version__} has no models/{wrong[0]}", file=sys.stderr)
        return 2
    print(report(arguments))
    return 0
