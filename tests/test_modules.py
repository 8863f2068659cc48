"""Modules, and functions with Liger-Kernel's names and arguments: every option reaches the public function, with
bit-identical results."""

import copy
import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from cases import normal, random_targets
from ops import MODULES

import liger_ext
from liger_ext import functional as F

X, R = normal(5, 24), normal(5, 24, seed=1)
LOGITS, TARGET = normal(6, 24, scale=3), random_targets(6, 24, ignored=0.3, ignore_index=3)
HIDDEN, HEAD, BIAS = normal(6, 8), normal(24, 8, seed=1), normal(24, seed=2)
CLASSES = normal(24, seed=3).abs() + 0.1
CONFIG = SimpleNamespace(hidden_size=24, intermediate_size=40, hidden_act="silu", mlp_bias=True)
LOSS = {
    "ignore_index": 3,
    "lse_square_scale": 0.01,
    "label_smoothing": 0.1,
    "reduction": "sum",
    "softcap": 5.0,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}
FUSED = {**LOSS, "use_token_scaling": True, "accum_dtype": torch.float32}


def same(a, b):
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    assert all(torch.equal(x, y) for x, y in pairs)


def perturbed(module):
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(normal(*p.shape, seed=20 + i, mean=0.5))
    return module


def test_norms():
    m = perturbed(liger_ext.LigerRMSNorm(24, eps=0.1, offset=1.0, casting_mode="gemma"))
    same(m(X), F.rms_norm(X, m.weight, 0.1, 1.0, "gemma"))
    assert list(m.state_dict()) == ["weight"]
    m = liger_ext.LigerRMSNorm(24, elementwise_affine=False)
    same(m(X), F.rms_norm(X))
    assert not m.state_dict()
    assert not liger_ext.LigerRMSNorm(24, init_fn="zeros").weight.any()
    m = perturbed(liger_ext.LigerFusedAddRMSNorm(24, eps=0.1, offset=1.0, casting_mode="none"))
    same(m(X, R), F.add_rms_norm(X, R, m.weight, 0.1, 1.0, "none"))
    m = perturbed(liger_ext.LigerLayerNorm(24, eps=0.1, bias=True))
    same(m(X), F.layer_norm(X, m.weight, m.bias, 0.1))
    assert list(m.state_dict()) == ["weight", "bias"]
    with pytest.raises(ValueError, match="init_fn"):
        liger_ext.LigerRMSNorm(24, init_fn="normal")


GEMMAS = dict(offset=1.0, casting_mode="gemma")


@pytest.mark.parametrize(
    "name, argument, first, options",
    [
        ("Gemma", "hidden_size", 0.0, GEMMAS),
        ("Gemma2", "hidden_size", 0.0, GEMMAS),
        ("Gemma3", "dim", 0.0, GEMMAS),
        ("Gemma4", "dim", 1.0, dict(casting_mode="gemma")),
        ("Glm4", "hidden_size", 1.0, {}),
        ("Olmo2", "hidden_size", 1.0, {}),
        ("Qwen3Next", "hidden_size", 0.0, GEMMAS),
    ],
)
def test_norms_of_families(name, argument, first, options):
    module = getattr(liger_ext, f"LigerRMSNormFor{name}")(**{argument: 24}, eps=0.1)
    assert torch.equal(module.weight, torch.full((24,), first))
    x = normal(5, 24).bfloat16()  # bf16, so that the position of a rounding matters
    module = perturbed(module).bfloat16()
    same(module(x), F.rms_norm(x, module.weight, 0.1, **options))


def test_a_norm_without_a_weight():
    module = liger_ext.LigerRMSNormForGemma4(24, eps=0.1, with_scale=False)
    assert not module.state_dict()
    same(module(X), F.rms_norm(X, None, 0.1))


