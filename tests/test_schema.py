"""The arguments of an op are bound by their names, from its schema."""

import inspect

import pytest
import torch

from liger_ext import _C
from liger_ext.functional import cross_entropy, fused_linear_cross_entropy, linear_log_probs
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
