"""The table of docs/numerics.md: its lines are within the bound, and it is what the command makes of them."""

import json
from pathlib import Path

import pytest

from liger_ext import numerics
from liger_ext.testing import OPS

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_made_of_its_lines(capsys):
    assert numerics.main(["table", str(DOCS / "numerics.jsonl")]) == 0
    assert capsys.readouterr().out == (DOCS / "numerics.md").read_text()


def test_every_line_keeps_the_bound():
    lines = [json.loads(line) for line in (DOCS / "numerics.jsonl").read_text().splitlines()]
    assert all(0 < line["share"] <= 1 for line in lines)
    assert {line["platform"] for line in lines} >= {"CPU baseline", "CPU avx2", "CPU avx512"}
    per_platform = {}
    for line in lines:
        per_platform.setdefault(line["platform"], set()).add((line["op"], line["dtype"]))
    assert len({frozenset(cells) for cells in per_platform.values()}) == 1  # no platform leaves one out
    assert {op for op, _ in per_platform["CPU baseline"]} == {op for op in OPS if not op.endswith("_packed")}


def test_measuring(device, monkeypatch, capsys):
    monkeypatch.setattr(numerics, "SHAPES", ({"tokens": 6, "hidden": 33, "vocab": 131},))
    assert numerics.main(["measure", "--device", str(device), "--platform", "here"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 27 and {line["platform"] for line in lines} == {"here"}
    assert all(0 < line["share"] <= 1 and line["what"] for line in lines)


@pytest.mark.parametrize("share", [1.5, float("inf"), float("nan")])
def test_a_broken_bound_is_the_exit_status(share, tmp_path, capsys):
    line = {"platform": "there", "op": "rope", "dtype": "float32", "what": "dq", "share": share, "results": 1}
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert numerics.main(["table", str(file)]) == 1
    assert "| rope | float32 |" in capsys.readouterr().out


def test_lines_of_several_machines_are_columns(tmp_path, capsys):
    files = []
    for platform, share in (("one", 0.25), ("two", 0.5)):
        files.append(tmp_path / platform)
        line = {"platform": platform, "op": "rope", "dtype": "float32", "what": "dq", "share": share, "results": 1}
        files[-1].write_text(json.dumps(line) + "\n")
    assert numerics.main(["table", *map(str, files)]) == 0
    printed = capsys.readouterr().out
    assert "| op | dtype | one | two |" in printed and "| rope | float32 | 0.25 (dq) | 0.50 (dq) |" in printed
