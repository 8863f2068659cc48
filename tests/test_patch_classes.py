"""Patches together with classes that other code derives from a module's class or patch, or inserts among its ancestors:
a user's classes, and classes that PyTorch builds (test_patch_wrappers.py tests FSDP2's)."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from llama_models import build, make_batch, one_thread, patched, step  # noqa: F401
from torch import nn
from torch.nn.utils import parametrize

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models import llama, patches
from liger_ext.models.modules import head
from liger_ext.models.patching import classes

MODULES = {
    "model": lambda model: model,
    "layer": lambda model: model.model.layers[0],
    "attention": lambda model: model.model.layers[0].self_attn,
    "MLP": lambda model: model.model.layers[0].mlp,
    "norm": lambda model: model.model.layers[0].input_layernorm,
    "last norm": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
}


def put_on_top(module):
    """Sets a subclass of the user's, whose methods call those below with `super()` without arguments."""

    class Mine(type(module)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

        @property
        def user_property(self):
            return super().extra_repr()

    module.__class__ = Mine
    return Mine


def module_classes(model):
    return [type(module) for module in model.modules()]


def assert_same_step(model, expected):
    found = step(model, make_batch("cpu"))
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "head"])
def test_a_users_class_on_top_of_a_patch_stays_and_keeps_it(name):
    model = build(tie_word_embeddings=False).train()
    expected = step(copy.deepcopy(model), make_batch("cpu"))
    module, others = MODULES[name](model), copy.deepcopy(model)
    stock = type(module)
    handle = apply_liger_kernel_to_llama(model=model)
    patch = type(module)
    mine = put_on_top(module)
    with pytest.warns(UserWarning, match="Mine is derived from a patched class, and keeps the patch") as record:
        handle.revert()
    assert [warning.filename for warning in record] == [__file__]
    assert type(module) is mine and mine.__bases__ == (patch,)
    for one, other in zip(model.modules(), others.modules(), strict=True):
        assert one is module or type(one) is type(other)  # all other modules have their original class
    assert module.user_property == stock.extra_repr(module)
    assert_same_step(model, expected)
    # The next call patches the other modules, and its handle reverts them.
    module.__class__ = patch
    apply_liger_kernel_to_llama(model=model).revert()
    assert type(module) is patch
    module.__class__ = stock
    assert module_classes(model) == module_classes(others)
    assert_same_step(model, expected)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "head"])
def test_a_users_class_that_passes_on_its_arguments(name):
    """The patch lies on top of the user's class, and its code runs."""
    model = build(tie_word_embeddings=False).train()
    module = MODULES[name](model)
    expected, stock = step(copy.deepcopy(model), make_batch("cpu")), type(module)
    mine = put_on_top(module)
    with warnings.catch_warnings(), apply_liger_kernel_to_llama(model=model):
        warnings.simplefilter("error")
        assert isinstance(module, mine) and isinstance(module, patches.find_patch(stock))
        assert_same_step(model, expected)
    assert type(module) is mine


def test_a_class_that_was_reset_by_hand():
    """The next call patches the module again."""
    model = build()
    before, mlp = module_classes(model), MODULES["MLP"](model)
    with apply_liger_kernel_to_llama(model=model):
        mlp.__class__ = before[list(model.modules()).index(mlp)]
        with apply_liger_kernel_to_llama(model=model):
            assert type(mlp) is llama.LlamaMLP
        assert type(mlp) is not llama.LlamaMLP and type(model) is llama.LlamaForCausalLM
    assert module_classes(model) == before


class Halved(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def parametrize_some(model):
    for name in PARAMETRIZED:
        parametrize.register_parametrization(MODULES[name](model), "weight", Halved())


def remove_parametrizations(model):
    for name in PARAMETRIZED:
        parametrize.remove_parametrizations(MODULES[name](model), "weight")


PARAMETRIZED = "norm", "last norm", "head"


@pytest.mark.parametrize("order", [
    "parametrize patch", "parametrize patch revert", "parametrize patch remove", "parametrize patch remove revert",
    "parametrize patch revert remove", "parametrize patch revert patch remove revert", "patch parametrize remove",
    "patch parametrize remove revert", "patch parametrize revert", "patch parametrize revert remove",
    "patch parametrize patch revert remove", "parametrize patch remove parametrize revert",
])  # fmt: skip
def test_parametrizations_in_any_order(order):
    stock = build(tie_word_embeddings=False).train()
    model, handles = copy.deepcopy(stock), []
    for action in order.split():
        if action == "patch":
            handles.append(apply_liger_kernel_to_llama(model=model))
        elif action == "revert":
            while handles:
                handles.pop().revert()
        else:
            for one in (stock, model):
                {"parametrize": parametrize_some, "remove": remove_parametrizations}[action](one)
        assert_same_step(model, step(stock, make_batch("cpu")))
    for norm in (MODULES[name](model) for name in ("norm", "last norm")):
        assert isinstance(norm, llama.LlamaRMSNorm) is bool(handles)
    assert [cls.__name__ for cls in module_classes(model)] == [cls.__name__ for cls in module_classes(stock)]
    if not handles and not order.count("parametrize") > order.count("remove"):
        assert module_classes(model) == module_classes(stock)


def test_a_class_of_torchs_is_found_again():
    """Returns the class that PyTorch built, if it is unchanged: modules that shared a class share one again."""
    stock = nn.Linear(2, 2)
    parametrize.register_parametrization(stock, "weight", Halved())
    made = type(stock)
    copied = classes.with_ancestor(made, nn.Linear, head.Linear)
    assert copied is classes.with_ancestor(made, nn.Linear, head.Linear) and copied.__bases__ == (head.Linear,)
    assert classes.with_ancestor(copied, head.Linear, nn.Linear) is made
    parametrize.register_parametrization(stock, "bias", Halved())  # adds to the class
    changed = classes.with_ancestor(made, nn.Linear, head.Linear)
    assert changed is not copied and {"weight", "bias"} <= vars(changed).keys()
    assert classes.with_ancestor(copied, head.Linear, nn.Linear) is not made
    alive = weakref.ref(changed)
    del changed
    gc.collect()
    assert alive() is None
