"""Selection of tests: the marker slow, shares, and skips, which are compared with a table (selection.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from selection import expected_skips, other_skips, select_share

HERE = Path(__file__).parent


@pytest.mark.parametrize("parts", [1, 2, 6])
def test_each_test_is_in_one_share(parts):
    items = list(range(32))
    shares = [select_share(items, f"{part}/{parts}") for part in range(1, parts + 1)]
    assert sorted(item for share in shares for item in share) == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("share", ["0/6", "7/6", "1", "1/0", "a/b", "-1/6"])
def test_a_share_that_is_none(share):
    with pytest.raises(pytest.UsageError, match="expected I/N with I from 1 to N"):
        select_share([], share)


TABLE = """
# a comment
ci   all  reason
0    2    two words
0-1  1    needs a GPU
"""


def test_columns_of_the_table():
    assert expected_skips(TABLE, "ci") == {"two words": (0, 0), "needs a GPU": (0, 1)}
    assert expected_skips(TABLE, "all") == {"two words": (2, 2), "needs a GPU": (1, 1)}
    with pytest.raises(pytest.UsageError, match=r"--skips is 'oldest', expected one of \['ci', 'all'\]"):
        expected_skips(TABLE, "oldest")


def test_other_skips():
    expected = {"a": (1, 1), "b": (0, 2)}
    assert other_skips({"a": 1}, expected) == other_skips({"a": 1, "b": 2}, expected) == []
    assert other_skips({"b": 3, "c": 1}, expected) == [
        "0 skipped, expected 1: a",
        "3 skipped, expected 0 to 2: b",
        "1 skipped, expected 0: c",
    ]


SUITE = """
import pytest

@pytest.mark.parametrize("i", range(3))
def test_a(i):
    pytest.skip("no reason")

@pytest.mark.slow
@pytest.mark.parametrize("i", range(7))
def test_b(i):
    pass
"""


def test_a_run(tmp_path):
    """Two processes: the run selects the right tests, and fails if skips differ from the table."""
    (tmp_path / "selection.py").symlink_to(HERE / "selection.py")
    (tmp_path / "skips.txt").write_text("ci  all  reason\n3   2    no reason\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow")

    def run(*arguments):
        plugins = "-p", "xdist", "-p", "selection", "-n", "2", "--dist", "loadfile"
        command = [sys.executable, "-m", "pytest", "-q", *plugins, *arguments]
        env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    status, said = run("--skips", "ci")
    assert status == 0 and "7 passed, 3 skipped" in said, said
    status, said = run("--skips", "all", "-m", "slow", "--share", "2/3")
    assert status == 0 and "2 passed" in said, said
    status, said = run("--skips", "all", "-m", "not slow")
    assert status == 1 and "3 skipped, expected 2: no reason" in said, said
