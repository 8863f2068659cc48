"""Patched models are printed, saved, copied and pickled like stock models, under the original names."""

import copy
import io
import pickle

import pytest
import torch
import transformers
from cases import python
from llama_models import build, make_batch, one_thread, patched  # noqa: F401
from test_patch import PATCHED, NoForward, classes
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama


def test_names_and_relations_are_kept():
    stock = build()
    model = patched(stock)
    for old, new in zip(classes(stock), classes(model), strict=True):
        assert new is old or (new.__module__.startswith("liger_ext.models.") and issubclass(new, old))
        assert (new.__name__, new.__qualname__) == (old.__name__, old.__qualname__)
    assert {cls.__name__ for cls in classes(model) if cls.__module__.startswith("liger_ext")} == set(PATCHED)
    assert repr(model) == repr(stock)
    assert list(model.state_dict()) == list(stock.state_dict())


def test_saved_under_the_original_name(tmp_path):
    model = patched(build())
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == ["LlamaForCausalLM"]
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is modeling_llama.LlamaForCausalLM


def test_deepcopy():
    model = patched(build().train())
    copied = copy.deepcopy(model)
    assert classes(copied) == classes(model)
    assert torch.equal(copied(**make_batch("cpu")).loss, model(**make_batch("cpu")).loss)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(cross_entropy=True, fused_linear_cross_entropy=False)])
def test_pickles_into_a_fresh_process(tmp_path, options):
    model = patched(build().train(), **options)
    torch.save(model, tmp_path / "model.pt")
    torch.save(make_batch("cpu"), tmp_path / "batch.pt")
    script = """
import sys, torch
model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
batch = torch.load(sys.argv[1] + "/batch.pt")
assert type(model.model.norm).__module__ == "liger_ext.models.llama"
torch.set_num_threads(1)
torch.save(model(**batch).loss, sys.argv[1] + "/loss.pt")
"""
    python("-c", script, tmp_path)
    assert torch.equal(torch.load(tmp_path / "loss.pt"), model(**make_batch("cpu")).loss.detach())


def test_load_in_this_process():
    model = patched(build().train())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert classes(torch.load(buffer, weights_only=False)) == classes(model)


def test_a_class_of_the_users():
    """The patch lies on top of the user's class, and pickle finds both by name."""
    model = patched(NoForward(build().config).train())
    assert type(model).__bases__[1] is NoForward
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert classes(loaded) == classes(model) and loaded.extra() == model.extra()
    assert torch.equal(loaded(**make_batch("cpu")).loss, model(**make_batch("cpu")).loss)
    assert classes(copy.deepcopy(model)) == classes(model)
