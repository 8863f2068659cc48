"""How patching works: which classes it swaps, which it leaves alone, and that reverting leaves no trace."""

import copy
import functools
import gc
import importlib.metadata
import os
import sys
import warnings
import weakref
from importlib.machinery import ModuleSpec

import pytest
import torch
from cases import RecordCalls, python
from llama_models import build, checkpoint_layers, config, make_batch, one_thread, patched, step  # noqa: F401
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import liger_ext
from liger_ext import apply_liger_kernel_to_llama, liger_kernel
from liger_ext.models.patching import forwards

PATCHED = ("LlamaForCausalLM", "LlamaDecoderLayer", "LlamaAttention", "LlamaMLP", "LlamaRMSNorm")
if hasattr(modeling_llama, "create_causal_mask"):  # older versions pass torch.compile no mask in training
    PATCHED += ("LlamaModel",)


def classes(model):
    return [type(module) for module in model.modules()]


def traces(model):
    """All state of the modules that a patch could change."""
    return [(type(module), sorted(module.__dict__)) for module in model.modules()]


def global_state():
    names = {name: getattr(modeling_llama, name) for name in dir(modeling_llama)}
    classes = [names[name] for name in {*PATCHED, "LlamaModel", "LlamaPreTrainedModel"}]
    attributes = {
        (cls, key): dict(value) if type(value) is dict else value
        for cls in classes
        for key, value in vars(cls).items()
        if "cache" not in key  # transformers fills its caches on first use
    }
    return names, attributes, nn.functional.cross_entropy


def is_patched(model):
    with RecordCalls() as record:
        model(**make_batch("cpu")).loss.backward()
    return bool(record.calls)


def test_an_instance_and_no_other():
    before = global_state()
    stock = build().train()
    model = copy.deepcopy(stock)
    handle = apply_liger_kernel_to_llama(model=model)
    assert is_patched(model)
    assert not is_patched(stock)
    assert not is_patched(build().train())
    assert global_state() == before
    handle.revert()
    assert global_state() == before


def test_revert_is_complete():
    stock = build().train()
    model = copy.deepcopy(stock)
    before = traces(model)
    handle = apply_liger_kernel_to_llama(model=model)
    assert classes(model) != classes(stock)
    is_patched(model)
    handle.revert()
    assert traces(model) == before
    expected, result = step(stock, make_batch("cpu")), step(model, make_batch("cpu"))
    assert expected.keys() == result.keys()
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    handle.revert()  # reverting twice is harmless
    assert traces(model) == before


@pytest.mark.parametrize("when", ["before the patch", "after it"])
def test_revert_is_complete_where_layers_are_checkpointed(when):
    stock, model = build().train(), build().train()
    for one in (stock, model) if when == "before the patch" else (stock,):
        checkpoint_layers(one, False)
    handle = apply_liger_kernel_to_llama(model=model)
    if when == "after it":
        checkpoint_layers(model, False)
    handle.revert()
    assert traces(model) == traces(stock)
    expected, result = step(stock, make_batch("cpu")), step(model, make_batch("cpu"))
    assert all(torch.equal(expected[name], result[name]) for name in expected)


def test_the_loss_function_is_restored():
    model = build()
    before = traces(model), model.loss_function
    with apply_liger_kernel_to_llama(model=model, cross_entropy=True, fused_linear_cross_entropy=False):
        assert model.loss_function is not before[1]
    assert (traces(model), model.loss_function) == before


def test_context_manager():
    model = build().train()
    with apply_liger_kernel_to_llama(model=model) as handle:
        assert is_patched(model)
    assert not is_patched(model)
    handle.revert()
    with pytest.raises(RuntimeError, match="on purpose"), apply_liger_kernel_to_llama(model=model):
        raise RuntimeError("on purpose")
    assert not is_patched(model)


def test_what_is_built_later(tmp_path):
    before = global_state()
    earlier = build().train()
    earlier.save_pretrained(tmp_path)
    expected = classes(patched(earlier))
    with apply_liger_kernel_to_llama():
        later = {
            "class": LlamaForCausalLM(config()),
            "from_config": AutoModelForCausalLM.from_config(config()),
            "from_pretrained": LlamaForCausalLM.from_pretrained(tmp_path),
            "auto": AutoModelForCausalLM.from_pretrained(tmp_path),
        }
        assert not is_patched(earlier)
    assert global_state() == before
    assert not is_patched(LlamaForCausalLM(config()).train())
    for how, model in later.items():
        assert classes(model) == expected, how
        assert is_patched(model.train()), how
    torch.testing.assert_close(later["auto"](**make_batch("cpu")).loss, earlier(**make_batch("cpu")).loss)


