"""Modules are constructed, initialised, loaded, copied and saved like those of torch.nn."""

import copy
import io
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import normal
from torch import nn
from torch.nn.utils import parametrize, skip_init

import liger_ext
from liger_ext import functional as F
from liger_ext.modules import LigerFusedAddRMSNorm, LigerGroupNorm, LigerLayerNorm, LigerRMSNorm, LigerSoftmax

FAMILIES = ("Gemma", "Gemma2", "Gemma3", "Gemma4", "Glm4", "Olmo2", "Qwen3Next")
RMS_NORMS = [LigerRMSNorm, *(getattr(liger_ext, f"LigerRMSNormFor{family}") for family in FAMILIES)]
NORMS = [*((cls, (24,)) for cls in (*RMS_NORMS, LigerFusedAddRMSNorm, LigerLayerNorm)), (LigerGroupNorm, (24, 3))]
EACH_NORM = pytest.mark.parametrize("cls, sizes", NORMS, ids=lambda value: getattr(value, "__name__", ""))


def state_is(module, other):
    found, expected = module.state_dict(), other.state_dict()
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value)


def called(module):
    """Output for a random fp32 input that fits all modules here."""
    x = normal(5, 24)
    with torch.no_grad():
        return module(x, normal(5, 24, seed=1)) if isinstance(module, LigerFusedAddRMSNorm) else (module(x),)


@EACH_NORM
@pytest.mark.parametrize("init_fn", [None, "ones", "zeros"])
def test_a_norm_made_on_meta_becomes_one_made_directly(cls, sizes, init_fn):
    options = {} if init_fn is None else {"init_fn": init_fn}
    made = cls(*sizes, **options, device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in made.parameters())
    made = made.to_empty(device="cpu")
    for p in made.parameters():
        nn.init.constant_(p, 7)
    made.reset_parameters()
    state_is(made, cls(*sizes, **options).bfloat16())
    assert repr(made) == repr(cls(*sizes))


@EACH_NORM
def test_a_norm_takes_no_default_from_elsewhere(cls, sizes):
    assert [p.shape for p in skip_init(cls, *sizes).parameters()] == [p.shape for p in cls(*sizes).parameters()]
    with torch.device("meta"):
        assert all(p.is_meta for p in cls(*sizes).parameters())
        assert not any(p.is_meta for p in cls(*sizes, device="cpu").parameters())
    torch.set_default_dtype(torch.bfloat16)
    try:
        module, wide = cls(*sizes), cls(*sizes, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    state_is(module, cls(*sizes).bfloat16())
    state_is(wide, cls(*sizes))
    assert all(p.dtype is torch.float64 for p in module.to(torch.float64).parameters())


@EACH_NORM
def test_a_norm_is_copied_pickled_and_saved(cls, sizes):
    module, file = cls(*sizes), io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    older = copy.deepcopy(module)
    del older.__dict__["init_fn"]  # older modules did not store it
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False), older]
    for copied in copies:
        assert type(copied) is cls and repr(copied) == repr(module)
        assert all(map(torch.equal, called(copied), called(module)))
        copied.reset_parameters()
        state_is(copied, module)


@EACH_NORM
def test_the_weight_of_a_norm_is_parametrized(cls, sizes):
    module, expected = cls(*sizes), cls(*sizes)
    parametrize.register_parametrization(module, "weight", nn.Softplus())
    with torch.no_grad():
        expected.weight.copy_(module.weight)
    assert all(map(torch.equal, called(module), called(expected)))
    parametrize.remove_parametrizations(module, "weight")
    state_is(module, expected)


AS_TORCH = [
    (LigerRMSNorm(24), nn.RMSNorm(24, eps=1e-6)),
    (LigerRMSNorm(24, elementwise_affine=False), nn.RMSNorm(24, eps=1e-6, elementwise_affine=False)),
    (LigerLayerNorm(24), nn.LayerNorm(24, eps=1e-6)),
    (LigerLayerNorm(24, with_bias=False), nn.LayerNorm(24, eps=1e-6, bias=False)),
    (LigerLayerNorm(24, elementwise_affine=False), nn.LayerNorm(24, eps=1e-6, elementwise_affine=False)),
    (LigerGroupNorm(24, 3), nn.GroupNorm(3, 24, eps=1e-6)),
    (LigerGroupNorm(24, 3, affine=False), nn.GroupNorm(3, 24, eps=1e-6, affine=False)),
]


@pytest.mark.parametrize("module, theirs", AS_TORCH, ids=lambda module: repr(module))
def test_states_of_torch_load_in_both_directions(module, theirs):
    for source, target in ((theirs, module), (module, theirs)):
        source, target = copy.deepcopy(source), copy.deepcopy(target)
        for i, p in enumerate(source.parameters()):
            nn.init.uniform_(p, 1 + i, 2 + i)
        target.load_state_dict(source.state_dict())
        state_is(target, source)
        torch.testing.assert_close(called(target), called(source))


