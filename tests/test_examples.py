"""Tests that the examples of preference and RL losses run and draw, and that the loss of DPO falls."""

import importlib.util
import re

import pytest

from examples import dpo, grpo
from examples.demo.models import PRETRAINED


def test_dpo(tmp_path, capsys):
    dpo.main("random:tiny", 4, tmp_path / "dpo.png")
    printed = capsys.readouterr().out
    loss = re.search(r"step 4 of 4: loss ([\d.]+), margin .* -?[\d.]+ nats", printed)[1]
    assert float(loss) < 0.6931  # log(2) is the loss without a margin
    assert (tmp_path / "dpo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(PRETRAINED) is None, reason="`make test` installs the model")
def test_grpo(tmp_path, capsys):
    """Trains the pretrained model, because the example needs its tokenizer."""
    grpo.main("", 3, tmp_path / "grpo.png")
    assert re.search(r"step 3 of 3: mean reward 0\.\d+", capsys.readouterr().out)
    assert (tmp_path / "grpo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_reward():
    assert grpo.capital_share("Ab, c!") == 1 / 3 and grpo.capital_share("12") == 0