def test_options_of_what_is_built_later():
    with apply_liger_kernel_to_llama(rope=False, cross_entropy=True, fused_linear_cross_entropy=False):
        model = LlamaForCausalLM(config()).train()
    assert type(model) is modeling_llama.LlamaForCausalLM
    assert type(model.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    with RecordCalls() as record:
        output = model(**make_batch("cpu"))
    assert output.logits is not None
    assert "cross_entropy" in record.names


def test_a_failing_constructor_leaves_nothing_behind():
    before = global_state()
    with apply_liger_kernel_to_llama(), pytest.raises(Exception):  # noqa: B017
        LlamaForCausalLM(config(hidden_act="no such function"))
    assert global_state() == before


LOGITS_LOSS = dict(cross_entropy=True, fused_linear_cross_entropy=False)


def test_a_loss_that_was_set_since_is_kept():
    model = build()
    handle = apply_liger_kernel_to_llama(model=model, **LOGITS_LOSS)
    model.loss_function = len
    handle.revert()
    assert model.loss_function is len


def test_a_constructor_wrapped_by_others_stays_wrapped(monkeypatch):
    handle = apply_liger_kernel_to_llama()
    ours = modeling_llama.LlamaModel.__init__
    built = []

    def theirs(self, *args, **kwargs):
        ours(self, *args, **kwargs)
        built.append(self)

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", theirs)
    handle.revert()
    assert modeling_llama.LlamaModel.__init__ is theirs
    model = LlamaForCausalLM(config()).train()
    assert built == [model.model]
    assert not is_patched(model)
    monkeypatch.undo()
    modeling_llama.LlamaModel.__init__ = ours.__wrapped__


@pytest.mark.parametrize("options", [{}, LOGITS_LOSS], ids=["", "loss of logits"])
def test_a_handle_keeps_no_model_alive(options):
    model = build()
    handle = apply_liger_kernel_to_llama(model=model, **options)
    alive = [weakref.ref(model), weakref.ref(model.lm_head.weight)]
    del model
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    handle.revert()


class OverriddenForward(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.loss = output.loss * 2
        return output


class PartialForward(LlamaForCausalLM):
    forward = functools.partial(lambda **batch: None)


class NoForward(LlamaForCausalLM):
    def extra(self):
        return super().num_parameters()


def test_subclasses():
    torch.manual_seed(0)
    model = OverriddenForward(config()).train()
    expected = model(**make_batch("cpu")).loss
    with pytest.warns(UserWarning, match="OverriddenForward has a forward of its own and is not patched"):
        handle = apply_liger_kernel_to_llama(model=model)
    assert type(model) is OverriddenForward
    assert is_patched(model)  # its layers are patched
    torch.testing.assert_close(model(**make_batch("cpu")).loss, expected)
    handle.revert()
    with pytest.warns(UserWarning, match="PartialForward has a forward of its own and is not patched"):
        apply_liger_kernel_to_llama(model=PartialForward(config()))
    model = NoForward(config()).train()
    before = traces(model)
    handle = apply_liger_kernel_to_llama(model=model)
    assert isinstance(model, NoForward) and type(model).__name__ == "NoForward"
    assert model.extra() == model.num_parameters()
    assert "logits" not in model(**make_batch("cpu"))
    handle.revert()
    assert traces(model) == before


def test_a_forward_set_on_the_instance_is_left_alone():
    model = build()
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x: x
    with pytest.warns(UserWarning, match="LlamaMLP has a forward of its own"):
        handle = apply_liger_kernel_to_llama(model=model)
    assert type(mlp) is modeling_llama.LlamaMLP
    assert type(model.model.layers[1].mlp) is not modeling_llama.LlamaMLP
    handle.revert()


def test_no_warning_in_the_usual_case():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        apply_liger_kernel_to_llama(model=build()).revert()


def test_with_globals_keeps_decorators():
    def doubled(function):
        import functools

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return 2 * function(*args, **kwargs)

        return wrapper

    @doubled
    def count(items=(1, 2), *, start=1):
        return start + len(items)

    changed = forwards.with_globals(count, len=lambda items: 10)
    assert (count(), changed(), changed(start=3)) == (6, 22, 26)
    assert forwards.with_globals(count, len=lambda items: 20)() == 42
    assert changed() == 22
    assert changed.__name__ == "count" and changed.__wrapped__ is not count.__wrapped__
    with pytest.MonkeyPatch.context() as context:  # other globals are looked up in the function's module at each call
        context.setattr(sys.modules[__name__], "PATCHED", ())
        assert forwards.with_globals(lambda: (len(PATCHED), os), os=3)() == (0, 3)


@pytest.mark.parametrize(
    "found, outcome", [(None, "missing"), ("4.51.2", "error"), ("4.51.3", "silence"), ("5.25.0.dev0", "warning")]
)
def test_versions_of_transformers(monkeypatch, found, outcome):
    from liger_ext import models

    def version(package):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    models.check_transformers.cache_clear()
    try:
        if outcome == "missing":
            for find in (
                liger_ext,
                liger_kernel._Loader().create_module(ModuleSpec("liger_kernel.transformers", None)),
            ):
                with pytest.raises(ImportError, match=r"pip install 'liger_ext\[transformers\]'"):
                    find.apply_liger_kernel_to_llama  # noqa: B018
        elif outcome == "error":
            with pytest.raises(ImportError, match=r"4\.51\.3 to 5\.24, but 4\.51\.2 is installed"):
                liger_ext.apply_liger_kernel_to_llama  # noqa: B018
        elif outcome == "warning":
            with pytest.warns(UserWarning, match=r"tested with transformers 4\.51\.3 to 5\.24; 5\.25\.0"):
                liger_ext.apply_liger_kernel_to_llama  # noqa: B018
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                liger_ext.apply_liger_kernel_to_llama  # noqa: B018
    finally:
        models.check_transformers.cache_clear()


def test_transformers_is_imported_only_when_needed():
    script = "import sys, liger_ext, liger_ext.models; assert 'transformers' not in sys.modules"
    python("-c", script)
