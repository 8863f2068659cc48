"""The table of docs/numerics.md: its lines are within the bound, and the command generates it from them."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from liger_ext import numerics
from liger_ext.testing import OPS

DOCS = Path(__file__).parent.parent / "docs"
PLATFORMS = {"CPU baseline", "CPU avx2", "CPU avx512", "H200", "generic PTX", "host wave32", "host wave64"}
PLATFORMS |= {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"}


def test_the_page_is_made_of_its_lines(tmp_path):
    copy = tmp_path / "numerics.jsonl"
    shutil.copy(DOCS / "numerics.jsonl", copy)
    assert numerics.main(["join", str(copy)]) == 0
    assert copy.with_suffix(".md").read_text() == (DOCS / "numerics.md").read_text()
    assert copy.read_text() == (DOCS / "numerics.jsonl").read_text()


def test_every_line_keeps_the_bound():
    lines = [json.loads(line) for line in (DOCS / "numerics.jsonl").read_text().splitlines()]
    assert all(0 < line["share"] <= 1 for line in lines)
    assert not any(map(numerics.exceeds_bound, lines))
    assert {line["platform"] for line in lines} >= PLATFORMS
    per_platform = {}
    for line in lines:
        per_platform.setdefault(line["platform"], set()).add((line["op"], line["dtype"]))
    assert len({frozenset(cells) for cells in per_platform.values()}) == 1  # every platform has all ops
    assert {op for op, _ in per_platform["CPU baseline"]} == {op for op, record in OPS.items() if record.kernels == op}


def test_measuring(device, monkeypatch, capsys):
    monkeypatch.setattr(numerics, "SHAPES", ({"tokens": 6, "hidden": 33, "vocab": 131},))
    assert numerics.main(["measure", "--device", str(device), "--platform", "here"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3 * len({record.kernels for record in OPS.values()}) and {
        line["platform"] for line in lines
    } == {"here"}
    assert all(0 < line["share"] <= 1 and line["what"] for line in lines)


@pytest.fixture
def write_line(tmp_path):
    def write(platform, share, **more):
        file = tmp_path / f"{platform}.jsonl"
        line = {"platform": platform, "op": "rope", "dtype": "float32", "what": "dq", "share": share, "results": 1}
        file.write_text(json.dumps(line | more) + "\n")
        return str(file)

    return write


@pytest.mark.parametrize(
    "line", [{"share": 1.5}, {"share": float("inf")}, {"share": float("nan")}, {"share": 0.5, "wrong": 1}]
)
def test_what_is_broken_is_the_exit_status(line, write_line, tmp_path):
    all_lines = tmp_path / "all.jsonl"
    assert numerics.main(["join", str(all_lines), write_line("there", **line)]) == 1
    assert "| rope | float32 |" in all_lines.with_suffix(".md").read_text()


def test_lines_of_several_machines_are_columns(write_line, tmp_path):
    all_lines = tmp_path / "all.jsonl"
    assert numerics.main(["join", str(all_lines), write_line("one", 0.25), write_line("two", 0.5)]) == 0
    page = all_lines.with_suffix(".md").read_text()
    assert "| op | dtype | one | two |" in page and "| rope | float32 | 0.25 (dq) | 0.50 (dq) |" in page
    # A repeated measurement replaces the old line.
    assert numerics.main(["join", str(all_lines), write_line("one", 0.75)]) == 0
    assert "| rope | float32 | 0.75 (dq) | 0.50 (dq) |" in all_lines.with_suffix(".md").read_text()
    assert len(all_lines.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("folder", "variable", "expected"),
    [
        ("lib/host", "LIGER_EXT_HOST_WARP", [("host wave32", "32"), ("host wave64", "64")]),
        ("lib", "LIGER_EXT_CPU_ISA", [("CPU baseline", "baseline"), ("CPU avx2", "avx2")]),
    ],
)
def test_one_process_for_each_variant_of_the_kernels(folder, variable, expected, monkeypatch):
    """Each warp width of the host target; each instruction set of a CPU that has no AVX-512."""
    started = []

    def run(command, env, **_):
        started.append((command[-2:], env[variable]))
        return subprocess.CompletedProcess(command, 1, stdout='{"platform": "x"}\n')

    monkeypatch.setattr(numerics._load, "library_folder", lambda: Path(folder))
    monkeypatch.setattr(numerics, "cpu_isa", lambda: "avx2")
    monkeypatch.setattr(numerics.subprocess, "run", run)
    assert len(list(numerics._measure_each(small=False))) == 2
    assert started == [(["--platform", platform], value) for platform, value in expected]
