"""Feed-forward layers of model families, one by one: each class of transformers compared with our patch."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from cases import RecordCalls, normal
from family_models import patch_named
from llama_models import distance, one_thread, rounding  # noqa: F401
from torch import nn

from liger_ext.functional import swiglu
from liger_ext.models.modules import mlp
from liger_ext.models.patches import find_patch

SIZES = dict(hidden_size=32, intermediate_size=48, hidden_act="silu", mlp_bias=True)
LIMITS = dict(swiglu_limit=0.7, swiglu_alpha=1.7)  # limits that some values exceed
# By module and class: configuration options (None: no configuration), and the constructor's other arguments.
CLASSES = {
    "beam.BeamMLP": ({}, ()),
    "bitnet.BitNetMLP": (dict(rms_norm_eps=1e-5), ()),
    "deepseek_v4.DeepseekV4MLP": (LIMITS, ()),
    "dory.DoryMLP": ({}, ()),
    "falcon_h1.FalconH1MLP": (dict(mlp_multipliers=[0.7, 1.3]), ()),
    "gemma3n.Gemma3nTextMLP": (
        dict(intermediate_size=[48], activation_sparsity_pattern=[0.0], hidden_activation="gelu_pytorch_tanh"),
        (0,),
    ),
    "glm5_next.Glm5NextTextMLP": (LIMITS, ()),
    "glm5_next.Glm5NextVisionMLP": (LIMITS, ()),
    "granitemoeshared.GraniteMoeSharedMLP": (dict(shared_intermediate_size=48), ()),
    "gte.GteMLP": (dict(hidden_dropout_prob=0.0), ()),
    "idefics.IdeficsMLP": (None, (32, 48, "silu")),
    "idefics2.Idefics2MLP": (None, (32, 48, 32, "silu")),
    "inkling.InklingMLP": ({}, ()),
    "lfm2.Lfm2MLP": (dict(block_auto_adjust_ff_dim=False), ()),
    "llama.LlamaMLP": ({}, ()),
    "minimax_m3_vl.MiniMaxM3VLDenseMLP": (LIMITS | dict(dense_intermediate_size=48), ()),
    "modernbert.ModernBertMLP": (dict(mlp_dropout=0.0, hidden_activation="gelu"), ()),
    "t5gemma.T5GemmaMLP": (dict(dropout_rate=0.0, hidden_activation="gelu_pytorch_tanh"), ()),
    "step3p7.Step3p7MLP": (dict(swiglu_limits_shared=None), (0,)),
}

WITHOUT_ACTIVATION = "lfm2.Lfm2MLP", "minimax_m3_vl.MiniMaxM3VLDenseMLP"


def build_mlp(name, device="cpu", dtype=torch.float32):
    folder, _, cls = name.partition(".")
    path = f"transformers.models.{folder}"
    if importlib.util.find_spec(path) is None:
        pytest.skip("a newer transformers has it")
    options, arguments = CLASSES[name]
    found = getattr(importlib.import_module(f"{path}.modeling_{folder}"), cls)
    torch.manual_seed(0)
    config = [] if options is None else [SimpleNamespace(**{**SIZES, **options})]
    stock = found(*config, *arguments).to(device, dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stock


def patched(stock):
    ours = copy.deepcopy(stock)
    ours.__class__ = find_patch(type(stock))
    return ours


def results(module, x):
    """Output and gradients, from one forward and one backward."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    torch.manual_seed(1)  # for dropout
    out = module(x)
    out.backward(normal(*out.shape, dtype=out.dtype, seed=9).to(out.device))
    return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def assert_equals_stock(stock, ours, x):
    reference = results(copy.deepcopy(stock).double(), x.double())
    with RecordCalls() as record:
        found = results(ours, x)
    assert {"glu", "glu_packed"} & set(record.names)
    for name, expected in results(stock, x).items():
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape
        if expected.numel() == 1 and expected.dtype is torch.bfloat16:
            continue  # the error of a single number is random
        bound = 1.5 * distance(expected, reference[name]) + rounding(expected.dtype)
        assert distance(found[name], reference[name]) <= bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CLASSES)
def test_equals_stock(device, name, dtype):
    stock = build_mlp(name, device, dtype)
    assert_equals_stock(stock, patched(stock), normal(2, 7, 32, dtype=dtype, seed=1).to(device))


@pytest.mark.parametrize("name", CLASSES)
def test_random_numbers_are_those_of_stock(device, name):
    """Dropout in adapters draws its random numbers in the order in which the adapters are called."""
    stock = build_mlp(name, device)
    for child, linear in list(stock.named_children()):
        if isinstance(linear, nn.Linear):
            setattr(stock, child, nn.Sequential(nn.Dropout(), linear))
    for dropout in (module for module in stock.modules() if isinstance(module, nn.Dropout)):
        dropout.p = 0.5  # includes the MLP's dropout
    x = normal(2, 7, 32, seed=1).to(device)
    found, expected = results(patched(stock), x), results(stock, x)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-4, msg=key)


def test_most_columns_of_a_gate_may_be_zero(device):
    stock = build_mlp("gemma3n.Gemma3nTextMLP", device)
    stock.activation_sparsity = 0.8
    ours, x = patched(stock), normal(2, 7, 32, seed=1).to(device)
    with RecordCalls() as record:
        found = ours(x)
    assert not record.names
    torch.testing.assert_close(found, stock(x), rtol=0, atol=0)


