"""Gated norms of models with recurrent layers: each class of transformers compared with its patch. Qwen3-Next's norm is
tested in `test_families.py`."""

import copy
import importlib
import inspect

import pytest
import torch
from cases import RecordCalls, normal
from llama_models import distance, one_thread, rounding  # noqa: F401
from torch import nn

from liger_ext.models.modules import norms
from liger_ext.models.patches import find_patch

SIZE = 48
GROUP_OPTIONS = dict(group_size=SIZE // 3), dict(group_size=SIZE)
FALCON_OPTIONS = [dict(n_groups=groups, norm_before_gate=before) for groups in (1, 3) for before in (True, False)]
CLASSES = {  # the classes that our patches are named after, and their constructors' options
    "zamba2.Zamba2RMSNormGated": GROUP_OPTIONS,
    "mamba2.MambaRMSNormGated": GROUP_OPTIONS,
    "falcon_h1.FalconH1RMSNormGated": FALCON_OPTIONS,
    "kimi_linear.KimiLinearRMSNormGated": [{}],
}


def stock_class(name):
    folder, _, cls = name.partition(".")
    path = f"transformers.models.{folder}"
    if importlib.util.find_spec(path) is None:
        pytest.skip("a newer transformers has it")
    found = getattr(importlib.import_module(f"{path}.modeling_{folder}"), cls)
    if "Falcon" in name and find_patch(found) is None:
        pytest.skip("older code treats a sequence of one position as no sequence")
    return found


def results(norm, x, *gate):
    """Output and gradients, from one forward and one backward."""
    leaves = [t.clone().requires_grad_() for t in (x, *gate)]
    norm.zero_grad()
    out = norm(*leaves)
    out.backward(normal(*out.shape, dtype=out.dtype, seed=9).to(out.device))
    return [out.detach(), *(t.grad for t in leaves), norm.weight.grad]


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "bf16 gate", "fp32 weight", "float64"])
@pytest.mark.parametrize("name, options", [(name, o) for name, options in CLASSES.items() for o in options], ids=str)
def test_equals_stock(device, name, options, dtypes):
    cls = stock_class(name)
    taken = inspect.signature(cls).parameters
    stock = cls(SIZE, eps=1e-3, **{key: value for key, value in options.items() if key in taken}).to(device)
    nn.init.uniform_(stock.weight, 0.5, 1.5)
    of_all = torch.float64 if dtypes == "float64" else torch.float32 if dtypes == "fp32" else torch.bfloat16
    dtype = torch.float32 if dtypes == "bf16 gate" else of_all
    stock.to(torch.float32 if dtypes == "fp32 weight" else of_all)
    ours = copy.deepcopy(stock)
    ours.__class__ = find_patch(cls)
    exact = copy.deepcopy(stock).double()  # the stock code still casts some values to fp32
    gates = [1] if name.startswith("kimi") else [0, 1]
    for shape in ((2, 5, SIZE), (7, SIZE)):
        for count in gates:
            x = normal(*shape, dtype=dtype, seed=1).to(device)
            gate = [normal(*shape, dtype=of_all, seed=2).to(device)] * count
            with RecordCalls() as record:
                found = results(ours, x, *gate)
            assert bool(record.names) is (dtypes != "float64")
            expected, reference = results(stock, x, *gate), results(exact, x.double(), *(t.double() for t in gate))
            for a, b, c in zip(found, expected, reference, strict=True):
                assert a.dtype == b.dtype and a.shape == b.shape
                assert distance(a, c) <= 1.5 * distance(b, c) + rounding(a.dtype)


@pytest.mark.parametrize(
    "name, cls, attribute, value",
    [
        ("zamba2.Zamba2RMSNormGated", norms.GroupedGatedRMSNorm, "_count_groups", lambda self: 2),
        ("zamba2.Zamba2RMSNormGated", norms.GroupedGatedRMSNorm, "_gated", staticmethod(lambda x, gate: x)),
        ("falcon_h1.FalconH1RMSNormGated", norms.FalconGatedRMSNorm, "_count_groups", lambda self: 4),
        ("falcon_h1.FalconH1RMSNormGated", norms.FalconGatedRMSNorm, "forward", norms.GroupedGatedRMSNorm.forward),
        ("kimi_linear.KimiLinearRMSNormGated", norms, "ACT2FN", {"sigmoid": torch.tanh}),
    ],
)
def test_a_wrong_entry_would_be_found(monkeypatch, name, cls, attribute, value):
    monkeypatch.setattr(cls, attribute, value)
    patch = find_patch(stock_class(name))
    if attribute == "forward":  # the patch copied the original forward when it was built
        monkeypatch.setattr(patch, attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), name, CLASSES[name][0], "fp32")
