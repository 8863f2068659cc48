"""Measures whole training steps of TRL's DPOTrainer and GRPOTrainer (1.16), by their ``train()``: forward, backward,
clipping and AdamW of a Llama with random weights. There are three settings: TRL's function of log-probabilities; our op
in its place (``liger_ext.trl.install()``); and our op with a patched model.

DPO's data are token ids. A replaced ``_prepare_inputs`` avoids generation in GRPO: it returns random completions, their
advantages and old log-probabilities. Losses are recorded before TRL rounds them for its log. All settings run in one
process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from liger_ext import apply_liger_kernel_to_instance
from liger_ext._meter import Meter
from liger_ext._timing import Timing, failure_text

from . import models, suite

_MODEL = dict(num_attention_heads=32, num_key_value_heads=8, hidden_size=2048, intermediate_size=8192,
              num_hidden_layers=16, vocab_size=151_936, tie_word_embeddings=True)  # fmt: skip
_TINY = dict(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
             vocab_size=512, tie_word_embeddings=True)  # fmt: skip


class Sizes(NamedTuple):
    """Each sequence has ``length`` tokens, of which the first ``prompt`` have no loss. A step has 2 * ``pairs``
    sequences: the two answers of each of DPO's pairs, or the group of GRPO's completions."""

    name: str
    config: dict
    pairs: int
    length: int
    prompt: int


SIZES_CUDA, SIZES_CPU = Sizes("Llama-1B", _MODEL, 4, 1024, 256), Sizes("tiny", _TINY, 2, 24, 8)
STOCK, INSTALLED, PATCHED = "TRL", "liger_ext.trl.install()", "install() and patched model"
WARM_UP, STEPS = 3, 8
LEARNING_RATES = {"DPO": 1e-6, "GRPO": 1e-5}  # with 1e-5 DPO's loss is 0 after two steps
LIMIT = 105.0  # seconds of a run on a GPU, after which settings are skipped


@dataclass
class Training:
    model: str
    trainer: str
    setting: str
    tokens: int
    step: Timing | None = None
    peak_mib: float | None = None
    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)  # as logged by TRL
    difference: float | None = None  # the largest difference from the losses with TRL's function
    seconds: float = 0.0  # total time of the setting
    error: str = ""


def run(settings: suite.Settings) -> Iterator[Training]:
    on_cpu = settings.device == "cpu"
    sizes = SIZES_CPU if on_cpu else SIZES_CUDA
    start, references = time.monotonic(), {}
    for checkpoints in (False, True):
        for trainer in ("DPO", "GRPO"):
            name = trainer + ", gradient checkpointing" * checkpoints
            if not settings.wants_model(name):
                continue
            for setting in (STOCK, INSTALLED, PATCHED):
                if not settings.wants(setting):
                    continue
                record = Training(sizes.name, name, setting, 2 * sizes.pairs * sizes.length)
                begun = time.monotonic()
                try:
                    if not on_cpu and begun > start + LIMIT:
                        raise TimeoutError("left out: the run would take too long")
                    with _on(setting):
                        _measure(record, sizes, trainer, checkpoints, settings)
                except Exception as error:  # a setting that fails must not end the run
                    record.error = failure_text(error)
                record.seconds = time.monotonic() - begun
                if setting == STOCK:
                    references[name] = record.losses
                elif record.losses and references.get(name):
                    record.difference = max(abs(a - b) for a, b in zip(record.losses, references[name], strict=True))
                _free()
                yield record


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _on(setting: str) -> Iterator[None]:
    """Computes TRL's losses with its own function, or with ours."""
    if setting == STOCK:
        yield
        return
    import liger_ext.trl

    utils = importlib.import_module("trl.trainer.utils")
    stock = utils._ChunkedLogProbFunction
    with liger_ext.trl.install():
        if utils._ChunkedLogProbFunction is stock:
            raise RuntimeError("liger_ext.trl.install() replaced nothing")
        yield


def _measure(record: Training, sizes: Sizes, trainer: str, checkpoints: bool, settings: suite.Settings) -> None:
    from accelerate.state import AcceleratorState
    from transformers import PrinterCallback

    device = torch.device(settings.device)
    meter = Meter(device)
    before = meter.reset()
    AcceleratorState._reset_state(reset_partial_state=True)  # the state, with its autocast, outlives a trainer

    def model() -> torch.nn.Module:
        patched = models.build(sizes.config, device, settings.torch_dtype)
        if record.setting == PATCHED:
            apply_liger_kernel_to_instance(patched)
        return patched

    clock = _clock(meter)
    with tempfile.TemporaryDirectory() as folder:
        common = dict(
            output_dir=folder, max_steps=WARM_UP + STEPS, gradient_accumulation_steps=1,
            learning_rate=LEARNING_RATES[trainer], use_cpu=device.type == "cpu",
            bf16=settings.dtype == "bf16", gradient_checkpointing=checkpoints,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
            dataloader_pin_memory=device.type == "cuda",
        )  # fmt: skip
        trainer_object = (_dpo if trainer == "DPO" else _grpo)(model, sizes, common, device)
        trainer_object.remove_callback(PrinterCallback)
        trainer_object.add_callback(clock)
        stock = trainer_object.compute_loss

        def compute_loss(*arguments, **options):
            loss = stock(*arguments, **options)
            clock.losses.append(loss.detach().float())
            return loss

        trainer_object.compute_loss = compute_loss
        trainer_object.train()
    record.step = Timing.from_samples(clock.samples[WARM_UP:])
    record.peak_mib = (clock.peak - before) / 2**20
    record.losses = [float(loss) for loss in clock.losses]
    record.entropies = [log["entropy"] for log in trainer_object.state.log_history if "entropy" in log]