def test_a_group_norm_without_a_bias():
    """Only newer releases of torch.nn.GroupNorm accept ``bias=False``."""
    module = LigerGroupNorm(24, 3, with_bias=False)
    module.load_state_dict({"weight": normal(24)})
    assert torch.equal(*called(module), F.group_norm(normal(5, 24), 3, normal(24)))
    assert repr(module) == "LigerGroupNorm(24, num_groups=3, eps=1e-06, with_bias=False)"


@pytest.mark.parametrize("cls, sizes", [(LigerLayerNorm, (24,)), (LigerGroupNorm, (24, 3))])
def test_upstreams_bias_argument_keeps_the_parameter(cls, sizes):
    assert [list(cls(*sizes, bias=bias).state_dict()) for bias in (False, True)] == [["weight", "bias"]] * 2
    with pytest.raises(TypeError, match="positional"):
        cls(*sizes, 1e-6, False, "ones", None, None, None, False)


BAD_SIZES = [(4, 8), [], 24.0, True, None, "24", torch.tensor(24), 0, -24, np.int64(0), np.float32(24)]


@pytest.mark.parametrize("bad", BAD_SIZES, ids=repr)
@EACH_NORM
def test_a_size_that_is_no_positive_integer(cls, sizes, bad):
    for at, name in enumerate(list(cls.__init__.__annotations__)[: len(sizes)]):
        arguments = list(sizes)
        arguments[at] = bad
        shown = str(bad) if isinstance(bad, np.integer) else repr(bad)
        with pytest.raises((TypeError, ValueError)) as raised:
            cls(*arguments)
        text = str(raised.value)
        assert text.startswith(f"{cls.__name__}: {name} is {shown}, expected a positive integer")
        assert cls is LigerGroupNorm or "flatten" in text


@pytest.mark.parametrize("size", [[24], (24,), torch.Size([24])], ids=repr)
@pytest.mark.parametrize("cls", [LigerLayerNorm, LigerRMSNorm, liger_ext.LigerRMSNormForGemma3])
def test_a_size_in_a_list_as_torch_takes_it(cls, size):
    state_is(cls(size), cls(24))
    assert repr(cls(size)) == repr(cls(24))


@EACH_NORM
def test_eps_that_is_no_number(cls, sizes):
    for eps, kind in ((None, TypeError), ("1e-6", TypeError), (-1.0, ValueError), (True, TypeError)):
        with pytest.raises(kind, match=f"{cls.__name__}: eps is {eps}|{cls.__name__}: eps is '1e-6'"):
            cls(*sizes, eps=eps)
    if cls not in (LigerLayerNorm, LigerGroupNorm):
        with pytest.raises(ValueError, match=f"{cls.__name__}: casting_mode is 'x', expected 'llama'"):
            cls(*sizes, casting_mode="x")


@EACH_NORM
def test_a_size_of_numpy(cls, sizes):
    module = cls(*map(np.int64, sizes))
    state_is(module, cls(*sizes))
    assert repr(module) == repr(cls(*sizes)) and all(map(torch.equal, called(module), called(cls(*sizes))))


def test_a_size_that_is_a_symbol():
    sizes = []

    class Model(nn.Module):
        def forward(self, x):
            sizes.append(x.shape[-1])
            return x * LigerLayerNorm(sizes[-1], device="meta").weight.shape[0]

    exported = torch.export.export(
        Model(), (torch.ones(3, 5),), dynamic_shapes=({1: torch.export.Dim("n")},), strict=False
    )
    assert isinstance(sizes[0], torch.SymInt)
    assert torch.equal(exported.module()(torch.ones(3, 7)), torch.full((3, 7), 7.0))


CONFIG = dict(hidden_size=8, intermediate_size=16, hidden_act="silu", mlp_multipliers=(1.0, 1.0), num_experts=2)
SIZES, SILU = ("hidden_size", "intermediate_size"), ("hidden_act", "hidden_size", "intermediate_size")
NEEDED = {
    "SwiGLUMLP": SILU,
    "Qwen3MoeSwiGLUMLP": SILU,
    "HunyuanV1SwiGLUMLP": SILU,
    "Phi3SwiGLUMLP": SILU,
    "BlockSparseTop2MLP": SILU,
    "FalconH1SwiGLUMLP": (*SILU, "mlp_multipliers"),
    "Experts": (*SILU, "num_experts"),
    "GEGLUMLP": SIZES,
    "GEGLUMLPForGemma4": SIZES,
}
EACH_MLP = pytest.mark.parametrize("cls, needed", [(getattr(liger_ext, f"Liger{n}"), a) for n, a in NEEDED.items()])


def test_every_mlp_is_listed():
    assert {n for n in liger_ext.modules.__all__ if "MLP" in n or "Experts" in n} == {f"Liger{n}" for n in NEEDED}


