"""Tests of the benchmark of TRL's training steps, on a model so small that its times mean nothing: the losses of all
settings agree, and a setting that fails does not end the run."""

import json

import pytest

from benchmarks import __main__ as cli
from benchmarks import suite, trl_steps

pytest.importorskip("trl")
pytest.importorskip("datasets")


@pytest.mark.parametrize("trainer", ["DPO", "GRPO"])
def test_the_losses_of_all_settings_agree(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr(trl_steps, "STEPS", 2)
    cli.main(["trl_steps", "--device", "cpu", "--models", trainer, "--out", str(tmp_path)])
    records = [json.loads(line) for line in (tmp_path / "trl_steps_cpu_fp32.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 3
    for record in records:
        assert not record["error"] and len(record["losses"]) == trl_steps.WARM_UP + 2
        assert record["losses"][0] != record["losses"][-1]  # the model is trained
        if record["setting"] != trl_steps.STOCK:
            assert record["difference"] < 1e-5
        assert record["entropies"]


def test_a_setting_that_fails_does_not_end_the_run(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("no such model")

    monkeypatch.setattr(trl_steps.models, "build", broken)
    settings = suite.Settings("cpu", "fp32", models=("DPO",))
    records = list(trl_steps.run(settings))
    assert [record.error for record in records] == ["RuntimeError: no such model"] * 6
    assert "RuntimeError: no such model" in trl_steps.table(records, settings)[0].markdown()
    assert trl_steps.draw(records, settings, None) == []