def _clock(meter: Meter):
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """Times steps from begin to end, optimizer included."""

        def __init__(self) -> None:
            self.samples: list[float] = []
            self.losses: list[torch.Tensor] = []
            self.peak = 0

        def on_step_begin(self, args, state, control, **others):
            if len(self.samples) == WARM_UP:
                meter.reset()
            if meter.cuda:
                torch.cuda.synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **others):
            if meter.cuda:
                torch.cuda.synchronize()
            self.samples.append((time.perf_counter() - self.start) * 1e6)
            self.peak = meter.peak()

    return Clock()


def _dpo(model: Callable, sizes: Sizes, common: dict, device: torch.device):
    from trl import DPOConfig, DPOTrainer

    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, sizes.config["vocab_size"], (count,), generator=generator).tolist()

    class TokenizedDPOTrainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *others):
            return dataset  # it holds token ids already

    rows = [
        dict(
            prompt_ids=tokens(sizes.prompt),
            chosen_ids=tokens(sizes.length - sizes.prompt),
            rejected_ids=tokens(sizes.length - sizes.prompt),
        )
        for _ in range(2 * sizes.pairs)
    ]
    options = DPOConfig(per_device_train_batch_size=sizes.pairs, max_length=sizes.length, **common)
    return TokenizedDPOTrainer(
        model(), model().eval().requires_grad_(False), options, train_dataset=_dataset(rows),
        processing_class=_tokenizer(),
    )  # fmt: skip


def _grpo(model: Callable, sizes: Sizes, common: dict, device: torch.device):
    from trl import GRPOConfig, GRPOTrainer

    sequences = 2 * sizes.pairs
    options = GRPOConfig(
        per_device_train_batch_size=sequences, num_generations=sequences, beta=0.0, steps_per_generation=1,
        max_completion_length=sizes.length - sizes.prompt, **common,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model(), lambda completions, **others: [0.0] * len(completions), options,
        train_dataset=_dataset([dict(prompt="a")] * sequences), processing_class=_tokenizer(),
    )  # fmt: skip
    random = torch.Generator().manual_seed(2)
    ids = torch.randint(3, sizes.config["vocab_size"], (sequences, sizes.length), generator=random).to(device)
    mask = torch.ones_like(ids)
    old = torch.full((sequences, sizes.length - sizes.prompt), -float(torch.tensor(sizes.config["vocab_size"]).log()))
    inputs = dict(
        prompt_ids=ids[:, : sizes.prompt],
        prompt_mask=mask[:, : sizes.prompt],
        completion_ids=ids[:, sizes.prompt :],
        completion_mask=mask[:, sizes.prompt :],
        advantages=torch.randn(sequences, generator=random).to(device),
        old_per_token_logps=(old + 0.1 * torch.randn(old.shape, generator=random)).to(device),
        num_items_in_batch=mask[:, sizes.prompt :].sum(),
    )
    trainer._prepare_inputs = lambda batch: inputs
    return trainer


def _dataset(rows: list[dict]):
    """A dataset with a fixed fingerprint: to compute one, datasets pickles the table, which fails with some
    pyarrows."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    return Dataset(InMemoryTable.from_pylist(rows), fingerprint="rows")


def _tokenizer():
    """Has the attributes that trainers read, and tokenizes no text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


# Tables and the picture


def line(record: Training) -> str:
    name = f"{record.trainer}, {record.setting} ({record.seconds:.1f} s in all)"
    if record.step is None:
        return f"{name}: {record.error}"
    difference = "" if record.difference is None else f", losses within {record.difference:.1e} of TRL's"
    return f"{name}: {suite.duration(record.step)}, {record.peak_mib:,.0f} MiB{difference}"


def table(records: list[Training], settings: suite.Settings) -> list[suite.Grid]:
    grid = suite.Grid(
        f"{settings.dtype}: training steps of TRL's trainers: median of {STEPS} after {WARM_UP}; peak of all "
        "memory, MiB; largest difference of a loss from that with TRL's function",
        ["model", "trainer", "setting", "step", "tokens/s", "peak", "difference", "first loss", "last loss", "error"],
    )
    losses = suite.Grid("losses of the steps", ["trainer", "setting", *map(str, range(1, WARM_UP + STEPS + 1))])
    for r in records:
        cells = ["", "", "", "", "", ""]
        if r.step is not None:
            difference = "" if r.difference is None else f"{r.difference:.1e}"
            rate = f"{r.tokens / r.step.median * 1e6:,.0f}"
            cells = [suite.duration(r.step), rate, f"{r.peak_mib:,.0f}", difference]
            cells += [f"{r.losses[0]:.5f}", f"{r.losses[-1]:.5f}"]
            losses.rows.append([r.trainer, r.setting, *[f"{loss:.5f}" for loss in r.losses]])
        grid.rows.append([r.model, r.trainer, r.setting, *cells, r.error])
    return [grid, losses]


def draw(records: list[Training], settings: suite.Settings, folder: Path) -> list[Path]:
    done = [r for r in records if r.step]
    if not done:
        return []
    picture, axes = suite.figure(2)
    trainers, names = (list(dict.fromkeys(getattr(r, key) for r in done)) for key in ("trainer", "setting"))
    for axis, label, value in (
        (axes[0], "milliseconds per step", lambda r: r.step.median / 1e3),
        (axes[1], "peak memory, GiB", lambda r: r.peak_mib / 1024),
    ):
        found = {(r.trainer, r.setting): value(r) for r in done}
        suite.bars(
            axis,
            [t.replace(", ", ",\n") for t in trainers],
            {n: [found.get((t, n)) for t in trainers] for n in names},
            label,
        )
    return [suite.save(picture, folder / f"trl_steps_{settings.device}_{settings.dtype}.png")]
