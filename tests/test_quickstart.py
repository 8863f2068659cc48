"""The page docs/quickstart.md: each of its Python blocks trains a tiny Llama by ops of liger_ext."""

import re

import pytest
import torch
from cases import ROOT
from llama_models import build, make_batch, one_thread  # noqa: F401
from test_trl import ignores_trl_warnings, tokenizer  # noqa: F401
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, AutoTokenizer

accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")

PAGE = (ROOT / "docs/quickstart.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = [(title, code) for title, text in SECTIONS.items() for code in re.findall(r"```python\n(.*?)```", text, re.S)]
WITHOUT_CODE = "aot_eager_decomp_partition"  # a backend of torch.compile that generates no code, which takes long
OPS = {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy", "fused_linear_cross_entropy_backward"}


class Steps:
    """Counts the steps of all optimizers, and those that change parameters."""

    def __init__(self) -> None:
        self.all = self.changing = 0

    def before(self, optimizer, args, kwargs) -> None:
        self.values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]

    def after(self, optimizer, args, kwargs) -> None:
        found = [p for group in optimizer.param_groups for p in group["params"]]
        self.all += 1
        self.changing += any(not torch.equal(p, value) for p, value in zip(found, self.values, strict=True))


@pytest.fixture
def steps():
    steps = Steps()
    hooks = register_optimizer_step_pre_hook(steps.before), register_optimizer_step_post_hook(steps.after)
    yield steps
    for hook in hooks:
        hook.remove()


@pytest.fixture
def names(tmp_path, monkeypatch, tokenizer):  # noqa: F811
    """Returns the names that the page leaves to its reader."""
    monkeypatch.chdir(tmp_path)  # Trainer writes checkpoints
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: build().eval())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    compile_model = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_model(model, backend=WITHOUT_CODE))
    torch._dynamo.reset()
    reset = accelerate.state.AcceleratorState._reset_state  # the state outlives a Trainer
    reset(reset_partial_state=True)
    rows = make_batch("cpu", rows=80, seq=16)
    yield {
        "name": "a folder",
        "batches": [make_batch("cpu", seed=seed) for seed in (1, 2)],
        "dataset": datasets.Dataset.from_dict({column: t.tolist() for column, t in rows.items()}),
    }
    reset(reset_partial_state=True)


@pytest.fixture
def installed(monkeypatch):
    """Reverts liger_ext.trl.install() after the test."""
    trl = pytest.importorskip("liger_ext.trl")
    install, handles = trl.install, []
    monkeypatch.setattr(trl, "install", lambda: handles.append(install()) or handles[-1])
    yield
    for handle in handles:
        handle.revert()


def test_the_page_has_a_block_for_each_section():
    assert [title for title, _ in BLOCKS] == list(SECTIONS) and len(BLOCKS) >= 6
    assert len(PAGE.split()) <= 600


@ignores_trl_warnings
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("code", [code for _, code in BLOCKS], ids=[title for title, _ in BLOCKS])
def test_a_block_trains_by_our_ops(code, names, steps):
    if "trl" in code:
        pytest.importorskip("trl")
    if "peft" in code:
        pytest.importorskip("peft")
    with profile(activities=[ProfilerActivity.CPU]) as record:
        exec(compile(code, "docs/quickstart.md", "exec"), names)
    assert steps.all >= 2 and steps.changing == steps.all
    ran = {event.key.removeprefix("liger_ext::") for event in record.key_averages()}
    assert ran >= OPS, OPS - ran
