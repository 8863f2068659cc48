"""Tests of the whole demo, on a model that trains in seconds, and of its comparison of loss curves."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples.demo import __main__ as demo
from examples.demo import data, memory, models, report, training

ROOT = Path(__file__).parent.parent
TINY = ["--model", "random:tiny", "--device", "cpu", "--steps", "9"]


@pytest.fixture
def no_memory_measurement(monkeypatch):
    """Skips the measurement of memory, which starts processes."""
    monkeypatch.setattr(memory, "measure_apart", lambda *_: None)


def check_outputs(out: Path, printed: str) -> dict:
    for line in ("time of a step", "tokens per second", "peak memory of the loss", "loss curves agree"):
        assert line in printed
    assert (out / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    numbers = json.loads((out / "demo.json").read_text())
    plain, patched = (numbers["losses"][name] for name in (training.UNPATCHED, training.PATCHED))
    assert len(plain) == len(patched) == 9
    # The last step repeats the first step's batch, and its loss must be lower: flat curves would agree, too.
    assert plain[-1] < plain[0] - 0.01 and patched[-1] < patched[0] - 0.01
    return numbers


def test_command_prints_the_table_and_writes_picture_and_numbers(tmp_path):
    command = [sys.executable, "-m", "examples.demo", *TINY, "--dtype", "fp32", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = check_outputs(tmp_path, done.stdout)
    phases = (
        "importing torch and transformers",
        "loading the model and the text",
        f"measuring peak memory: {training.UNPATCHED}",
        f"measuring peak memory: {training.PATCHED}",
        "training with and without liger_ext",
        "step 2 of 9",
        "step 9 of 9",
        "time of a step",
    )
    assert done.stdout.startswith(phases[0])
    places = [done.stdout.find(phase) for phase in phases]
    assert -1 not in places and places == sorted(places), done.stdout
    for measured in numbers["table"]["peak memory of the loss, MiB"].values():
        assert measured > 0


def test_bf16(tmp_path, capsys, no_memory_measurement):
    assert demo.main([*TINY, "--dtype", "bf16", "--out", str(tmp_path)]) == 0
    losses = check_outputs(tmp_path, capsys.readouterr().out)["losses"]
    # The patched model rounds differently: equal bits would mean that nothing was patched.
    assert losses[training.UNPATCHED] != losses[training.PATCHED]


@pytest.mark.slow
def test_loss_memory_is_measured_and_smaller_with_the_patch(tmp_path):
    config, _, _ = models.load("random:tiny")
    config.vocab_size = 32768
    args = demo.parse([*TINY, "--batch", "4", "--seq", "512", "--dtype", "fp32"])
    plan = models.make_plan(args, config)
    plain, patched = (
        memory.measure_apart(name, config, plan)["loss"] for name in (training.UNPATCHED, training.PATCHED)
    )
    logits = 4 * 512 * 32768 * 4
    assert plain > 1.9 * logits  # at least the logits and their gradient
    assert patched < 0.75 * plain


def test_the_level_of_memory(monkeypatch):
    """The level applies to the model that trains, and to the one whose memory is measured."""
    config, build, _ = models.load("random:tiny")
    plan = models.make_plan(demo.parse([*TINY, "--memory", "low"]), config)
    requests = []

    def run(command, **_):
        requests.append(json.loads(command[-1]))
        return subprocess.CompletedProcess(command, 0, "{}")

    monkeypatch.setattr(memory.subprocess, "run", run)
    for name in (training.UNPATCHED, training.PATCHED):
        memory.measure_apart(name, config, plan)
    assert [request["level"] for request in requests] == [None, "low"]
    _, patched = training.make_runs(build, plan)
    assert patched.model.liger_memory == "low"


def curves(patched: list[float], dtype: torch.dtype = torch.float32):
    return report.agreement([5.0, 4.0, 3.0], patched, dtype)


def test_agreement_names_the_worst_step():
    agreed = curves([5.0, 4.00001, 3.0])
    assert agreed.holds and agreed.step == 2 and agreed.difference == pytest.approx(1e-5)
    assert not curves([5.0, 4.0, 3.01]).holds
    assert curves([5.0, 4.0, 3.01], torch.bfloat16).holds
    assert not curves([5.0, 4.0, 3.1], torch.bfloat16).holds


def test_agreement_does_not_hold_for_nan():
    agreed = curves([5.0, math.nan, 3.0])
    assert not agreed.holds and agreed.step == 2


def test_a_wrong_implementation_ends_with_status_1_and_says_so(tmp_path, monkeypatch, capsys, no_memory_measurement):
    def broken(model, memory):
        torch.nn.init.constant_(model.model.norm.weight, 1.02)

    monkeypatch.setattr(training, "patch", broken)
    assert demo.main([*TINY, "--dtype", "fp32", "--out", str(tmp_path)]) == 1
    assert "do not agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "random:none"], "named shapes are"),
        (["--model", "/nowhere"], "neither a folder nor"),
        (["--text", "/nowhere"], "nowhere"),
    ],
)
def test_requests_that_cannot_run_end_with_status_2(tmp_path, capsys, arguments, message):
    assert demo.main([*TINY, "--out", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().out


def test_runs_one_after_the_other_give_the_same_losses(tmp_path):
    """If two models do not fit into memory, the runs follow each other, with the same data, order and losses."""
    args = demo.parse([*TINY, "--dtype", "fp32"])
    config, build, encode = models.load(args.model)
    plan = models.make_plan(args, config)
    assert plan.together
    batches = data.batches(encode, 2, plan.batch, plan.seq, None)
    losses = []
    for together in (True, False):
        plan.together = together
        runs = training.make_runs(build, plan)
        assert [run.name for run in training.train(runs, batches, plan)].count(training.PATCHED) == plan.steps
        losses.append([run.losses for run in runs])
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(models.PRETRAINED) is None, reason="`make test` installs the model")
def test_the_pretrained_model(tmp_path, no_memory_measurement):
    arguments = [
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--steps",
        "2",
        "--batch",
        "1",
        "--seq",
        "64",
        "--out",
        str(tmp_path),
    ]
    assert demo.main(arguments) == 0
    losses = json.loads((tmp_path / "demo.json").read_text())["losses"]
    for name in (training.UNPATCHED, training.PATCHED):
        assert (
            losses[name][0] < 5
        )  # an untrained model has log(49152) = 10.8, so this has the real weights and tokenizer