@EACH_MLP
@pytest.mark.parametrize("config", [8, None, CONFIG, nn.Linear(1, 1)], ids=lambda config: type(config).__name__)
def test_what_is_no_configuration(cls, needed, config):
    with pytest.raises(TypeError) as raised:
        cls(config)
    text = str(raised.value)
    assert text.startswith(f"{cls.__name__}: config is of type {type(config).__name__} and has no ")
    assert all(name in text.partition(";")[0] for name in needed)
    assert ("SimpleNamespace(**config)" in text) == isinstance(config, dict)


@EACH_MLP
def test_a_configuration_that_lacks_one_attribute(cls, needed):
    config = {**CONFIG, "hidden_act": "silu" if "hidden_act" in needed else "gelu"}
    cls(SimpleNamespace(**config))
    for name in needed:
        for lacks in ({k: v for k, v in config.items() if k != name}, {**config, name: None}):
            with pytest.raises(TypeError, match=rf"SimpleNamespace and has no (\w+ or )*{name}( or \w+)*; expected"):
                cls(SimpleNamespace(**lacks))


def test_two_numbers_in_place_of_a_configuration():
    with pytest.raises(TypeError, match="LigerSwiGLUMLP: config is of type int and has no hidden_act, no hidden_size;"):
        liger_ext.LigerSwiGLUMLP(8, 16)
    assert liger_ext.LigerSwiGLUMLP(SimpleNamespace(hidden_size=8, hidden_act="silu"), 16).up_proj.out_features == 16


def test_the_layers_of_gemma_4_are_counted():
    config = SimpleNamespace(hidden_size=8, intermediate_size=16, num_kv_shared_layers=2)
    with pytest.raises(TypeError, match="has no num_hidden_layers;"):
        liger_ext.LigerGEGLUMLPForGemma4(config)


def test_experts_are_initialised_anew():
    config = SimpleNamespace(**CONFIG, initializer_range=0.5)
    with torch.device("meta"):
        module = liger_ext.LigerExperts(config)
    made = []
    for make in (module.to_empty(device="cpu").reset_parameters, lambda: made.append(liger_ext.LigerExperts(config))):
        torch.manual_seed(0)
        make()
    state_is(module, *made)


def test_softmax_takes_the_last_dimension():
    x = normal(2, 3, 24)
    for dim in (-1, 2, np.int64(2)):
        assert torch.equal(F.softmax(x, dim=dim), F.softmax(x))
        assert torch.equal(liger_ext.liger_softmax(x, dim), F.softmax(x))
        assert torch.equal(LigerSoftmax(dim=dim)(x), F.softmax(x))
    assert repr(LigerSoftmax(2)) == "LigerSoftmax(dim=2)"


@pytest.mark.parametrize("dim", [0, 1, -2, -3, 3, -4])
def test_softmax_over_another_dimension_is_refused(dim):
    x, words = normal(2, 3, 24), rf"softmax: dim is {dim}, expected the last dimension of x, -1 or 2: .*\(2, 3, 24\)"
    for call in (lambda: F.softmax(x, dim), lambda: LigerSoftmax(dim)(x)):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("dim", [None, -1.0, 2.0, True, "-1", torch.float32, torch.tensor(-1), np.ones(2)], ids=repr)
def test_softmax_over_what_is_no_integer(dim):
    words = f"oftmax: dim is {re.escape(repr(dim))}, expected an integer"
    for call in (lambda: F.softmax(normal(2, 3, 24), dim), lambda: LigerSoftmax(dim)):
        with pytest.raises(TypeError, match=words):
            call()


def test_softmax_of_no_tensor_and_of_a_scalar():
    with pytest.raises(TypeError, match="softmax: x must be a Tensor"):
        F.softmax([1.0], dim=0)
    for dim in (-1, 0):
        with pytest.raises(ValueError, match=r"softmax: x .*dimension"):
            F.softmax(torch.ones(()), dim)


def test_a_softmax_pickled_before_it_had_a_dimension():
    module = LigerSoftmax()
    del module.__dict__["dim"]
    assert torch.equal(pickle.loads(pickle.dumps(module))(normal(3, 24)), F.softmax(normal(3, 24)))


@pytest.mark.parametrize("dim", [-1, 1])
def test_softmax_is_compiled(dim):
    module, x = LigerSoftmax(dim), normal(3, 24)
    compiled = torch.compile(lambda x: (F.softmax(x, dim=dim), module(x)), fullgraph=True, backend="aot_eager")
    for rows in (3, 4, 5):  # symbolic from the second call on
        x = normal(rows, 24)
        assert all(torch.equal(y, F.softmax(x)) for y in compiled(x))
    wrong = torch.compile(lambda x: F.softmax(x, dim=0), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="dim is 0, expected the last dimension"):
        wrong(x)