def test_a_projection_of_another_dtype(device):
    """As adapters may return it: torch then computes the gated activation, with type promotion."""
    stock = build_mlp("lfm2.Lfm2MLP", device)
    stock.w3 = nn.Sequential(stock.w3, Cast(torch.bfloat16))
    x = normal(2, 7, 32, seed=1).to(device)
    torch.testing.assert_close(patched(stock)(x), stock(x), rtol=0, atol=0)


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


@pytest.mark.parametrize("limit", [None, 0.7])
def test_a_limit_behind_the_activation_stays_as_it_is(device, limit):
    stock = build_mlp("step3p7.Step3p7MLP", device)
    stock.limit = limit or stock.limit
    ours, x = patched(stock), normal(2, 7, 32, seed=1).to(device)
    with RecordCalls() as record:
        found = ours(x)
    assert (record.names == []) is (limit is not None)
    torch.testing.assert_close(found, stock(x))


@pytest.mark.parametrize("name", [n for n in CLASSES if n not in WITHOUT_ACTIVATION])
def test_an_activation_that_is_not_known(device, name):
    stock = build_mlp(name, device)
    setattr(stock, find_patch(type(stock)).ACTIVATION, nn.Tanh())
    x = normal(2, 7, 32, seed=1).to(device)
    with RecordCalls() as record:
        found = patched(stock)(x)
    assert not record.names
    torch.testing.assert_close(found, stock(x), rtol=0, atol=0)


def _gate_alone(self, gate, up):
    return gate.clamp(max=getattr(self, self.LIMIT)), up


def _up_alone(self, gate, up):
    limit = getattr(self, self.LIMIT)
    return gate, up.clamp(min=-limit, max=limit) + (self.ALPHA is not None)


def _wrong_down(self, h):
    return 0.9 * getattr(self, self.DOWN)(h)


WRONG = [
    ("bitnet.BitNetMLP", "bitnet.BitNetMLP", "BEFORE_DOWN", None),
    ("gemma3n.Gemma3nTextMLP", mlp.MLP, "ACTIVATION_OPS", dict.fromkeys(mlp.MLP.ACTIVATION_OPS, (swiglu, 1, 1))),
    ("granitemoeshared.GraniteMoeSharedMLP", mlp.PackedMLP, "_down", _wrong_down),
    ("idefics2.Idefics2MLP", mlp.MLP, "_down", _wrong_down),
    ("inkling.InklingMLP", "inkling.InklingMLP", "FACTOR", None),
    ("lfm2.Lfm2MLP", "lfm2.Lfm2MLP", "GATE", "w3"),
    ("dory.DoryMLP", "dory.DoryMLP", "GATE_VECTOR", "suv_up"),
    ("dory.DoryMLP", "dory.DoryMLP", "UP_VECTOR", "suv_gate"),
    ("dory.DoryMLP", "dory.DoryMLP", "VECTOR_SCALE", "hidden_size"),
    ("dory.DoryMLP", "dory.DoryMLP", "BEFORE_DOWN", None),
    ("beam.BeamMLP", mlp.MLP, "ACTIVATION_OPS", dict.fromkeys(mlp.MLP.ACTIVATION_OPS, (swiglu, 1.1, 1))),
    ("deepseek_v4.DeepseekV4MLP", mlp.Clamps, "_clamped", _gate_alone),
    ("deepseek_v4.DeepseekV4MLP", mlp.Clamps, "_clamped", _up_alone),
    ("glm5_next.Glm5NextTextMLP", mlp.Clamps, "_clamped", _gate_alone),
    ("glm5_next.Glm5NextVisionMLP", mlp.Clamps, "_clamped", _up_alone),
    ("glm5_next.Glm5NextVisionMLP", mlp.ClampedMLP, "_gate_and_up", mlp.MLP._gate_and_up),
    ("minimax_m3_vl.MiniMaxM3VLDenseMLP", mlp.Clamps, "_clamped", _gate_alone),
    ("minimax_m3_vl.MiniMaxM3VLDenseMLP", mlp.Clamps, "_clamped", _up_alone),
    ("minimax_m3_vl.MiniMaxM3VLDenseMLP", mlp.Clamps, "steep_activation_op", classmethod(lambda *_: (swiglu, 1, 1))),
    ("step3p7.Step3p7MLP", mlp.Step3p7MLP, "activation_op", classmethod(lambda *_: (swiglu, 1.1, 1))),
]


@pytest.mark.parametrize("name, cls, attribute, value", WRONG)
def test_a_wrong_entry_would_be_found(monkeypatch, name, cls, attribute, value):
    build_mlp(name)  # skips where the class does not exist
    monkeypatch.setattr(patch_named(cls), attribute, value)
    with pytest.raises(AssertionError):
        test_equals_stock(torch.device("cpu"), name, torch.float32)


@pytest.mark.parametrize("name", ["t5gemma.T5GemmaMLP", "gte.GteMLP", "modernbert.ModernBertMLP"])
def test_dropout_left_out_would_be_found(monkeypatch, name):
    build_mlp(name)
    monkeypatch.setattr(patch_named(name), "BEFORE_DOWN", None)
    with pytest.raises(AssertionError):
        test_random_numbers_are_those_of_stock(torch.device("cpu"), name)


def test_a_wrong_order_would_be_found(monkeypatch):
    build_mlp("falcon_h1.FalconH1MLP")
    monkeypatch.setattr(mlp.ScaledMLP, "_gate_and_up", mlp.MLP._gate_and_up)
    with pytest.raises(AssertionError):
        test_random_numbers_are_those_of_stock(torch.device("cpu"), "falcon_h1.FalconH1MLP")
