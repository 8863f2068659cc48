"""`python -m liger_ext inspect`: equal to the summary of the loaded model, without its weights, and its errors."""

import json
import subprocess
import sys

import pytest
from family_models import build
from remote_code import write_repository
from transformers import AutoModelForCausalLM

from liger_ext import doctor, inspection
from liger_ext.inspection import Impossible

FAMILIES = ("llama", "gemma2", "phi3", "qwen3_moe", "mixtral", "bamba", "olmo3")


def inspected(capsys, *arguments: str) -> dict:
    capsys.readouterr()
    assert doctor.main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_summary_of_the_loaded_model(family, tmp_path, capsys):
    build(family).bfloat16().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto" if family != "llama" else None)
    (tmp_path / "model.safetensors").unlink()
    for source in (tmp_path, tmp_path / "config.json"):
        found = inspected(capsys, source, "--tokens", "1000")
        expected = inspection.describe(loaded)
        assert found["parts"] == json.loads(json.dumps({n: p._asdict() for n, p in expected.parts.items()}))
        (loss,) = expected.losses
        assert (found["losses"][0]["how"], found["memory"]) == (loss.how, expected.memory)
        assert found["logits_bytes_spared"] == 1000 * loaded.config.vocab_size * loaded.dtype.itemsize
    assert doctor.main(["inspect", str(tmp_path), "--tokens", "1000"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.table(1000)


def test_a_model_type_and_its_default_configuration(capsys):
    assert inspected(capsys, "llama")["parts"]["norms"] == {"ours": 65, "total": 65, "stock": {}}


@pytest.mark.parametrize("name", ["bert", "siglip", "t5"])
def test_models_without_known_code(name, capsys):
    assert not any(part["ours"] for part in inspected(capsys, name)["parts"].values())


def test_python_code_of_a_model_needs_permission(tmp_path, capsys):
    folder = write_repository(tmp_path / "model", "inspected")
    with pytest.raises(Impossible, match="--trust-remote-code runs it"):
        doctor.main(["inspect", str(folder)])
    found = inspected(capsys, folder, "--trust-remote-code")
    assert found["parts"]["norms"]["ours"] > 0


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "has no config.json"),
        ("no json", "is no JSON file"),
        ("3", "has no model_type"),
        ("[1]", "has no model_type"),
        ('{"model_type": "no such type"}', "cannot be read: "),
        ('{"model_type": "llama", "hidden_size": "wide"}', "expected int, got str"),
    ],
)
def test_what_is_wrong_gets_a_sentence(text, words, tmp_path):
    source = tmp_path
    if text is not None:
        source = tmp_path / "config.json"
        source.write_text(text)
    for given in {str(source), str(tmp_path)}:
        with pytest.raises(Impossible, match=words) as raised:
            doctor.main(["inspect", given])
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([" "], "the name of the model is empty"),
        (["./nothing"], "is no file, no folder and no model type"),
        (["nobody/nothing"], "cannot be read: "),
        (["llama", "--tokens", "0"], "--tokens is 0, expected 1 or more"),
    ],
)
def test_the_exit_status_of_an_impossible_request_is_2(arguments, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run([sys.executable, "-m", "liger_ext", "inspect", *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("liger_ext inspect: ") and words in last and "Traceback" not in done.stderr
