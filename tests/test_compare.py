"""`python -m liger_ext compare`, and the engine that it shares with the demo: processes, curves, tables, requests that
cannot run."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from family_models import build

from examples.demo import __main__ as demo
from liger_ext import compare, doctor
from liger_ext.comparison import child, report, sides
from liger_ext.inspection import Failed, Impossible, read_config

LARGE = dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=4, vocab_size=4096)


def folder(tmp_path, **sizes) -> str:
    config = {**dict(model_type="llama", hidden_size=64, intermediate_size=96, num_attention_heads=2), **sizes}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512, "num_hidden_layers": 2, **config}))
    return str(tmp_path)


def compared(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert doctor.main(["compare", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_both_sides_train_the_same_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "STEPS", 3)
    found = compared(capsys, folder(tmp_path), "--layers", "1", "--seq", "32", "--device", "cpu")
    stock, ours = found["measured"]["1"].values()
    assert len(stock["losses"]) == compare.WARM_UP + 3 and stock["model"] == "LlamaForCausalLM"
    assert stock["losses"] != ours["losses"]  # other roundings: the second side is patched
    assert found["agreement"]["1"]["holds"] and stock["losses"][4] < stock["losses"][0]  # the first batch, again
    assert all(side["time"]["low"] <= side["time"]["median"] and side["peak_bytes"] > 0 for side in (stock, ours))
    assert len(stock["seconds"]) == len(stock["losses"])
    text = report.heading(found | {"until": 120}, 1)
    assert "1 of 2 layers (so that this ends in about 120 s; --layers 2 trains all)" in text


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(model_type="llama"), dict(model_type="gemma2", head_dim=64)], ids=str)
def test_memory_of_all_layers_is_extrapolated(sizes, device, tmp_path, capsys, monkeypatch):
    """On a CPU the resident set also has memory that other threads and libraries keep."""
    monkeypatch.setattr(compare, "STEPS", 2)
    source = folder(tmp_path, **LARGE, **sizes)
    options = source, "--seq", "512", "--device", device.type
    guess = compared(capsys, *options, "--layers", "2,4")["extrapolated"]
    exact = compared(capsys, *options, "--layers", "10")["measured"]["10"]
    for side in (compare.STOCK, compare.OURS):
        assert guess[side]["peak_bytes"] == pytest.approx(
            exact[side]["peak_bytes"], rel=0.05 if device.type == "cuda" else 0.15
        )


@pytest.mark.slow
def test_by_default_it_trains_as_many_layers_as_the_time_allows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "LIMIT", 20)
    found = compared(capsys, folder(tmp_path, num_hidden_layers=400), "--seq", "32", "--lora", "2")
    (depth,) = map(int, found["measured"])
    assert 2 <= depth < 400 and found["until"] == 20


def test_lists_of_layers_are_cut(tmp_path):
    build("gemma2").config.save_pretrained(tmp_path)
    config = read_config(str(tmp_path), False)
    child.cut_layers(config, 1)
    assert config.num_hidden_layers == len(config.layer_types) == 1


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--layers", "3"], "--layers is 3, expected one or two rising numbers from 1 to 2"),
        (["--layers", "2,1"], "--layers is 2,1"),
        (["--layers", "one"], "--layers is one"),
        (["--batch", "0"], "--batch is 0, expected 1 or more"),
        (["--lora", "0"], "--lora is 0"),
        (["--device", "meta"], "--device is meta, expected cpu"),
        (["--device", "nowhere"], "--device is nowhere, expected cpu, cuda or cuda:N"),
        (["--layers", "1", "--device", "cpu", "--batch", "100000000"], "too little memory for 1 layers"),
    ],
)
def test_what_cannot_run_gets_a_sentence(arguments, words, tmp_path):
    with pytest.raises(Impossible, match=words) as raised:
        doctor.main(["compare", folder(tmp_path), *arguments])
    assert "\n" not in str(raised.value)


def test_failures_of_a_side(tmp_path, monkeypatch):
    """A side fails at its start, or, as the other side waits, in a step; no process stays."""
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(sides.subprocess, "Popen", lambda *a, **o: started.append(popen(*a, **o)) or started[-1])
    step = "from liger_ext.comparison import child; child.Trainee.step = lambda self: 1 / 0; child.main()"
    killed = "import os; os.kill(os.getpid(), 9)"
    for code, error, words in ((step, Failed, "ZeroDivisionError"), (killed, Impossible, "too little memory for 1 la")):
        monkeypatch.setattr(sides, "COMMAND", [sys.executable, "-c", code])
        with pytest.raises(error, match=words):
            doctor.main(["compare", folder(tmp_path), "--layers", "1", "--device", "cpu"])
    assert len(started) == 4 and all(process.poll() is not None for process in started)


def test_an_interrupt_ends_the_children(tmp_path):
    command = [sys.executable, "-m", "liger_ext", "compare", folder(tmp_path), "--layers", "1", "--seq", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children: list[str] = []
    while len(children) < 2 and process.poll() is None:
        time.sleep(0.2)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        children = listed.stdout.split()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert len(children) == 2 and not any(os.path.exists(f"/proc/{child}") for child in children)


# The engine -----------------------------------------------------------------------------------------------------------


class Inside(sides.Side):
    """A side in the process of the tests, which needs a fraction of a new process's time."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.trainee = None

    def ask(self, question=None):
        if question == "step":
            return self.trainee.step()
        self.trainee = question and child.Trainee(question)
        return question and self.trainee.facts


