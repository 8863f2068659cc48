"""Tests of patched experts: the gated activation between transformers' matmuls, in transformers' implementations
"eager", "grouped_mm" and "batched_mm"."""

import copy
import importlib
import pickle
from types import SimpleNamespace

import pytest
import torch
from cases import RecordCalls
from family_models import build, patched, set_experts
from llama_models import TRANSFORMERS, distance, one_thread, ops, rounding, tokens  # noqa: F401
from torch import nn
from transformers.activations import ACT2FN

import liger_ext
from liger_ext.functional import geglu_packed, swiglu
from liger_ext.models import patches
from liger_ext.models.modules import experts

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 17), reason="older transformers have other code")
MODELS = ["mixtral", "deepseek_v3"]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def experts_module(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


def run(experts, x, index, weights):
    """Returns the results of a forward and a backward."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    experts.zero_grad(set_to_none=True)
    out = experts(x, index, weights)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out))
    gradients = dict(x=x.grad, weights=weights.grad, gate_up=experts.gate_up_proj.grad, down=experts.down_proj.grad)
    return {"out": out.detach()} | gradients


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("skipped", [False, True], ids=["", "skipped"])
def test_as_the_loop_over_experts(device, implementation, dtype, activation, skipped):
    """Experts without tokens, fp32 router weights, and assignments that another process computes, marked by an index
    past the last expert. The loop of older transformers rejects that index, so the stock experts compute these
    assignments with a weight of 0, and the test excludes the gradients of these weights."""
    model = build("mixtral", device, dtype)
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn = ACT2FN[activation]
    stock, ours = experts_module(model), experts_module(patched(model))
    ours.config = copy.copy(stock.config)
    ours.config._experts_implementation = implementation
    ours._is_expert_parallel = skipped
    assert type(ours) is not type(stock) and stock.num_experts == 6
    index = tokens(7, 2, device=device) % 3  # half of the experts have nothing to do
    weights = torch.rand(7, 2, device=device)
    elsewhere = torch.zeros_like(index, dtype=torch.bool)
    if skipped:
        elsewhere[::3, 1] = True
        weights[elsewhere] = 0.0
    x = torch.randn(7, 64, device=device, dtype=dtype)
    exact = copy.deepcopy(stock).double()
    reference, expected = run(exact, x.double(), index, weights.double()), run(stock, x, index, weights)
    found = run(ours, x, index.masked_fill(elsewhere, stock.num_experts), weights)
    if TRANSFORMERS >= (5, 23):  # older grouped matmuls leave uninitialised memory there
        assert not found["weights"][elsewhere].any()
    for results in (reference, expected, found):
        results["weights"][elsewhere] = 0.0
    for name, result in found.items():
        assert result.dtype == expected[name].dtype
        bound = 3 * distance(expected[name], reference[name]) + rounding(dtype)
        assert distance(result, reference[name]) <= bound, name
    assert not found["gate_up"][3:].any()


@pytest.mark.parametrize("family", MODELS)
def test_the_op_is_called(device, family):
    model = build(family, device).eval()
    ours = patched(model)
    ids = tokens(2, 9, device=device)
    set_experts(ours, "grouped_mm")
    assert "glu_packed" in ops(ours, input_ids=ids)
    set_experts(ours, "eager")
    assert "glu_packed" not in ops(ours, input_ids=ids)
    ours = patched(model, swiglu=False)
    set_experts(ours, "grouped_mm")
    assert "glu_packed" not in ops(ours, input_ids=ids)


def test_an_activation_that_is_not_known(device):
    model = build("mixtral", device, hidden_act="relu")
    assert type(experts_module(patched(model))) is type(experts_module(model))
    ours = patched(build("mixtral", device))
    set_experts(ours, "grouped_mm")
    experts_module(ours).act_fn = nn.Tanh()  # set by the user after the patch
    stock = copy.deepcopy(ours)
    experts_module(stock).__class__ = type(experts_module(model))
    ids = tokens(2, 9, device=device)
    torch.testing.assert_close(ours(ids).logits, stock(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family, implementation", [("gpt_oss", i) for i in IMPLEMENTATIONS] + [("llama4_text", None)])
def test_other_gates(device, family, implementation, dtype):
    """Interleaved, clamped columns (GPT-OSS), and experts without a choice of implementation (Llama 4)."""
    model = build(family, device, dtype)
    stock = experts_module(model)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    if implementation:
        stock.limit = 0.7  # some values are beyond it
        stock.config = copy.copy(stock.config)
        stock.config._experts_implementation = implementation
    ours, exact = experts_module(patched(model)), copy.deepcopy(stock).double()
    if implementation:
        exact.config._experts_implementation = "eager"
    x = torch.randn(12, 64, device=device, dtype=dtype)
    index = tokens(12, 2, device=device) % 3  # half of the experts have nothing to do
    given = (index, torch.rand(12, 2, device=device)) if implementation else ()

    def run(experts, x):
        x = x.clone().requires_grad_()
        experts.zero_grad(set_to_none=True)
        out = experts(x, *given)
        out.backward(torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view_as(out))
        return {"out": out.detach(), "x": x.grad} | {name: p.grad for name, p in experts.named_parameters()}

    with RecordCalls() as record:
        found = run(ours, x)
    assert {"glu", "glu_packed"} & set(record.names)
    expected, reference = run(stock, x), run(exact, x.double())
    for name, result in found.items():
        assert result.dtype == expected[name].dtype
        bound = 3 * distance(expected[name], reference[name]) + rounding(dtype)
        assert distance(result, reference[name]) <= bound, name


@pytest.mark.parametrize(
    "family, cls, attribute, value",
    [
        ("gpt_oss", experts.GptOssExperts, "activation_op", classmethod(lambda *_: (swiglu, 1.0, 1.0))),
        ("gpt_oss", experts.GptOssExperts, "_clamped", lambda self, gate, up: (gate, up + 1)),
        ("gpt_oss", experts.GptOssExperts, "_halves", experts.ClampedExperts.__dict__["_halves"]),
        ("llama4_text", experts.BatchedExperts, "activation_op", classmethod(lambda *_: (geglu_packed, "tanh"))),
    ],
)
def test_a_wrong_entry_would_be_found(monkeypatch, family, cls, attribute, value):
    monkeypatch.setattr(cls, attribute, value)
    with pytest.raises(AssertionError):
        test_other_gates(torch.device("cpu"), family, None if family == "llama4_text" else "eager", torch.float32)


# Classes that are tested without a model, because their models are harder to build.
GATES = """
    beam.BeamExperts deepseek_v4.DeepseekV4Experts glm5_next.Glm5NextTextExperts hy_v4.HYV4Experts
    minimax_m3_vl.MiniMaxM3VLExperts openai_privacy_filter.OpenAIPrivacyFilterExperts step3p7.Step3p7Experts
"""


def experts_instance(name, implementation="eager", dtype=torch.float32, device="cpu", limit=0.7):
    folder, _, cls = name.partition(".")
    path = f"transformers.models.{folder}"
    if importlib.util.find_spec(path) is None:
        pytest.skip("a newer transformers has it")
    found = getattr(importlib.import_module(f"{path}.modeling_{folder}"), cls)
    sizes = dict(hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_local_experts=6, num_experts=6)
    options = dict(hidden_act="silu", swiglu_limit=limit, swiglu_alpha=1.7, _experts_implementation=implementation)
    torch.manual_seed(0)
    stock = found(SimpleNamespace(**sizes, **options)).to(device, dtype)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    return stock


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", GATES.split())
def test_gates_of_classes(device, name, implementation, dtype):
    """The gates of these classes call the op in every implementation, the loop over experts included."""
    stock = experts_instance(name, implementation, dtype, device)
    ours, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    ours.__class__ = patches.find_patch(type(stock))
    exact.config = copy.copy(stock.config) if hasattr(stock, "config") else None
    if exact.config is not None:
        exact.config._experts_implementation = "eager"  # the other implementations reject float64
    x = torch.randn(12, 64, device=device, dtype=dtype)
    index, weights = tokens(12, 2, device=device) % 3, torch.rand(12, 2, device=device)
    with RecordCalls() as record:
        found = run(ours, x, index, weights)
    assert {"glu", "glu_packed"} & set(record.names)
    expected, reference = run(stock, x, index, weights), run(exact, x.double(), index, weights.double())
    for key, result in found.items():
        assert result.dtype == expected[key].dtype
        bound = 1.5 * distance(expected[key], reference[key]) + rounding(dtype)
        assert distance(result, reference[key]) <= bound, key


def test_gates_with_another_activation(device):
    """Experts with another activation, or with another kind of clamp, run transformers' code."""
    x, index, weights = torch.randn(12, 64, device=device), tokens(12, 2, device=device) % 3, torch.rand(12, 2)
    for name in ("deepseek_v4.DeepseekV4Experts", "step3p7.Step3p7Experts"):
        stock = experts_instance(name, device=device)
        if name.startswith("step"):
            stock.limit = 0.7
        else:
            stock.act_fn = nn.Tanh()
        ours = copy.deepcopy(stock)
        ours.__class__ = patches.find_patch(type(stock))
        with RecordCalls() as record:
            found = run(ours, x, index, weights.to(device))
        assert not record.names
        for key, expected in run(stock, x, index, weights.to(device)).items():
            torch.testing.assert_close(found[key], expected, rtol=0, atol=0)


_UNIT = classmethod(lambda *_: (swiglu, 1.1, 1))


@pytest.mark.parametrize(
    "name, cls, attribute, value",
    [
        ("beam.BeamExperts", experts.Experts, "activation_op", classmethod(lambda *_: (geglu_packed, "tanh"))),
        ("deepseek_v4.DeepseekV4Experts", experts.ClampedExperts, "activation_op", _UNIT),
        ("deepseek_v4.DeepseekV4Experts", experts.ClampedExperts, "_clamped", lambda self, *halves: halves),
        ("glm5_next.Glm5NextTextExperts", experts.SiluExperts, "activation_op", _UNIT),
        ("hy_v4.HYV4Experts", experts.SiluExperts, "_clamped", lambda self, *halves: halves),
        ("minimax_m3_vl.MiniMaxM3VLExperts", experts.SteepExperts, "activation_op", _UNIT),
        ("minimax_m3_vl.MiniMaxM3VLExperts", experts.SteepExperts, "_clamped", lambda self, *halves: halves),
        ("openai_privacy_filter.OpenAIPrivacyFilterExperts", experts.SteepExperts, "activation_op", _UNIT),
        (
            "openai_privacy_filter.OpenAIPrivacyFilterExperts",
            experts.SteepExperts,
            "_halves",
            experts.GptOssExperts.__dict__["_halves"],
        ),
        (
            "step3p7.Step3p7Experts",
            experts.Step3p7Experts,
            "activation_op",
            classmethod(lambda *_: (geglu_packed, "tanh")),
        ),
    ],
)
def test_a_wrong_gate_would_be_found(monkeypatch, name, cls, attribute, value):
    experts_instance(name)  # skips a missing class
    monkeypatch.setattr(cls, attribute, value)
    with pytest.raises(AssertionError):
        test_gates_of_classes(torch.device("cpu"), name, "eager", torch.float32)


def test_an_implementation_is_chosen_after_patching():
    """An implementation can be selected after the patch; transformers reads the source of the class's module to allow
    that."""
    model = pickle.loads(pickle.dumps(patched(build("mixtral"))))
    model.set_experts_implementation("batched_mm")
    assert model.config._experts_implementation == "batched_mm"
    model.set_attn_implementation("eager")


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_compiled(device, implementation):
    torch._dynamo.reset()
    model = build("mixtral", device, num_hidden_layers=1, sliding_window=None, output_router_logits=False)
    ours = patched(model)
    for m in (model, ours):
        set_experts(m, implementation)
    ids = tokens(2, 9, device=device)
    batch = dict(input_ids=ids, labels=ids)

    def compiled(model):
        return torch.compile(lambda **b: model(**b).loss, backend="aot_eager", fullgraph=True)(**batch)

    if implementation == "grouped_mm":
        try:
            compiled(model)
        except torch._dynamo.exc.BackendCompilerFailed:
            pytest.skip("this transformers' own grouped matmul of fp32 tensors cannot be traced")
    loss = compiled(ours)
    loss.backward()
    expected = model(**batch).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(experts_module(ours).down_proj.grad, experts_module(model).down_proj.grad)


def test_is_undone():
    model = build("qwen2_moe")
    before = [type(m) for m in model.modules()]
    with liger_ext.apply_liger_kernel_to_instance(model):
        assert type(experts_module(model)) not in before
    assert [type(m) for m in model.modules()] == before
