"""A second call that patches the same model: it leaves patched modules unchanged, and raises an error if its options,
`memory` apart, differ from those of the first call."""

import copy
import logging
import pickle
import re

import pytest
from llama_models import build, one_thread, patched  # noqa: F401
from test_patch import LOGITS_LOSS, global_state, traces
from torch import nn

from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama, compat

NO_LOSS = dict(fused_linear_cross_entropy=False)
functions = pytest.mark.parametrize("function", [apply_liger_kernel_to_llama, apply_liger_kernel_to_instance])
pytestmark = pytest.mark.filterwarnings("error::UserWarning:test_patch_twice")
STOCK = build()


def state(model):
    """All attributes that a patch sets."""
    ours = "liger_memory", "_liger_left_out", "_as_liger_kernel", "_loss_function"
    return [(type(module), *(vars(module).get(name) for name in ours)) for module in model.modules()]


def levels(model):
    return {module.liger_memory for module in model.modules() if hasattr(module, "liger_memory")}


@functions
@pytest.mark.parametrize("options", [{}, dict(rope=False, rms_norm=False), LOGITS_LOSS, NO_LOSS], ids=str)
@pytest.mark.parametrize("how", ["itself", "a wrapper", "a part", "a copy", "a pickle"])
def test_the_same_options_change_nothing(function, options, how):
    model = patched(STOCK, memory="low", **options)
    model = pickle.loads(pickle.dumps(model)) if how == "a pickle" else model
    again = {"a wrapper": nn.Sequential(model), "a part": model.model.layers[1], "a copy": copy.deepcopy(model)}
    before = state(model)
    function(model=again.get(how, model), **options).revert()
    assert state(model) == before == state(again["a copy"])


@functions
@pytest.mark.parametrize("first, second, named", [  # both calls' options, and the values that the error names
    (dict(rope=False), dict(swiglu=False), dict(rope=False, swiglu=True)),
    ({}, dict(rms_norm=False), dict(rms_norm=True, fused_add_rms_norm=True)),
    (NO_LOSS, {}, dict(fused_linear_cross_entropy=False)),
    ({}, LOGITS_LOSS, dict(cross_entropy=False, fused_linear_cross_entropy=True)),
    (LOGITS_LOSS, NO_LOSS, dict(cross_entropy=True)),
])  # fmt: skip
def test_other_options_are_an_error(function, first, second, named):
    model = copy.deepcopy(STOCK)
    handle = apply_liger_kernel_to_llama(model=model, **first)
    copied, before = copy.deepcopy(model), state(model)
    said = ", ".join(f"{name} is {value} (asked for: {not value})" for name, value in named.items())
    for one in (model, copied):
        with pytest.raises(ValueError, match=re.escape(f"is patched already, with other options: {said}. Call revert")):
            function(model=one, memory="low", **second)
        assert state(one) == before
    handle.revert()
    function(model=model, **second)
    assert state(model) == state(patched(STOCK, **second))


def test_options_without_a_meaning():
    """Options without effect: relu is not an activation of ours, and a layer has no head."""
    model = patched(build(hidden_act="relu"))
    apply_liger_kernel_to_llama(model=model, swiglu=False)
    apply_liger_kernel_to_llama(model=model.model.layers[0], **NO_LOSS)
    with pytest.raises(ValueError, match=r"options: rope is True \(asked for: False\)\. Call"):
        apply_liger_kernel_to_llama(model=model, swiglu=False, rope=False)


def test_memory_alone_may_differ():
    model = copy.deepcopy(STOCK)
    handle = apply_liger_kernel_to_llama(model=model)
    before = state(model)
    with apply_liger_kernel_to_llama(model=model, memory="low"):
        apply_liger_kernel_to_llama(model=model)
        assert levels(model) == {"low"}
    assert state(model) == before and levels(model) == {"auto"}
    second = apply_liger_kernel_to_llama(model=model, memory="min")
    handle.revert()
    second.revert()
    assert traces(model) == traces(STOCK)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_parts_and_then_the_rest(order):
    """Each handle reverts its own call, and leaves other parts and other models alone."""
    model, other = copy.deepcopy(STOCK), copy.deepcopy(STOCK)
    handles = [apply_liger_kernel_to_instance(layer, memory="low") for layer in model.model.layers]
    handles += [apply_liger_kernel_to_llama(model=one) for one in (model, other)]
    assert state(model) == state(patched(STOCK, memory="low")) and state(other) == state(patched(STOCK))
    for index, reverted in enumerate(order):
        handles[reverted].revert()
        for part, module in enumerate([*model.model.layers, model, other]):
            assert type(module).__module__.startswith("liger_ext") is (part in order[index + 1 :])
    assert traces(model) == traces(other) == traces(STOCK)


def test_of_several_patches_of_a_class_the_last_counts():
    """The last patch applies to models that are built later. A patch by liger_kernel's name yields to ours."""
    before = global_state()
    with compat.install():
        from liger_kernel.transformers import apply_liger_kernel_to_llama as by_that_name
    first = apply_liger_kernel_to_llama(rope=False, memory="low")
    with apply_liger_kernel_to_llama(swiglu=False), by_that_name(rms_norm=False):
        assert state(build()) == state(patched(STOCK, swiglu=False))
    with by_that_name(rms_norm=False):
        model = build()
    assert state(model) == state(patched(STOCK, rope=False, memory="low"))
    second = apply_liger_kernel_to_llama()
    first.revert()
    assert state(build()) == state(patched(STOCK))
    second.revert()
    assert global_state() == before
    with pytest.raises(ValueError, match="A model that was built under a patch of its class, or a copy, has no handle"):
        apply_liger_kernel_to_llama(model=model)


@pytest.mark.parametrize("options, level", [(dict(rope=False), logging.INFO), ({}, logging.WARNING)])
def test_a_name_of_liger_kernel_changes_nothing_and_says_so(caplog, options, level):
    """A Trainer makes this call. It only changes the level of memory, if it names one."""
    model = patched(STOCK, rope=False, memory="low")
    before = state(model)
    with compat.install(), caplog.at_level(logging.INFO, "liger_ext"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, **options).revert()
        assert state(model) == before
        _apply_liger_kernel_to_instance(model=model, rope=False, memory="min")
    assert levels(model) == {"min"}
    said = "LlamaForCausalLM is patched already, and keeps its options"
    more = ": rope is False (asked for: True)" if level == logging.WARNING else ""
    assert [record[1:] for record in caplog.record_tuples] == [(level, said + more), (logging.INFO, said)]
