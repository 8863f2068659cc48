"""Training steps with LoRA adapters (PEFT) on all linear layers: forward, backward, fused AdamW of the adapters. Each
provider runs in a separate process (`step_one.py`). Unsloth's kernels run for Llama if they can be imported
(`unsloth.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from . import suite
from .models import LORA_CUDA, MODELS_CPU, UNSLOTH, on_request
from .step_one import SetUp
from .steps import Steps, eager_providers, measured
from .train import chosen_models

# PEFT keeps adapters of 16-bit weights in fp32; a Trainer with bf16=True then runs the step under autocast.
_DEFAULT = SetUp(fp32=True, autocast=True)
_NF4 = replace(_DEFAULT, four_bit=True)
BF16, NF4 = "fp32 adapters, autocast", "nf4, fp32 adapters, autocast"
AS_TRL = "nf4, adapters in the model's dtype, autocast, checkpoints"  # SFTTrainer casts adapters of quantised models
PREPARED = "nf4, prepare_model_for_kbit_training, autocast, checkpoints"
SET_UPS = {
    BF16: _DEFAULT,
    "all in the model's dtype": SetUp(),
    NF4: _NF4,
    "nf4, adapters in the model's dtype": SetUp(four_bit=True),
    "nf4, fp32 adapters, autocast, dropout 0.05": replace(_NF4, dropout=0.05),
    AS_TRL: replace(_NF4, fp32=False, checkpoints=True),
    PREPARED: replace(_NF4, prepared=True, checkpoints=True),
}
FEWER = {  # the set-ups of models that do not run with all
    "Llama-1B 1x512": [NF4],
    "Llama-8B 2x2048": [BF16, NF4],
    "Llama-8B 4x4096": [AS_TRL, PREPARED],
    "Gemma2-2B 4x2048": [BF16],
}


@dataclass
class Lora(Steps):
    set_up: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.set_up}, {self.provider}"


def run(settings: suite.Settings) -> Iterator[Lora]:
    models = chosen_models(settings, MODELS_CPU if settings.device == "cpu" else LORA_CUDA)
    if not settings.models:
        models = dict([next(iter(models.items()))])
    providers = eager_providers(settings)
    if not settings.providers and UNSLOTH in on_request(settings.device):
        providers.append(UNSLOTH)
    cases = [
        (Lora(model, provider, batch * seq, set_up=set_up), dict(lora=asdict(SET_UPS[set_up])))
        for model, (config, batch, seq) in models.items()
        for set_up in FEWER.get(model, SET_UPS)
        if settings.wants_op(set_up)
        for provider in providers
        if provider != UNSLOTH or "model_type" not in config  # a Llama
    ]
    return measured(settings, models, cases)


def line(record: Lora) -> str:
    return record.line


def table(records: list[Lora], settings: suite.Settings) -> suite.Grid:
    """A table of the figures, with shares of Unsloth's time and memory if it ran."""
    grid = suite.Grid(
        f"{settings.dtype}: training steps with LoRA of rank 16 on all linear layers; shares of Unsloth's kernels",
        ["model", "set-up", "provider", "step", "share", "tokens/s", "peak MiB", "share", "loss"],
    )
    base = {(r.model, r.set_up): r for r in records if r.provider == UNSLOTH and r.step}
    for r in records:
        name = [r.model, r.set_up, r.provider]
        if r.step is None:
            grid.rows.append([*name, f"fails: {r.error}", "", "", "", "", ""])
            continue
        rate = f"{r.tokens / r.step.median * 1e6:,.0f}"
        time, memory = r.shares(base.get((r.model, r.set_up)))
        grid.rows.append([*name, suite.duration(r.step), time, rate, f"{r.peak_mib:,.0f}", memory, f"{r.loss:.4f}"])
    return grid


def draw(records: list[Lora], settings: suite.Settings, folder: Path) -> list[Path]:
    return []
