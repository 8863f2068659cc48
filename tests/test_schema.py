"""The arguments of an op are bound by their names, from its schema."""

import inspect

import pytest
import torch

from liger_ext import _C
from liger_ext.functional import cross_entropy, fused_linear_cross_entropy, linear_log_probs
from liger_ext.ops._loss_arguments import FLOATS
from liger_ext.ops._schema import argument_names, with_names


def test_a_parameter_that_the_schema_lacks():
    with pytest.raises(TypeError, match="the schema has no 'epsilon'; it has x, weight, eps"):
        with_names(lambda x, epsilon: None, argument_names(torch.ops.liger_ext.rms_norm.default))


@pytest.mark.parametrize("function", [cross_entropy, fused_linear_cross_entropy, linear_log_probs])
def test_public_defaults_are_those_of_the_op(function):
    """csrc/checks has the default of each option once more, for plans."""
    public = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    shared = (_C.loss_defaults.keys() & public.keys()) - {"reduction", "temperature"}  # of other types
    assert len(shared) >= 5
    assert {name: public[name] for name in shared} == {name: _C.loss_defaults[name] for name in shared}


def test_each_op_of_a_loss_has_the_options_that_change_its_gradient():
    """An op that lacked an option would use the option's default."""
    shard = [f"vocabulary_shard_{name}" for name in ("losses_", "backward", "backward_")]
    fused = ["fused_linear_cross_entropy_backward_", *shard]
    for name, others in {"cross_entropy": [], "fused_linear_cross_entropy": fused}.items():
        options = set(argument_names(getattr(torch.ops.liger_ext, name).default)) & {*FLOATS, "use_token_scaling"}
        for other in (f"{name}_backward", *others):
            assert options <= set(argument_names(getattr(torch.ops.liger_ext, other).default)), other
