"""Tests of the Markdown pages: links lead to tracked files, lines outside of tables and code are short, and the README
names every public op and module."""

import re
from pathlib import Path

import pytest
from cases import tracked_files

from liger_ext import functional, modules

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Public names of `functional` that are not ops.
HELPERS = {"CountedRows", "CrossEntropyOutput", "LogProbsOutput", "check_errors", "count_rows"}


def anchors(page: Path) -> set[str]:
    """Returns the anchors that a code host generates for headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def tracked() -> set[Path]:
    """Returns the tracked files and their folders."""
    files = tracked_files()
    return {*files, *(folder for file in files for folder in file.parents if ROOT in folder.parents)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page(page, tracked):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        file, _, anchor = target.partition("#")
        leads_to = (page.parent / file).resolve() if file else page
        assert leads_to in tracked, target
        assert not anchor or anchor in anchors(leads_to), target
    long = [line for line in text.splitlines() if len(line) > 160 and not line.startswith("|")]
    assert not long


def test_the_readme_is_one_page_and_names_every_op():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 130
    ops = {name.removesuffix("_packed") for name in functional.__all__} - HELPERS
    assert {name for name in {*ops, *modules.__all__} if f"`{name}`" not in text} == set()
