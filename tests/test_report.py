"""The command `python -m liger_ext.models.recognise`: its report on unknown code, the entries that it drafts, and its
errors for wrong arguments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from llama_models import TRANSFORMERS
from mutations import find_class

import liger_ext
from liger_ext.models.recognise import known, report

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code")


@pytest.fixture
def without(monkeypatch):
    """Removes a class's entries from the table."""

    def take(example):
        left = tuple(entry for entry in known.entries() if entry.example != example)
        for module in (known, report):
            monkeypatch.setattr(module, "entries", lambda: left)
        monkeypatch.setattr(known, "by_digest", lambda: {(entry.part, entry.digest): entry for entry in left})
        report._examples.cache_clear()

    yield take
    report._examples.cache_clear()


def described(path):
    seen = {each.path: each for each in report.look([path.partition(".")[0]])}
    *lines, entry = report._describe(seen[path], list(seen.values()))
    return "\n".join(lines), json.loads(entry)


def test_a_head_has_a_draft(without):
    """With any other files in its folder, and any ending of its name."""
    without("ernie4_5_vl_moe.Ernie4_5_VLMoeForConditionalGeneration")
    text, entry = described("ernie4_5_vl_moe.Ernie4_5_VLMoeForConditionalGeneration")
    assert "+    output_router_logits = " in text and entry["replacement"].startswith("causal_lm.Moe")
    assert (entry["part"], entry["digest"]) == ("head", "b326230505466f45")


def test_methods_are_compared(without):
    """Qwen 4's norm differs from others in `_norm`, which its `forward` calls."""
    without("qwen4_exp.Qwen4ExpTextRMSNorm")
    text, _ = described("qwen4_exp.Qwen4ExpTextRMSNorm")
    cls = find_class("qwen4_exp.Qwen4ExpTextRMSNorm")
    assert "def _norm" in report._text(cls) and "    +" in text


@pytest.mark.parametrize(
    "path, attributes",
    [
        ("granitemoeshared.GraniteMoeSharedMLP", "GATE_UP ACTIVATION DOWN"),  # in the same positions
        ("bitnet.BitNetMLP", "DOWN ffn_sub_norm ACTIVATION GATE UP"),  # by their names, and one name that no entry has
    ],
)
def test_attributes_of_a_draft(without, path, attributes):
    without(path)
    assert described(path)[1]["attributes"] == attributes


@pytest.mark.parametrize(
    "arguments, code, output",
    [
        (["lama"], 2, "no models/lama"),
        (["llama", ""], 2, "no models/"),
        (["llama/"], 2, "no models/llama/"),
        (["llama.LlamaMLP"], 2, "no models/llama.LlamaMLP"),
        (["__init__.py"], 2, "no models/__init__.py"),
        (["--all"], 2, "usage"),
        (["-h"], 0, "usage"),
    ],
)
def test_wrong_arguments(capsys, arguments, code, output):
    assert report.main(arguments) == code
    printed = capsys.readouterr()
    assert output in (printed.out if code == 0 else printed.out + printed.err)


def test_from_the_command_line():
    root = str(Path(liger_ext.__file__).parent.parent)
    command = [sys.executable, "-W", "ignore", "-m", "liger_ext.models.recognise", "mixtral"]
    env = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert "mixtral: " in done.stdout
