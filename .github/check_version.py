"""Compares the version in pyproject.toml, CITATION.cff and the newest heading of CHANGELOG.md.

``python3 .github/check_version.py`` works for any commit. With the tag of a release (``v0.1.0``) it also compares the
tag, and the dates of changelog and citation. It prints a line for each disagreement, and exits with 1 if there is one.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "CITATION.cff": r"^version: (\S+)$",
    "CHANGELOG.md": r"^## (\S+)",
}
DATES = {"CITATION.cff": r"^date-released: (\S+)$", "CHANGELOG.md": r"^## \S+ \((\d{4}-\d\d-\d\d)\)$"}


def read(places: dict[str, str], root: Path) -> dict[str, str | None]:
    """Returns the first match of each file's pattern."""
    found = {file: re.search(pattern, (root / file).read_text(), re.MULTILINE) for file, pattern in places.items()}
    return {file: match and match[1] for file, match in found.items()}


def problems(tag: str | None = None, root: Path = ROOT) -> list[str]:
    """Returns a line for each disagreement. With a release's ``tag``, compares the tag and the dates, too."""
    versions, lines = read(PLACES, root), []
    if len(set(versions.values())) > 1 or None in versions.values():
        lines.append(f"the versions differ: {versions}. Write one version into all of these files.")
    if tag is not None:
        if tag != f"v{versions['pyproject.toml']}":
            lines.append(f"the tag is {tag!r}, expected 'v{versions['pyproject.toml']}', of pyproject.toml's version.")
        dates = read(DATES, root)
        if len(set(dates.values())) > 1 or None in dates.values():
            lines.append(
                f"the release's dates are {dates}, expected one date: 'date-released: 2026-01-31' in CITATION.cff, "
                "'## <version> (2026-01-31)' in CHANGELOG.md."
            )
    return lines


if __name__ == "__main__":
    sys.exit("\n".join(problems(*sys.argv[1:2])) or None)
