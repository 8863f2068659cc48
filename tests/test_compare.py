"""`python -m liger_ext compare`: both sides train the same model, memory is extrapolated; requests that cannot run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from family_models import build

from liger_ext import compare, doctor
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
    source = folder(tmp_path)
    found = compared(capsys, source, "--layers", "1", "--seq", "32", "--device", "cpu")
    stock, ours = found["measured"]["1"].values()
    assert len(stock["losses"]) == compare.WARM_UP + 3 and stock["model"] == "LlamaForCausalLM"
    assert max(abs(a - b) for a, b in zip(stock["losses"], ours["losses"], strict=True)) < 1e-4
    assert stock["losses"] != ours["losses"]  # other roundings: the second side is patched
    assert all(side["time"]["low"] <= side["time"]["median"] and side["peak_bytes"] > 0 for side in (stock, ours))
    text = compare._table({**found, "measured": {1: found["measured"]["1"]}}, True)
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
    assert 2 <= depth < 400


def test_lists_of_layers_are_cut(tmp_path):
    build("gemma2").config.save_pretrained(tmp_path)
    config = read_config(str(tmp_path), False)
    compare.cut_layers(config, 1)
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
    ],
)
def test_what_cannot_run_gets_a_sentence(arguments, words, tmp_path):
    with pytest.raises(Impossible, match=words) as raised:
        doctor.main(["compare", folder(tmp_path), *arguments])
    assert "\n" not in str(raised.value)


def test_failures_of_a_side(tmp_path, monkeypatch):
    source = folder(tmp_path)
    request = ["compare", source, "--layers", "1", "--device", "cpu"]
    for code, error in (("raise TypeError('no')", Failed), ("import os; os.kill(os.getpid(), 9)", Impossible)):
        child = [sys.executable, "-c", code]
        monkeypatch.setattr(compare.subprocess, "Popen", lambda *_, popen=subprocess.Popen, c=child, **o: popen(c, **o))
        with pytest.raises(error, match="TypeError: no" if error is Failed else "too little memory for 1 layers"):
            doctor.main(request)
        monkeypatch.undo()


def test_an_interrupt_ends_the_child(tmp_path):
    command = [sys.executable, "-m", "liger_ext", "compare", folder(tmp_path), "--layers", "1", "--seq", "2048"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children: list[str] = []
    while not children and process.poll() is None:
        time.sleep(0.2)
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        children = listed.stdout.split()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert children and not any(os.path.exists(f"/proc/{child}") for child in children)
