"""Tests of `liger_ext.compat.install()`, which provides the module name liger_kernel to libraries that import it."""

import importlib.util
import sys
import types

import pytest
import torch
from cases import python
from llama_models import build, make_batch, one_thread, ops  # noqa: F401
from transformers.utils import import_utils

import liger_ext
from liger_ext import compat
from liger_ext.models import llama


@pytest.fixture
def installed():
    with compat.install() as handle:
        yield handle
    assert not import_utils.is_liger_kernel_available()


def test_transformers_finds_it(installed):
    assert import_utils.is_liger_kernel_available()
    installed.revert()
    assert not import_utils.is_liger_kernel_available()
    assert not [name for name in sys.modules if name.startswith("liger_kernel")]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("liger_kernel.transformers")


def test_handles_of_two(installed):
    other = compat.install()
    installed.revert()
    assert import_utils.is_liger_kernel_available()
    other.revert()
    other.revert()
    assert importlib.util.find_spec("liger_kernel") is None


def test_trainer(installed, tmp_path, monkeypatch):
    """A Trainer with use_liger_kernel takes the same steps as with a manually patched and with a stock model."""
    accelerate = pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # the state outlives a Trainer

    rows = [{name: t[0] for name, t in make_batch("cpu", rows=1, seq=12).items()} for _ in range(8)]

    def losses(model, **options):
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, logging_steps=1,
            report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line], trainer.evaluate()["eval_loss"]

    model = build()
    found = losses(model, use_liger_kernel=True)
    assert type(model) is llama.LlamaForCausalLM
    assert "fused_linear_cross_entropy" in ops(model.train(), **make_batch("cpu"))
    by_hand = build()
    liger_ext.apply_liger_kernel_to_llama(model=by_hand)
    trained, evaluated = losses(by_hand)
    assert found[0] == trained
    # With use_liger_kernel a Trainer evaluates with skip_logits=True, which sums in another order.
    torch.testing.assert_close(found[1], evaluated, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, losses(build()), rtol=1e-4, atol=1e-4)
    liger_ext.apply_liger_kernel_to_llama(model=by_hand, memory="low")
    losses(by_hand, use_liger_kernel=True)
    assert by_hand.liger_memory == "low"


def test_the_real_package_keeps_its_name(tmp_path):
    (tmp_path / "liger_kernel").mkdir()
    (tmp_path / "liger_kernel" / "__init__.py").write_text("__version__ = '0.8.5'")
    said = python(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from liger_ext import compat\n"
        "try: compat.install()\n"
        "except RuntimeError as error: print(error)\n"
        "import liger_kernel; print(liger_kernel.__file__)",
    )
    assert "liger_kernel is installed" in said and "uninstall liger-kernel" in said
    assert str(tmp_path) in said.splitlines()[-1]


def test_what_has_looked_before(monkeypatch):
    """install() also updates TRL 0.24, which stores at import whether the package exists, and its version."""
    looked = types.ModuleType("trl.import_utils")
    looked._liger_kernel_available, looked._liger_kernel_version = False, "N/A"
    monkeypatch.setitem(sys.modules, looked.__name__, looked)
    with compat.install():
        assert looked._liger_kernel_available and looked._liger_kernel_version == "0.8.5"
    assert not looked._liger_kernel_available and looked._liger_kernel_version == "N/A"
