"""A second patch of a model: it adds to the first, and says what it changes or cannot change."""

import copy
import warnings

import pytest
from llama_models import build, one_thread, patched  # noqa: F401
from test_patch import LOSS_OF_LOGITS, classes

from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama

ADDED = "{}: left out by an earlier call for this model, and patched now, as this call says"
KEPT = "{}: patched by an earlier call, and stays so: revert its handle first"
NO_LOSS = dict(fused_linear_cross_entropy=False)
SECOND = {  # the arguments of both calls, and what the second one says
    "the same": ({}, {}, []),
    "the same again": (dict(rope=False, memory="low"), dict(rope=False), []),
    "more": (dict(rope=False, swiglu=False), {}, [ADDED.format("rope, swiglu")]),
    "norms": (dict(rms_norm=False), {}, [ADDED.format("rms_norm, fused_add_rms_norm")]),
    "less": (
        {}, dict(rms_norm=False, **NO_LOSS), [KEPT.format("fused_linear_cross_entropy, rms_norm, fused_add_rms_norm")],
    ),
    "both": (dict(rope=False), dict(swiglu=False), [ADDED.format("rope"), KEPT.format("swiglu")]),
    "the fused loss": (NO_LOSS, {}, [ADDED.format("fused_linear_cross_entropy")]),
    "another loss": ({}, LOSS_OF_LOGITS, [KEPT.format("fused_linear_cross_entropy")]),
    "the fused loss for another": (
        LOSS_OF_LOGITS, {}, [ADDED.format("fused_linear_cross_entropy"), KEPT.format("cross_entropy")],
    ),
    "no loss": (LOSS_OF_LOGITS, NO_LOSS, [KEPT.format("cross_entropy")]),
}  # fmt: skip


def said(call):
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        call()
    assert {warning.filename for warning in record} <= {__file__}
    return [str(warning.message) for warning in record]


@pytest.mark.parametrize("first, second, expected", SECOND.values(), ids=SECOND)
@pytest.mark.parametrize("function", [apply_liger_kernel_to_llama, apply_liger_kernel_to_instance])
def test_what_a_second_call_says(function, first, second, expected):
    model = build()
    assert said(lambda: function(model=model, **first)) == []
    assert said(lambda: function(model=model, **second)) == expected


@pytest.mark.parametrize("first, second, expected", SECOND.values(), ids=SECOND)
def test_a_call_that_is_reverted_is_forgotten(first, second, expected):
    model = build()
    assert said(lambda: apply_liger_kernel_to_llama(model=model, **first).revert()) == []
    assert said(lambda: apply_liger_kernel_to_llama(model=model, **second)) == []


def test_parts_first():
    """A layer is patched, and then the model: nothing was left out."""
    model = build()
    assert said(lambda: apply_liger_kernel_to_instance(model.model.layers[0], memory="low")) == []
    assert said(lambda: apply_liger_kernel_to_llama(model=model)) == []
    assert classes(model) == classes(patched(build()))
    assert levels(model) == {"low"}


def test_models_that_were_built_patched():
    with apply_liger_kernel_to_llama(rope=False, memory="low"):
        model = build()
    handles = []
    assert said(lambda: handles.append(apply_liger_kernel_to_instance(model))) == [ADDED.format("rope")]
    assert levels(model) == {"low"}
    handles += [apply_liger_kernel_to_instance(model, memory="min")]
    assert levels(model) == {"min"}
    for handle in handles:
        handle.revert()
    assert classes(model) == classes(patched(build(), rope=False)) and levels(model) == {"low"}


def levels(model):
    return {module.liger_memory for module in model.modules() if hasattr(module, "liger_memory")}


def test_the_level_of_the_last_call_that_names_one():
    """Until its handle is reverted; then that of the one before, in any order."""
    model, handles = build(), {}
    for level, expected in ((None, "auto"), ("low", "low"), (None, "low"), ("fast", "fast"), (None, "fast")):
        handles[len(handles)] = apply_liger_kernel_to_llama(model=model, memory=level)
        assert levels(model) == {expected}
    copied = copy.deepcopy(model)
    for reverted, expected in ((4, "fast"), (1, "fast"), (3, "low"), (2, "auto"), (0, None)):
        handles[reverted].revert()
        assert levels(model) == ({expected} if expected else set())
    assert not any("liger_memory" in vars(module) for module in model.modules())
    with apply_liger_kernel_to_llama(model=copied, memory="min"):
        assert levels(copied) == {"min"}
    assert levels(copied) == {"fast"}