def test_mlps_of_families():
    def changed(**options):
        return SimpleNamespace(**{**vars(CONFIG), **options})

    m = perturbed(liger_ext.LigerPhi3SwiGLUMLP(CONFIG))
    gate, up = m.gate_up_proj(X).chunk(2, -1)
    same(m(X), m.down_proj(F.swiglu(gate, up)))
    m = perturbed(liger_ext.LigerBlockSparseTop2MLP(CONFIG))
    same(m(X), m.w2(F.swiglu(m.w1(X), m.w3(X))))
    m = perturbed(liger_ext.LigerQwen3MoeSwiGLUMLP(CONFIG, intermediate_size=16))
    assert m.gate_proj.out_features == 16 and liger_ext.LigerQwen3MoeSwiGLUMLP(CONFIG).gate_proj.out_features == 40
    same(m(X), m.down_proj(F.swiglu(m.gate_proj(X), m.up_proj(X))))
    m = perturbed(liger_ext.LigerHunyuanV1SwiGLUMLP(CONFIG, 3, True))
    same(m(X), m.down_proj(F.swiglu(m.gate_proj(X), m.up_proj(X))))
    m = perturbed(liger_ext.LigerFalconH1SwiGLUMLP(changed(mlp_multipliers=(0.7, 1.3))))
    stock = m.down_proj(torch.nn.functional.silu(0.7 * m.gate_proj(X)) * m.up_proj(X)) * 1.3
    torch.testing.assert_close(m(X), stock)
    shared = dict(hidden_act="gelu_pytorch_tanh", use_double_wide_mlp=True, num_hidden_layers=4, num_kv_shared_layers=2)
    widths = [liger_ext.LigerGEGLUMLPForGemma4(changed(**shared), i).gate_proj.out_features for i in range(4)]
    assert widths == [40, 40, 80, 80]
    modes = shared | dict(kv_sharing_modes=["own", "reuse"])
    widths = [liger_ext.LigerGEGLUMLPForGemma4(changed(**modes), i).gate_proj.out_features for i in range(2)]
    assert widths == [40, 80]
    m = perturbed(liger_ext.LigerGEGLUMLPForGemma4(changed(**shared), 2))
    same(m(X), m.down_proj(F.geglu(m.gate_proj(X), m.up_proj(X))))
    for name in ("Phi3SwiGLUMLP", "BlockSparseTop2MLP", "Experts", "Qwen3MoeSwiGLUMLP", "GEGLUMLPForGemma4"):
        with pytest.raises(ValueError, match=f"Liger{name}: .* 'relu', expected"):
            getattr(liger_ext, f"Liger{name}")(changed(hidden_act="relu", num_experts=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts(device, dtype):
    """Compared with a loop over tokens in float64: experts without tokens, slots without an expert, weights in fp32."""
    config = SimpleNamespace(hidden_size=16, moe_intermediate_size=24, hidden_act="silu", num_experts=5)
    module = perturbed(liger_ext.LigerExperts(config)).to(device, dtype)
    x = normal(7, 16).to(device, dtype).requires_grad_()
    index = torch.tensor([[0, 3], [3, 0], [0, 5], [1, 3], [3, 1], [5, 5], [1, 0]], device=device)
    weights = normal(7, 2, seed=1).abs().to(device).requires_grad_()
    found = module(x, index, weights)
    gradients = torch.autograd.grad(found.float().square().sum(), [x, weights, *module.parameters()])

    exact = [t.detach().double().requires_grad_() for t in (x, weights, *module.parameters())]
    x64, weights64, gate_up, down = exact
    rows = []
    for token, experts in enumerate(index.tolist()):
        row = 0 * x64[token]
        for slot, expert in enumerate(experts):
            if expert < 5:
                gate, up = (gate_up[expert] @ x64[token]).chunk(2)
                row = row + weights64[token, slot] * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    expected = torch.stack(rows)
    reference = torch.autograd.grad(expected.square().sum(), exact)
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5  # a few roundings of results of size 1
    for result, value in zip((found, *gradients), (expected, *reference), strict=True):
        assert result.dtype == (torch.float32 if result is gradients[1] else dtype)
        assert (result.double() - value).norm() <= tolerance * value.norm()
    assert not gradients[2][[2, 4]].any()


def test_mlps():
    m = perturbed(liger_ext.LigerSwiGLUMLP(CONFIG))
    same(m(X), m.down_proj(F.swiglu(m.gate_proj(X), m.up_proj(X))))
    assert m.gate_proj.bias is not None and m.down_proj.bias is not None
    plain = SimpleNamespace(**{**vars(CONFIG), "mlp_bias": False, "hidden_act": "gelu_pytorch_tanh"})
    m = perturbed(liger_ext.LigerGEGLUMLP(plain))
    same(m(X), m.down_proj(F.geglu(m.gate_proj(X), m.up_proj(X))))
    assert m.gate_proj.bias is None
    for module in (liger_ext.LigerSwiGLUMLP, liger_ext.LigerGEGLUMLP):
        with pytest.raises(ValueError, match="relu"):
            module(SimpleNamespace(**{**vars(CONFIG), "hidden_act": "relu"}))


@pytest.mark.parametrize("left_out", [None, *LOSS, "weight"])
def test_cross_entropy(left_out):
    """Each option in turn has its default value, so that an exchanged or dropped option is found."""
    options = {k: v for k, v in {**LOSS, "weight": CLASSES}.items() if k != left_out}
    expected = F.cross_entropy(LOGITS, TARGET, **options)
    module = liger_ext.LigerCrossEntropyLoss(**options)
    same(module(LOGITS, TARGET)[0], expected[0])
    assert [t is None for t in module(LOGITS, TARGET)] == [t is None for t in expected]
    same(liger_ext.liger_cross_entropy(LOGITS, TARGET, **options)[0], expected[0])


@pytest.mark.parametrize("left_out", [None, *FUSED, "ce_weight"])
def test_fused_linear_cross_entropy(left_out):
    options = {k: v for k, v in {**FUSED, "ce_weight": CLASSES}.items() if k != left_out}
    expected = F.fused_linear_cross_entropy(HIDDEN, HEAD, TARGET, BIAS, **options)
    module = liger_ext.LigerFusedLinearCrossEntropyLoss(**options)
    same(module(HEAD, HIDDEN, TARGET, BIAS)[0], expected[0])
    assert [t is None for t in module(HEAD, HIDDEN, TARGET)] == [t is None for t in expected]
    same(liger_ext.liger_fused_linear_cross_entropy(HIDDEN, HEAD, TARGET, BIAS, **options)[0], expected[0])


def test_upstream_names():
    weight, bias = normal(24, seed=5), normal(24, seed=6)
    same(liger_ext.liger_rms_norm(X, weight, 0.1, 1.0, "gemma", True), F.rms_norm(X, weight, 0.1, 1.0, "gemma"))
    same(liger_ext.liger_fused_add_rms_norm(X, R, weight, 0.1), F.add_rms_norm(X, R, weight, 0.1))
    same(liger_ext.liger_layer_norm(X, weight, bias, 0.1), F.layer_norm(X, weight, bias, 0.1))
    same(liger_ext.liger_swiglu(X, R), F.swiglu(X, R))
    same(liger_ext.liger_geglu(X, R), F.geglu(X, R))
    same(liger_ext.liger_softmax(X), F.softmax(X))
    same(liger_ext.LigerSoftmax()(X), F.softmax(X))
    q, k, cos, sin = normal(2, 3, 5, 8), normal(2, 1, 5, 8), normal(1, 5, 8), normal(1, 5, 8, seed=1)
    same(liger_ext.liger_rotary_pos_emb(q, k, cos, sin), F.rope(q, k, cos, sin))
    with pytest.warns(UserWarning, match="reduction"):
        reduced = liger_ext.liger_cross_entropy(LOGITS, TARGET, size_average=False, ignore_index=3)
    same(reduced, F.cross_entropy(LOGITS, TARGET, ignore_index=3, reduction="sum"))


def test_class_weights_follow_the_module():
    module = liger_ext.LigerCrossEntropyLoss(weight=CLASSES).to(torch.float64)
    assert module.weight.dtype == torch.float64 and not module.state_dict()


@pytest.mark.parametrize("module", [liger_ext.LigerCrossEntropyLoss, liger_ext.LigerFusedLinearCrossEntropyLoss])
@pytest.mark.parametrize("bad", [{"label_smoothing": 1.5}, {"reduction": "avg"}, {"softcap": 0.0}], ids=str)
def test_bad_loss_options_are_said_at_once(module, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        module(**bad)


@pytest.mark.parametrize(
    "module, bad",
    [
        (liger_ext.LigerJSD, {"beta": None}),
        (liger_ext.LigerJSD, {"beta": "0.5"}),
        (liger_ext.LigerJSD, {"ignore_index": None}),
        (liger_ext.LigerCrossEntropyLoss, {"label_smoothing": "0.1"}),
        (liger_ext.LigerCrossEntropyLoss, {"ignore_index": True}),
        (liger_ext.LigerFusedLinearCrossEntropyLoss, {"softcap": True}),
        (liger_ext.LigerFusedLinearCrossEntropyLoss, {"ignore_index": torch.float16}),
        (liger_ext.LigerGroupNorm, {"num_groups": 3.0, "num_channels": 12}),
    ],
    ids=str,
)
def test_an_option_of_another_type_is_refused_at_once(module, bad):
    option, value = next(iter(bad.items()))
    with pytest.raises(TypeError, match=f"{module.__name__}: {option} is {re.escape(repr(value))}, expected"):
        module(**bad)


def test_modules_are_copied_and_printed():
    for module in (liger_ext.LigerRMSNorm(24), liger_ext.LigerFusedAddRMSNorm(24), liger_ext.LigerLayerNorm(24)):
        assert "eps" in repr(copy.deepcopy(module))


@pytest.mark.parametrize("path", ["its own", "liger_ext.modules"])
def test_modules_saved_whole_load_again(path, monkeypatch, tmp_path):
    """Also modules whose file names their class liger_ext.modules.<name>, the former location of the classes."""
    assert {type(module).__name__ for module in MODULES} == set(liger_ext.modules.__all__)
    with monkeypatch.context() as patch:
        if path != "its own":
            for module in MODULES:
                patch.setattr(type(module), "__module__", path)
        torch.save(torch.nn.ModuleList(MODULES), tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", weights_only=False)
    assert [type(module) for module in loaded] == [type(module) for module in MODULES]
    assert repr(loaded) == repr(torch.nn.ModuleList(MODULES))
    for module, other in zip(MODULES, loaded, strict=True):
        same(tuple(module.state_dict().values()), tuple(other.state_dict().values()))
    losses = [of for of in zip(MODULES, loaded, strict=True) if isinstance(of[0], liger_ext.LigerCrossEntropyLoss)]
    assert losses and all(torch.equal(*(module(LOGITS, TARGET)[0] for module in of)) for of in losses)


def test_loss_modules_take_every_option_of_their_function():
    for module, function, own in (
        (liger_ext.LigerCrossEntropyLoss, F.cross_entropy, {"logits", "target"}),
        (
            liger_ext.LigerFusedLinearCrossEntropyLoss,
            F.fused_linear_cross_entropy,
            {"x", "weight", "target", "bias", "normalizer", "rows", "process_group"},
        ),
    ):
        options = set(inspect.signature(function).parameters) - own
        assert options == set(inspect.signature(module).parameters)
