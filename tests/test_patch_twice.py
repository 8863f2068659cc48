"""A second patch of one model: what is patched already stays as it is, and other options are an error."""

import copy
import logging
import pickle
import re
import warnings

import pytest
from llama_models import build, one_thread, patched  # noqa: F401
from test_patch import LOSS_OF_LOGITS, classes, traces
from torch import nn
from transformers import Trainer, TrainingArguments

from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama, compat
from liger_ext.models import llama

NO_LOSS = dict(fused_linear_cross_entropy=False)
OPTIONS = [{}, dict(rope=False), dict(rms_norm=False, swiglu=False), LOSS_OF_LOGITS, NO_LOSS]
OTHERS = [  # the options of both calls, and those that the error names, with their values now
    (dict(rope=False, swiglu=False), {}, dict(rope=False, swiglu=False)),
    ({}, dict(rms_norm=False), dict(rms_norm=True, fused_add_rms_norm=True)),
    (dict(rope=False), dict(swiglu=False), dict(rope=False, swiglu=True)),
    (NO_LOSS, {}, dict(fused_linear_cross_entropy=False)),
    ({}, LOSS_OF_LOGITS, dict(cross_entropy=False, fused_linear_cross_entropy=True)),
    (LOSS_OF_LOGITS, NO_LOSS, dict(cross_entropy=True)),
]
functions = pytest.mark.parametrize("function", [apply_liger_kernel_to_llama, apply_liger_kernel_to_instance])


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def state(model):
    """All that a patch changes, and the values that it sets."""
    return [(cls, {name: vars(module)[name] for name in names if "liger" in name or name == "_loss_function"})
            for (cls, names), module in zip(traces(model), model.modules(), strict=True)]  # fmt: skip


def levels(model):
    return {module.liger_memory for module in model.modules() if hasattr(module, "liger_memory")}


@functions
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("how", ["itself", "a wrapper", "a part", "a copy", "a pickle"])
def test_the_same_options_change_nothing(function, options, how):
    model = stock = build()
    handle = apply_liger_kernel_to_llama(model=model, memory="low", **options)
    if how in ("a copy", "a pickle"):
        model = copy.deepcopy(model) if how == "a copy" else pickle.loads(pickle.dumps(model))
        assert state(model) == state(stock)
    before = state(model)
    second = {"a wrapper": nn.Sequential(model), "a part": model.model.layers[1]}.get(how, model)
    function(model=second, **options).revert()
    assert state(model) == before and levels(model) == {"low"}
    handle.revert()
    assert traces(stock) == traces(build())


@functions
@pytest.mark.parametrize("first, second, named", OTHERS)
@pytest.mark.parametrize("copied", [False, True])
def test_other_options_are_an_error(function, first, second, named, copied):
    model = patched(build(), **first) if copied else build()
    handle = None if copied else apply_liger_kernel_to_llama(model=model, **first)
    before = state(model)
    said = ", ".join(f"{name} is {value} (asked for: {not value})" for name, value in named.items())
    with pytest.raises(ValueError, match=re.escape(f"LlamaForCausalLM is patched already, with other options: {said}.")):
        function(model=model, memory="low", **second)
    assert state(model) == before
    if handle is not None:
        handle.revert()
        with function(model=model, **second):
            assert state(model) == state(patched(build(), **second))
        assert traces(model) == traces(build())


def test_options_without_a_meaning():
    """relu is no activation of ours, a layer has no head, and these models have no nn.LayerNorm."""
    model = build(hidden_act="relu")
    apply_liger_kernel_to_llama(model=model)
    apply_liger_kernel_to_llama(model=model, swiglu=False)
    apply_liger_kernel_to_llama(model=model.model.layers[0], **NO_LOSS)
    with pytest.raises(ValueError, match=r"options: rope is True \(asked for: False\)\. Call revert\(\) on the handle"):
        apply_liger_kernel_to_llama(model=model, swiglu=False, rope=False)


def test_memory_alone_may_differ():
    model = build()
    handle = apply_liger_kernel_to_llama(model=model, rope=False)
    before = state(model)
    with apply_liger_kernel_to_llama(model=model, rope=False, memory="low"):
        apply_liger_kernel_to_llama(model=model, rope=False)
        assert levels(model) == {"low"}
    assert state(model) == before and levels(model) == {"auto"}
    apply_liger_kernel_to_llama(model=model, rope=False, memory="min")
    handle.revert()
    assert traces(model) == traces(build())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_parts_and_then_the_rest(order):
    """Each handle reverts its own part, and those of other models theirs."""
    model, other = build(), build()
    handles = [apply_liger_kernel_to_instance(layer, memory="low") for layer in model.model.layers]
    handles += [apply_liger_kernel_to_llama(model=model), apply_liger_kernel_to_llama(model=other)]
    assert state(model) == state(patched(build(), memory="low")) and state(other) == state(patched(build()))
    for reverted in order:
        handles[reverted].revert()
        found = type(model.model.layers[0]), type(model.model.layers[1]), type(model), type(other)
        left = order[order.index(reverted) + 1 :]
        assert [cls.__module__ == llama.__name__ for cls in found] == [index in left for index in range(4)]
    assert traces(model) == traces(other) == traces(build())


def test_of_several_patches_of_a_class_the_last_counts():
    """For the models that are built then; they stay as they were built."""
    with apply_liger_kernel_to_llama(rope=False, memory="low") as first:
        with apply_liger_kernel_to_llama(swiglu=False), compat.install():
            from liger_kernel.transformers import apply_liger_kernel_to_llama as under_that_name

            with under_that_name(rms_norm=False):
                assert state(build()) == state(patched(build_stock(), swiglu=False))
            second = apply_liger_kernel_to_llama()
            first.revert()
        assert classes(model := build()) == classes(patched(build_stock()))
        second.revert()
    assert traces(build()) == traces(build_stock())
    with pytest.raises(ValueError, match=r"There is none for a model that was built under a patch of its class"):
        apply_liger_kernel_to_llama(model=model, rope=False)
    apply_liger_kernel_to_llama(model=model).revert()
    assert classes(model) == classes(patched(build_stock()))


STOCK = build()


def build_stock():
    return copy.deepcopy(STOCK)


@pytest.mark.parametrize("options, level", [(dict(rope=False), logging.INFO), ({}, logging.WARNING)])
@pytest.mark.parametrize("built", [False, True])
def test_a_trainer_changes_nothing_and_says_so(tmp_path, caplog, options, level, built):
    if built:
        with apply_liger_kernel_to_llama(rope=False, memory="low"):
            model = build()
    else:
        apply_liger_kernel_to_llama(model=(model := build()), rope=False, memory="low")
    before = state(model)
    arguments = TrainingArguments(
        str(tmp_path), use_liger_kernel=True, liger_kernel_config=options, max_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    ids = model.lm_head.weight.new_ones(5).long()
    with compat.install(), caplog.at_level(logging.INFO, "liger_ext"):
        Trainer(model, arguments, train_dataset=[dict(input_ids=ids, labels=ids)]).train()
    assert state(model) == before
    said = "LlamaForCausalLM is patched already, and stays as it is"
    said += ": rope is False (asked for: True)" if level == logging.WARNING else ""
    assert [(record.levelno, record.message) for record in caplog.records if record.name == "liger_ext"] == [
        (level, said)
    ]
