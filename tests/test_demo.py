"""Tests of the whole demo, on a model that trains in seconds. tests/test_compare.py tests its engine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.demo import __main__ as demo
from examples.demo import models
from liger_ext.comparison.sides import OURS, STOCK

ROOT = Path(__file__).parent.parent
TINY = ["--model", "random:tiny", "--device", "cpu", "--steps", "9"]


def test_command_prints_the_table_and_writes_picture_and_numbers(tmp_path):
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "examples.demo", *TINY, "--dtype", "bf16", "--out", str(out)]
    environment = os.environ | {"TMPDIR": str(scratch)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    phases = (
        "importing torch and transformers",
        "loading the model and the text",
        "training with and without liger_ext: 9 steps, bf16",
        f"{STOCK}  building the model",
        f"{OURS}     building the model",
        "step 4 of 9",
        "step 9 of 9",
        "time of a step, median, ms",
        "tokens per second",
        "peak memory of the loss, MiB",
        "peak memory of a step, MiB",
        "loss, first step",
        "loss, last step",
        "The loss curves agree.",
    )
    assert done.stdout.startswith(phases[0])
    places = [done.stdout.find(phase) for phase in phases]
    assert -1 not in places and places == sorted(places), done.stdout
    assert not list(scratch.iterdir())  # batches and configuration are removed
    assert (out / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (measured,) = json.loads((out / "demo.json").read_text())["measured"].values()
    stock, ours = (measured[name]["losses"] for name in (STOCK, OURS))
    assert stock != ours  # the patched model rounds differently: equal bits would mean that nothing was patched
    # The last step repeats the first step's batch, and its loss must be lower: flat curves would agree, too.
    assert len(stock) == len(ours) == 9 and stock[-1] < stock[0] - 0.01 and ours[-1] < ours[0] - 0.01
    assert all(side["loss_bytes"] > 0 for side in measured.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "random:none"], "named shapes are"),
        (["--model", "/nowhere"], "neither a folder nor"),
        (["--text", "/nowhere"], "nowhere"),
        (["--device", "nowhere"], "--device is nowhere"),
        (["--seq", "1"], "--seq is 1, expected 2 or more"),
    ],
)
def test_requests_that_cannot_run_end_with_status_2(tmp_path, capsys, arguments, message):
    assert demo.main([*TINY, "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(models.PRETRAINED) is None, reason="`make test` installs the model")
def test_the_pretrained_model(tmp_path):
    arguments = ["--device", "cpu", "--dtype", "fp32", "--steps", "2", "--batch", "1", "--seq", "64", "--out"]
    assert demo.main([*arguments, str(tmp_path)]) == 0
    (measured,) = json.loads((tmp_path / "demo.json").read_text())["measured"].values()
    for side in measured.values():  # an untrained model has log(49152) = 10.8: these are the real weights and tokens
        assert side["losses"][0] < 5
