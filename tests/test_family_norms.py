"""Tests of the patched norms of families, each class against transformers'. `test_gated_norms.py` tests norms with a
gate."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from cases import RecordCalls, normal
from llama_models import distance, one_thread, rounding  # noqa: F401
from torch import nn

from liger_ext.models.modules import norms
from liger_ext.models.patches import find_patch

SIZE = 48
CONFIG = SimpleNamespace(hidden_size=SIZE, eps=1e-3)
CLASSES = {  # {module.class: arguments of the constructor}
    "cpmant.CpmAntLayerNorm": ((CONFIG,), {}),
    "deepseek_v4.DeepseekV4UnweightedRMSNorm": ((), dict(eps=1e-3)),
    "gemma.GemmaRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "helium.HeliumRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "llama.LlamaRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "moshi.MoshiRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "muse_spark.MuseSparkTextCenteredRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "muse_spark.MuseSparkTextInputScaledRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "nemotron_h.NemotronHRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "olmo.OlmoLayerNorm": ((SIZE,), {}),
    "olmo2.Olmo2RMSNorm": ((SIZE,), dict(eps=1e-3)),
    "qwen4_exp.Qwen4ExpTextRMSNorm": ((SIZE,), dict(eps=1e-3)),
    "qwen4_exp.Qwen4ExpTextRMSNorm of groups": ((SIZE, SIZE // 3), dict(eps=1e-3)),
}


def build_norm(name):
    folder, _, cls = name.partition(".")
    path = f"transformers.models.{folder}"
    if importlib.util.find_spec(path) is None:
        pytest.skip("a newer transformers has it")
    arguments, options = CLASSES[name]
    stock = getattr(importlib.import_module(f"{path}.modeling_{folder}"), cls.split()[0])(*arguments, **options)
    for parameter in stock.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return stock


def results(norm, x):
    """Returns the results of a forward and a backward."""
    x = x.clone().requires_grad_()
    norm.zero_grad()
    out = norm(x)
    out.backward(normal(*out.shape, dtype=out.dtype, seed=9).to(out.device))
    return [out.detach(), x.grad, *(p.grad for p in norm.parameters())]


@pytest.mark.parametrize("dtypes", ["fp32", "bf16", "fp32 weight", "bf16 weight"])
@pytest.mark.parametrize("name", CLASSES)
def test_equals_stock(device, name, dtypes):
    stock = build_norm(name).to(device, torch.bfloat16 if dtypes in ("bf16", "bf16 weight") else torch.float32)
    dtype = torch.bfloat16 if dtypes in ("bf16", "fp32 weight") else torch.float32
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()  # float64 except for casts to fp32 in its code
    ours.__class__ = find_patch(type(stock))
    for shape in ((2, 5, SIZE), (7, SIZE)):
        x = (0.1 * normal(*shape, seed=1)).to(device, dtype)  # the mean square is near eps
        with RecordCalls() as record:
            found = results(ours, x)
        assert {"rms_norm", "layer_norm"} & set(record.names)
        for a, b, c in zip(found, results(stock, x), results(exact, x.double()), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert distance(a, c) <= 1.5 * distance(b, c) + rounding(a.dtype)


@pytest.mark.parametrize("name", [name for name in CLASSES if "Unweighted" not in name])  # these round once more
def test_rounds_where_stock_does(device, name):
    stock = build_norm(name).to(device, torch.bfloat16)
    ours = copy.deepcopy(stock)
    ours.__class__ = find_patch(type(stock))
    x = normal(50, SIZE, seed=1).to(device, torch.bfloat16)
    assert (ours(x) != stock(x)).float().mean() < 0.01  # differences by the order of an fp32 sum


@pytest.mark.parametrize(
    "name, attribute, value",
    [
        ("cpmant.CpmAntLayerNorm", "liger_arguments", lambda m: (m.weight, 1e-6, 0.0, "llama")),
        ("deepseek_v4.DeepseekV4UnweightedRMSNorm", "liger_arguments", lambda m: (None, 1e-6)),
        ("helium.HeliumRMSNorm", "OFFSET", 1),
        ("moshi.MoshiRMSNorm", "OFFSET", 1),
        ("moshi.MoshiRMSNorm", "liger_arguments", lambda m: (m.weight, 1e-6, 0.0, "gemma")),
        ("muse_spark.MuseSparkTextCenteredRMSNorm", "OFFSET", 0),
        ("muse_spark.MuseSparkTextInputScaledRMSNorm", "_eps", lambda self: 1e-6),
        ("nemotron_h.NemotronHRMSNorm", "liger_arguments", lambda m: (m.weight, 1e-6, 0.0, "gemma")),
        ("olmo.OlmoLayerNorm", "forward", lambda self, x: norms.functional.rms_norm(x)),
        ("qwen4_exp.Qwen4ExpTextRMSNorm", "OFFSET", 0),
        ("qwen4_exp.Qwen4ExpTextRMSNorm of groups", "OFFSET", 0),
    ],
)
def test_a_wrong_entry_would_be_found(monkeypatch, name, attribute, value):
    monkeypatch.setattr(find_patch(type(build_norm(name))), attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), name, "fp32")


@pytest.mark.parametrize(
    "name, kind, instead",
    [
        ("helium.HeliumRMSNorm", norms.RMSNormInFloat, norms.RMSNorm),
        ("moshi.MoshiRMSNorm", norms.RMSNormInFloat, norms.RMSNorm),
        ("muse_spark.MuseSparkTextCenteredRMSNorm", norms.MuseSparkRMSNorm, norms.ZeroCenteredRMSNorm),
    ],
)
def test_another_rounding_would_be_found(monkeypatch, name, kind, instead):
    patch = find_patch(type(build_norm(name)))
    assert kind in patch.__mro__
    for attribute in ("liger_arguments", "_normalise", "CASTING"):
        value = getattr(instead, attribute)
        monkeypatch.setattr(patch, attribute, staticmethod(value) if attribute == "_normalise" else value)
    with pytest.raises(AssertionError):
        test_rounds_where_stock_does(torch.device("cpu"), name)
