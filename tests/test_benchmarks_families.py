"""Tests of the suite `benchmarks families` and of the steps that `benchmarks lora` times, with transformers and with
liger_ext: training steps run and are recorded, and every norm and MLP of the models is patched."""

import json
import warnings

import pytest
import torch
from test_benchmarks_train import BATCH, SEQ, TINY

from benchmarks import __main__ as cli
from benchmarks import families, models, step_one
from liger_ext.models.modules.causal_lm import CausalLM
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.modules.norms import Norm

QWEN = TINY | dict(model_type="qwen3", head_dim=8)


@pytest.mark.slow
def test_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "FAMILIES_CPU", {"tiny qwen3": (QWEN, BATCH, SEQ), "other": (TINY, 1, SEQ)})
    cli.main(["families", "--device", "cpu", "--out", str(tmp_path), "--models", "tiny"])
    records = [json.loads(line) for line in (tmp_path / "families_cpu_fp32.jsonl").read_text().splitlines()]
    table = (tmp_path / "families_cpu_fp32.md").read_text()
    assert [r["provider"] for r in records] == ["Hugging Face", "liger_ext"]
    for record in records:
        assert record["error"] == "" and record["model"] == "tiny qwen3" and record["tokens"] == BATCH * SEQ
        assert record["step"]["median"] > 0 and record["peak_mib"] > 0
        assert record["loss"] == pytest.approx(records[0]["loss"], rel=1e-4)
        assert f"| tiny qwen3 | {record['provider']} |" in table
    assert "| 1.000 |" in table


def test_adapters_alone_train():
    def measure(provider, **options):
        return step_one.measure(QWEN, BATCH, SEQ, provider, "cpu", "fp32", lambda text: None, **options)

    stock, ours = (measure(provider, lora=True, autocast=True) for provider in (models.STOCK, models.OURS))
    assert ours.loss == pytest.approx(stock.loss, rel=1e-2)
    assert abs(measure(models.STOCK).loss - stock.loss) > 1e-3


@pytest.mark.parametrize("name", models.FAMILIES_CUDA)
def test_every_model_is_patched_as_a_whole(name):
    """Every part of a benchmarked model is patched, on the meta device: unknown code would issue a warning."""
    config, *_ = models.FAMILIES_CUDA[name]
    model = models.build(config, torch.device("meta"), torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(models.providers("cpu")[models.OURS](model), CausalLM)
    norms = [module for module in model.modules() if type(module).__name__.endswith("Norm")]
    assert norms and all(isinstance(module, Norm) for module in norms)
    assert any(isinstance(module, MLP) for module in model.modules()) or "moe" in config["model_type"]
