"""The arguments of an op are bound by their names, from its schema."""

import inspect

import pytest
import torch

from liger_ext import _C
from liger_ext.functional import cross_entropy, fused_linear_cross_entropy, linear_log_probs
from liger_ext.ops._schema import argument_names, called_by_name, with_names

_OP = torch.ops.liger_ext.rms_norm.default


def test_a_parameter_that_the_schema_lacks():
    with pytest.raises(TypeError, match="the schema has no 'epsilon'; it has x, weight, eps"):
        with_names(lambda x, epsilon: None, argument_names(_OP))


def test_values_by_name():
    names = argument_names(_OP)
    assert with_names(lambda offset, x: (offset, x), names)("xwefc") == ("f", "x")
    assert with_names(lambda eps: eps, names)("xwefc") == "e"
    assert with_names(lambda ctx, values: (ctx, values), names, 1)("xwefc", "ctx") == (
        "ctx",
        dict(zip(names, "xwefc", strict=True)),
    )
    x = torch.randn(2, 3)
    y, _ = called_by_name(_OP)({"weight": None, "x": x, "offset": 0.0, "casting_mode": 0, "eps": 0.0, "other": 1})
    torch.testing.assert_close(y, x * x.square().mean(-1, keepdim=True).rsqrt())


@pytest.mark.parametrize("function", [cross_entropy, fused_linear_cross_entropy, linear_log_probs])
def test_public_defaults_are_those_of_the_op(function):
    """csrc/checks has the default of each option once more, for plans."""
    public = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    shared = (_C.loss_defaults.keys() & public.keys()) - {"reduction", "temperature"}  # of other types
    assert len(shared) >= 5
    assert {name: public[name] for name in shared} == {name: _C.loss_defaults[name] for name in shared}
