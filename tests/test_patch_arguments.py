"""Arguments of the functions that patch: a wrong argument raises an error whose message names it."""

import functools
import re

import family_models
import numpy as np
import pytest
import torch
from llama_models import build, config
from test_patch import classes, global_state
from torch import nn
from transformers import LlamaForCausalLM

import liger_ext
from liger_ext import (
    apply_liger_kernel,
    apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_qwen2,
)


def test_both_cross_entropies_are_an_error():
    before = global_state()
    with pytest.raises(ValueError, match="exclude each other"):
        apply_liger_kernel_to_llama(cross_entropy=True)
    assert global_state() == before


@pytest.mark.parametrize("value", ["no", 1, 0, 1.0, None, torch.tensor(True), np.True_], ids=repr)
@pytest.mark.parametrize("name, family", [("rms_norm", "llama"), ("cross_entropy", "llama"), ("geglu", "gemma")])
def test_a_switch_that_is_no_bool_is_an_error(name, family, value):
    before = global_state()
    message = f"{name} is {value!r}, of {type(value)}, expected Python's True or False"
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(liger_ext, f"apply_liger_kernel_to_{family}")(**{name: value})
    assert global_state() == before


def test_a_model_in_the_place_of_a_switch_is_an_error():
    with pytest.raises(TypeError, match=r"rope is LlamaForCausalLM\(, of .*; a model is given by its name, model="):
        apply_liger_kernel_to_llama(build())


def test_a_model_without_llama_is_an_error():
    with pytest.raises(ValueError, match="Linear holds no llama model"):
        apply_liger_kernel_to_llama(model=nn.Linear(2, 2))


def test_a_model_of_another_family_is_an_error():
    qwen2 = family_models.build("qwen2")
    before = classes(qwen2)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM holds no llama model"):
        apply_liger_kernel_to_llama(model=qwen2)
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no qwen2 model"):
        apply_liger_kernel_to_qwen2(model=build())
    assert classes(qwen2) == before


BY_TYPE = functools.partial(apply_liger_kernel, "llama")


@pytest.mark.parametrize("function", [apply_liger_kernel_to_instance, apply_liger_kernel_to_llama, BY_TYPE])
@pytest.mark.parametrize(
    "model", ["llama", [nn.Linear(2, 2)], LlamaForCausalLM, config()], ids=lambda m: type(m).__name__
)
def test_what_is_no_model_is_an_error(function, model):
    with pytest.raises(TypeError, match=r"^model is .*, of <class '.*'>, expected a model, which is an nn\.Module"):
        function(model=model)


def test_none_is_no_instance():
    """For functions that require a model, where None does not mean all models that are built later."""
    with pytest.raises(TypeError, match="model is None, of <class 'NoneType'>, expected a model"):
        apply_liger_kernel_to_instance(None)
