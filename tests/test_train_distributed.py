"""examples/train_distributed.py: equal losses on any number of processes, and after one of them was killed."""

import contextlib
import importlib
import io
import math
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from llama_models import build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples/train_distributed.py"
OPTIONS = ["--steps", "16", "--batch", "4", "--seq", "32", "--lr", "1e-3", "--log-every", "1", "--save-every", "2"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A small Llama, its tokenizer, and a text: this project's documents."""
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


def start(processes, *arguments):
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launch, SCRIPT, *arguments]
    return subprocess.Popen(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def text_arguments(material, output):
    return [material, material / "text.txt", "--output", output, *OPTIONS]


def losses(printed):
    """{step: loss}; of a repeated step, the last one."""
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+)/\d+: loss ([\d.]+)", printed)}


def finish(process):
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    return printed


@pytest.fixture(scope="module")
def script():
    """Loads the example as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("train_distributed")


def run_here(script, *arguments):
    """Runs it on the CPU in this process, which saves the start of another process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(sys, "argv", ["train_distributed.py", *map(str, arguments)])
        script.main()
    return printed.getvalue()


@pytest.fixture(scope="module")
def alone(material, script, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone")
    return losses(run_here(script, *text_arguments(material, output))), output


def assert_same_curve(found, expected):
    assert found.keys() == expected.keys() == set(range(1, 17))
    torch.testing.assert_close(list(found.values()), list(expected.values()), rtol=1e-4, atol=1e-4)


def test_it_learns_and_saves(material, script, alone):
    found, output = alone
    _, encode = script.config_and_tokenizer(str(material))
    windows = torch.cat(script.batches(encode, script.WINDOWS, 1, 32, material / "text.txt"))
    ids = windows[torch.randint(len(windows), (4,), generator=torch.Generator().manual_seed(1))]
    loss = AutoModelForCausalLM.from_pretrained(material)(input_ids=ids, labels=ids).loss
    assert found[1] == pytest.approx(loss.item(), rel=1e-4)
    model, before = AutoModelForCausalLM.from_pretrained(output), AutoModelForCausalLM.from_pretrained(material)
    with torch.no_grad():  # on a fixed text, which does not change with the project's documents
        after, untrained = (each(input_ids=windows[:32], labels=windows[:32]).loss for each in (model, before))
    assert after < untrained - 0.1, (after, untrained)
    assert not torch.equal(model.model.norm.weight, before.model.norm.weight)
    assert AutoTokenizer.from_pretrained(output)("a")["input_ids"]
    assert {path.name for path in output.iterdir() if path.is_dir()} == {"step-14", "step-16"}  # the newest two


@pytest.mark.slow
def test_four_processes_train_as_one(material, alone, tmp_path):
    assert_same_curve(losses(finish(start(4, *text_arguments(material, tmp_path)))), alone[0])
    models = [AutoModelForCausalLM.from_pretrained(output) for output in (alone[1], tmp_path)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_process_is_killed(material, alone, tmp_path):
    """torchrun ends the others; one process resumes from the newest checkpoint and ends on the same curve."""
    process = start(2, *text_arguments(material, tmp_path))
    printed = ""
    for line in process.stdout:
        printed += line
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
    rest = finish(start(1, *text_arguments(material, tmp_path)))
    assert re.search(r"resumed after step \d*[02468]\n", rest), printed + rest
    assert_same_curve(losses(printed + rest), alone[0])


@pytest.mark.slow
def test_random_weights(script, tmp_path):
    """Random weights, and tokens of Python's standard library, are equal for any number of processes; saves nothing."""
    options = ["random:tiny", "--steps", 5, "--batch", 2, "--seq", 32, "--lr", 1e-3, "--log-every", 2, "--alone", 1]
    options += ["--save-every", 0, "--output", tmp_path / "none"]
    printed = run_here(script, *options), finish(start(2, *options))
    assert losses(printed[0]) == pytest.approx(losses(printed[1]), rel=1e-4) and losses(printed[0]).keys() == {
        1,
        2,
        4,
        5,
    }
    assert losses(printed[0])[1] == pytest.approx(math.log(1024), rel=0.05)
    rates = re.findall(r", ([\d,]+) tokens/s, ([\d,]+) per process \(([\d.]+) of one process alone\)\n", printed[1])
    assert len(rates) == 4
    for rate in rates:
        both, each, share = (float(number.replace(",", "")) for number in rate)
        assert 2 * each == pytest.approx(both, abs=2) and share == pytest.approx(each, abs=1)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--batch", "3"], "--batch 3 cannot be divided equally among 2 processes"),
        (["--seq", "99999999"], "one batch of 1 x 99999999 needs"),
        (["--steps", "-4"], "argument --steps: -4 is less than 1"),
        (["--batch", "0"], "argument --batch: 0 is less than 1"),
        (["--seq", "1"], "argument --seq: 1 is less than 2"),
        (["--lr", "-0.5"], "argument --lr: -0.5 is less than 0"),
        (["--lr", "nan"], "argument --lr: nan is less than 0"),
        (["--log-every", "0"], "argument --log-every: 0 is less than 1"),
        (["--save-every", "-1"], "argument --save-every: -1 is less than 0"),
        (["--keep", "0"], "argument --keep: 0 is less than 1"),
        (["random:2b"], "the named shapes are random:tiny"),
    ],
    ids=lambda arguments: " ".join(arguments) if isinstance(arguments, list) else "",
)
def test_bad_settings(material, script, monkeypatch, capsys, options, words):
    arguments = options if options[0].startswith("random") else [material, material / "text.txt", *options]
    monkeypatch.setattr(sys, "argv", ["train_distributed.py", *map(str, arguments)])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as raised:
        script.main()
    assert raised.value.code and words in f"{raised.value.code} {capsys.readouterr().err}"


def test_a_checkpoint_takes_no_time_of_training(script, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(script.time, "perf_counter", lambda: now[0])
    clock = script.Clock(torch.device("cpu"))
    now[0] += 2
    with clock.stopped():
        now[0] += 100
    now[0] += 3
    assert clock.lap() == 5
    now[0] += 1
    assert clock.lap() == 1


def test_the_processes_end_after_the_model(script, monkeypatch, tmp_path):
    """All tensors are released, then the processes wait for one another, and then the group ends."""
    models, ends, build_model = [], [], script.build

    def build_and_watch(*arguments):
        model = build_model(*arguments)
        models.append(weakref.ref(model))
        return model

    monkeypatch.setattr(script, "build", build_and_watch)
    for name in ("barrier", "destroy_process_group"):
        end = getattr(script.dist, name)
        monkeypatch.setattr(script.dist, name, lambda n=name, f=end: ends.append((n, models[-1]() is None)) or f())
    run_here(script, "random:tiny", "--steps", 1, "--batch", 1, "--seq", 32, "--save-every", 0)
    assert ends == [("barrier", True), ("destroy_process_group", True)]


def test_weights_that_are_not_there(script, material):
    with pytest.raises(SystemExit, match=r"the \.safetensors files of .* have no other\.weight"):
        script.read_weights(torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2, bias=False)}), str(material))
