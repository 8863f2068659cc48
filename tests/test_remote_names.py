"""Code that comes with weights (`trust_remote_code=True`) and has the source text of known code, but whose names refer
to other objects, or collide with names of our mixins: a patch must not change its results."""

import copy
import importlib
import re
import sys
import types
import warnings

import pytest
import torch
from torch import nn

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.models.patches import is_patch

NORM = """
import torch
from torch import nn

class XRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.eps = 1e-3

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)
"""
MLP = """
from torch import nn

class XMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 48)
        self.up = nn.Linear(32, 48)
        self.down = nn.Linear(48, 32)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))
"""


@pytest.fixture
def build_pair(tmp_path, monkeypatch, request):
    """Builds a module from a class in a file of `transformers_modules`, and a patched copy."""
    package = types.ModuleType("transformers_modules")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "transformers_modules", package)

    def make(text, old="", new=""):
        assert old in text
        name = f"transformers_modules.x{len(list(tmp_path.iterdir()))}_{abs(hash(request.node.name))}"
        (tmp_path / f"{name.partition('.')[2]}.py").write_text(text.replace(old, new) if old else text)
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        torch.manual_seed(0)
        stock = next(cls for key, cls in vars(module).items() if key.startswith("X"))()
        holder = nn.Module()
        holder.m, holder.config = copy.deepcopy(stock), types.SimpleNamespace(model_type="x")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            apply_liger_kernel_to_instance(holder)
        patched = any(map(is_patch, type(holder.m).__mro__))
        assert patched or any(type(stock).__name__ in str(w.message) or "stays" in str(w.message) for w in caught)
        return stock, holder.m, patched

    return make


def assert_same(stock, ours, *names):
    def results(module):
        x = torch.linspace(-2, 3, 160).view(1, 5, 32).requires_grad_()
        out = module(**dict.fromkeys(names, x)) if names else module(x)
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in module.parameters())]

    for found, expected in zip(results(ours), results(stock), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "old, new",
    [
        ("1e-3", "nn.Parameter(torch.tensor(1e-1))"),
        ("1e-3", "torch.linspace(0.1, 1, 32)"),
        ("torch.linspace(0.5, 1.5, 32)", "torch.tensor(1.5)"),
        ("torch.linspace(0.5, 1.5, 32)", "torch.ones(1)"),
        ("torch.linspace(0.5, 1.5, 32)", "torch.rand(5, 32)"),
    ],
)
def test_a_norm_of_other_tensors(build_pair, old, new):
    """No fused norm accepts these tensors: the author's code runs in every step."""
    stock, ours, patched = build_pair(NORM, old, new)
    assert patched
    assert_same(stock, ours)


@pytest.mark.parametrize("text", [NORM, MLP])
@pytest.mark.parametrize("name", ["fits", "gate", "known"])
def test_any_name_of_an_argument(build_pair, text, name):
    """Also the name of a variable in our `forward`, such as `fits` in the norms."""
    stock, ours, patched = build_pair(re.sub(r"\bx\b", name, text.replace("self.gate", "self.first")))
    assert patched
    assert_same(stock, ours, name)


@pytest.mark.parametrize(
    "old, new",
    [
        ("self.down", "self._down"),
        ("self.gate", "self._run"),
        ("self.act", "self.activation_op"),
        ("self.up", "self.UP"),
        ("        self.act =", "        self._run_down = 3\n        self.act ="),
        ("    def forward", "    FACTOR = 'scale'\n\n    def forward"),
        ("    def forward", "    def _down(self, h):\n        return 2 * h\n\n    def forward"),
    ],
)
def test_names_that_are_ours(build_pair, old, new):
    """A class that defines a name of our mixin stays unpatched."""
    stock, ours, patched = build_pair(MLP, old, new)
    assert not patched
    assert_same(stock, ours)
