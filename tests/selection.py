"""A pytest plugin that selects the tests to run and distributes them over processes.

``make test`` excludes the tests marked ``slow``. ``--share 2/8`` runs every eighth of the selected tests, from the
second on: CI runs one share of the slow tests, chosen by the number of commits. ``--skips ci`` compares the skips of a
run with the column ``ci`` of skips.txt, so that no test disappears unnoticed.

With ``-n`` and ``--dist loadfile`` the tests of a file share one process, which creates their fixtures once. Files with
slow tests start first, so that no long file runs alone at the end. The tests of the files in APART are distributed one
by one.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

SKIPS = Path(__file__).parent / "skips.txt"
EXPECTED, OTHER = pytest.StashKey(), pytest.StashKey()  # skips
APART = ("tests/test_host_target.py",)  # its tests take minutes and share no fixtures


def pytest_configure(config):
    """Checks the options before the first test."""
    if share := config.getoption("share"):
        select_share([], share)
    if column := config.getoption("skips"):
        config.stash[EXPECTED] = expected_skips(SKIPS.read_text(), column)


def pytest_addoption(parser):
    parser.addoption("--share", help="I/N: of the selected tests, each N-th, from the I-th on")
    parser.addoption("--skips", help="a column of tests/skips.txt: how often each reason for a skip is expected")


@pytest.hookimpl(trylast=True)  # behind -m, -k and conftest.py
def pytest_collection_modifyitems(config, items):
    if share := config.getoption("share"):
        keep(select_share(items, share), items, config)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def keep(runs, items, config):
    """Deselects the collected ``items`` that are not in ``runs``."""
    chosen = set(runs)
    if left_out := [item for item in items if item not in chosen]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = runs


def select_share(items, share):
    found = re.fullmatch(r"(\d+)/(\d+)", share)
    part, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--share is {share!r}, expected I/N with I from 1 to N")
    return items[part - 1 :: parts]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return nodeid if file in APART else file

    config.option.loadscopereorder = False  # it sorts by the number of tests, which is not their duration
    return Scheduler(config, log)


def expected_skips(text, column):
    """Reads a column of a table like skips.txt: {reason: (fewest, most) skips}."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = lines[0].split()[:-1]
    if column not in names:
        raise pytest.UsageError(f"--skips is {column!r}, expected one of {names}")
    rows = [line.split(maxsplit=len(names)) for line in lines[1:]]
    return {row[-1]: tuple(map(int, (row[names.index(column)].split("-") * 2)[:2])) for row in rows}


def other_skips(found, expected):
    """Returns a line for each reason whose count in ``found``, {reason: count}, is not within ``expected``."""
    lines = []
    for reason in sorted(found.keys() | expected.keys()):
        count, (fewest, most) = found.get(reason, 0), expected.get(reason, (0, 0))
        if not fewest <= count <= most:
            lines.append(f"{count} skipped, expected {fewest if fewest == most else f'{fewest} to {most}'}: {reason}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Fails a run whose skips differ from the column, or a share with more skips. Workers skip the check: the main
    process receives their reports."""
    config = session.config
    expected = config.stash.get(EXPECTED, None)
    if expected is None or hasattr(config, "workerinput"):
        return
    if config.getoption("share"):
        expected = {reason: (0, most) for reason, (_, most) in expected.items()}
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", []))
    config.stash[OTHER] = lines = other_skips(reasons, expected)
    if lines and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if lines := config.stash.get(OTHER, []):
        terminalreporter.section(
            f"skips that differ from tests/skips.txt, {config.getoption('skips')}", sep="=", red=True
        )
        terminalreporter.write_line("\n".join(lines))
