"""examples/train_distributed.py: the same losses on any number of processes, and after one of them was killed."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from llama_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
OPTIONS = ["--steps", "16", "--batch", "4", "--seq", "32", "--lr", "1e-3", "--log-every", "1", "--save-every", "2"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A small Llama with a tokenizer, and a text: this project's own documents."""
    folder = tmp_path_factory.mktemp("model")
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob("*.md")))
    (folder / "text.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<s>"], show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    build(tie_word_embeddings=True).save_pretrained(folder)
    return folder


def start(material, output, processes, *options):
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [ROOT / "examples/train_distributed.py", material, material / "text.txt", "--output", output]
    command = [sys.executable, *launch, *script, *OPTIONS, *options]
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def losses(said):
    """By step; a step that was made again counts as it was the last time."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/\d+: loss ([\d.]+)", said)}


def finish(process):
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def alone(material, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    return losses(finish(start(material, output, 1))), output


def assert_same_curve(found, expected):
    assert found.keys() == expected.keys() == set(range(1, 17))
    torch.testing.assert_close(list(found.values()), list(expected.values()), rtol=1e-4, atol=1e-4)


def test_it_learns_and_saves(material, alone):
    found, output = alone
    assert found[16] < found[1] - 0.5
    model, before = AutoModelForCausalLM.from_pretrained(output), AutoModelForCausalLM.from_pretrained(material)
    assert not torch.equal(model.model.norm.weight, before.model.norm.weight)


def test_four_processes_give_the_losses_of_one(material, alone, tmp_path):
    assert_same_curve(losses(finish(start(material, tmp_path, 4))), alone[0])


def test_a_process_is_killed(material, alone, tmp_path):
    """torchrun ends the others; started again, they go on from the newest checkpoint, and end on the same curve."""
    process = start(material, tmp_path, 2)
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith("step 5/"):
            break
    workers = [
        p
        for p in psutil.Process(process.pid).children(recursive=True)
        if "train_distributed.py" in " ".join(p.cmdline())
    ]
    with contextlib.suppress(psutil.NoSuchProcess):
        workers[-1].kill()
    process.communicate(timeout=120)
    assert process.returncode != 0
    rest = finish(start(material, tmp_path, 2))
    assert re.search(r"resumed after step \d*[02468]\n", rest), said + rest
    assert_same_curve(losses(said + rest), alone[0])


def test_another_number_of_processes_goes_on(material, alone, tmp_path):
    finish(start(material, tmp_path, 2, "--steps", "8"))
    rest = finish(start(material, tmp_path, 1))
    assert "resumed after step 8" in rest
    assert_same_curve({**{step: alone[0][step] for step in range(1, 9)}, **losses(rest)}, alone[0])


@pytest.mark.parametrize(
    "options, words",
    [(["--batch", "3"], "--batch 3 cannot be shared"), (["--seq", "99999999"], "fewer than one sequence")],
)
def test_bad_settings(material, tmp_path, options, words):
    process = start(material, tmp_path, 2, *options)
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0 and words in said