@pytest.fixture
def sides_inside(monkeypatch):
    monkeypatch.setattr(sides, "Side", Inside)


def request(tmp_path, **changes) -> dict:
    sizes = dict(batch=2, seq=32, steps=6, device="cpu", device_name="here", dtype="fp32", learning_rate=1e-3)
    return compare.DEFAULTS | sizes | dict(source=folder(tmp_path), depth=2, level="auto") | changes


@pytest.mark.usefixtures("sides_inside")
def test_sides_that_do_not_fit_together_follow_each_other(tmp_path, monkeypatch):
    """The order of the steps, and the same losses in both orders."""
    losses = []
    for room, order in ((True, "HHH lll Hl lH Hl"), (False, "HHHHHH llllll")):
        monkeypatch.setattr(sides.Side, "leaves_room", lambda side, room=room: room)
        taken: list[str] = []
        show = lambda side, taken=taken: taken.append(side.name[0] if side.losses else "")  # noqa: E731
        found = sides.train(request(tmp_path), (sides.STOCK, sides.OURS), show)
        assert "".join(taken) == order.replace(" ", "")
        losses.append([side["losses"] for side in found.values()])
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_the_level_of_memory(tmp_path):
    found = request(tmp_path, level="low")
    assert child.Trainee(found).trained.liger_memory == "low"
    assert not hasattr(child.Trainee(found | {"level": None}).trained, "liger_memory")


@pytest.mark.slow
def test_loss_memory_is_measured_and_smaller_with_the_patch(tmp_path):
    found = request(tmp_path, loss=True, batch=4, seq=512, steps=1)
    folder(tmp_path, vocab_size=32768)
    trained = sides.train(found, (sides.STOCK, sides.OURS), lambda side: None)
    stock, ours = (trained[name]["loss_bytes"] for name in (sides.STOCK, sides.OURS))
    assert stock > 1.9 * 4 * 512 * 32768 * 4  # at least the logits and their gradient
    assert ours < 0.75 * stock


@pytest.mark.parametrize(
    "ours, dtype, holds",
    [
        ([5.0, 4.00001, 3.0], torch.float32, True),
        ([5.0, 4.01, 3.0], torch.float32, False),
        ([5.0, 4.01, 3.0], torch.bfloat16, True),
        ([5.0, 4.1, 3.0], torch.bfloat16, False),
        ([5.0, math.nan, 3.0], torch.float32, False),
    ],
)
def test_agreement_names_the_worst_step(ours, dtype, holds):
    agreed = report.agreement([5.0, 4.0, 3.0], ours, dtype)
    assert agreed["holds"] == holds and agreed["step"] == 2
    assert math.isnan(ours[1]) or agreed["difference"] == pytest.approx(ours[1] - 4)


@pytest.mark.usefixtures("sides_inside")
@pytest.mark.parametrize(
    "command, dtype, status", [("compare", "fp32", 1), ("compare", "bf16", 0), ("demo", "bf16", 1)]
)
def test_a_wrong_patch(command, dtype, status, tmp_path, monkeypatch, capsys):
    """In bf16 rounding may change the experts of a token: then `compare`, which takes any model, only advises."""
    wrong = lambda model, memory: torch.nn.init.constant_(model.model.norm.weight, 2.0)  # noqa: E731
    monkeypatch.setattr(child, "apply_liger_kernel_to_instance", wrong)
    options = ["--seq", "16", "--device", "cpu", "--dtype", dtype]
    if command == "demo":
        found = demo.main(["--model", "random:tiny", "--steps", "9", "--out", str(tmp_path), *options])
    else:
        found = doctor.main([command, folder(tmp_path), "--layers", "1", *options])
    printed = capsys.readouterr().out
    assert found == status and "do not agree" in printed
    assert ("Please report" if status else "--dtype fp32 decides") in printed


@pytest.mark.usefixtures("sides_inside")
@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal(rich, tmp_path, monkeypatch, capsys):
    """With rich: bars on stderr and a table with lines; without rich the text of a pipe. Without matplotlib: numbers,
    and a hint."""
    monkeypatch.setattr(report, "find_spec", lambda name: rich if name == "rich" else None)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    out = tmp_path / "out"
    command = ["compare", folder(tmp_path), "--layers", "1,2", "--seq", "16", "--device", "cpu", "--out", str(out)]
    assert doctor.main(command) == 0
    printed, errors = capsys.readouterr()
    assert ("━" in printed) == ("━" in errors) == rich and "all 2 layers, extrapolated" in printed
    assert "time of a step, median, ms" in printed and "install matplotlib to draw one" in printed
    assert list(out.iterdir()) == [out / "compare.json"]
    assert json.loads((out / "compare.json").read_text())["agreement"]["2"]["holds"]
