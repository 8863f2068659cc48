"""Patching together with other wrappers of modules and classes: PEFT, FSDP2, accelerate, DataParallel and others."""

import copy

import family_models
import pytest
import torch
from cases import RecordCalls
from llama_models import (  # noqa: F401
    TRANSFORMERS,
    VOCAB,
    build,
    checkpoint_layers,
    compare,
    count_calls,
    lora,
    make_batch,
    one_thread,
    ops,
    patched,
    step,
)
from torch import nn
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_instance, apply_liger_kernel_to_llama
from liger_ext.models import llama
from liger_ext.models.patching.swap import is_plain_tensor

peft = pytest.importorskip("peft")


def assert_close(result, expected):
    for name in result:
        torch.testing.assert_close(
            result[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


LORA = {
    "projections": dict(target_modules=["q_proj", "gate_proj", "down_proj"]),
    "head": dict(target_modules=["lm_head", "v_proj"]),
    "saved head": dict(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "saved norms": dict(
        target_modules=["q_proj"], modules_to_save=["norm", "input_layernorm", "post_attention_layernorm"]
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_peft_then_patch(device, dtype, options):
    model = lora(build(dtype=dtype), **options).to(device, dtype).train()
    trained = compare(model, make_batch(device))
    assert any(p.grad is not None and p.grad.any() for n, p in trained.named_parameters() if "lora" in n)


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_patch_then_peft(device, options):
    stock = lora(build(), **options).to(device).train()
    model = lora(patched(build()), **options).to(device).train()
    expected, result = step(stock, make_batch(device)), step(model, make_batch(device))
    assert expected.keys() - result.keys() == {"logits"}
    assert_close(result, expected)


def test_which_head_peft_uses(device):
    batch = make_batch(device)
    model = patched(lora(build(), target_modules=["q_proj"], modules_to_save=["lm_head"])).to(device).train()
    head = model.base_model.model.lm_head
    assert "fused_linear_cross_entropy" in ops(model, **batch)
    nn.init.zeros_(head.modules_to_save["default"].weight)
    torch.testing.assert_close(model(**batch).loss.item(), torch.tensor(float(VOCAB)).log().item())
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch).loss, build(device=device).train()(**batch).loss)
    adapted = patched(lora(build(), target_modules=["lm_head"])).to(device).train()
    assert "fused_linear_cross_entropy" not in ops(adapted, **batch)
    assert "cross_entropy" in ops(adapted, **batch)
    assert "logits" not in adapted(**batch)


def test_revert_under_peft():
    stock = build().train()
    handle = apply_liger_kernel_to_llama(model=stock)
    model = lora(stock, **LORA["saved norms"]).train()
    handle.revert()
    norm = model.base_model.model.model.norm
    assert type(norm.original_module) is modeling_llama.LlamaRMSNorm
    handle = apply_liger_kernel_to_instance(model)
    assert {type(module) for module in (norm.original_module, *norm.modules_to_save.values())} == {llama.LlamaRMSNorm}
    handle.revert()


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    """A process group of one process, for FSDP2 on the CPU."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch without gloo")
    store = tmp_path_factory.mktemp("store") / "file"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def shard(model, mesh, head=None, **options):
    """Shards the model; `head`: options of the head's separate group of parameters."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    if head is not None:
        fully_shard(model.lm_head, mesh=mesh, **(options | head))
    return fully_shard(model, mesh=mesh, **options)


def sharded_step(model):
    results = step(model, make_batch("cpu"))
    results = {name: (r.full_tensor() if hasattr(r, "full_tensor") else r).clone() for name, r in results.items()}
    model.zero_grad()  # before the next forward hides the sharded parameters and their gradients
    return results


@pytest.mark.parametrize("head", [None, {}, {"reshard_after_forward": False}], ids=["", "sharded head", "kept head"])
@pytest.mark.parametrize("order", ["patch, shard", "shard, patch"])
def test_fsdp2(mesh, order, head):
    from torch.distributed.fsdp import FSDPModule

    stock = build(tie_word_embeddings=False).train()
    expected = step(stock, make_batch("cpu"))
    model = copy.deepcopy(stock)
    if order == "patch, shard":
        handle = apply_liger_kernel_to_llama(model=model)
        model = shard(model, mesh, head)
    else:
        model = shard(model, mesh, head)
        before = [type(module) for module in model.modules()]
        handle = apply_liger_kernel_to_llama(model=model)

    def check(is_patched):
        for module in (model, *model.model.layers):
            assert isinstance(module, FSDPModule)
            assert type(module).__name__.startswith("FSDPLlama")
            assert isinstance(module, (llama.LlamaForCausalLM, llama.LlamaDecoderLayer)) is is_patched
        result = sharded_step(model)
        assert ("logits" in result) is not is_patched
        assert result.keys() | {"logits"} == expected.keys()
        assert_close(result, expected)
        assert ops(model, **make_batch("cpu")) == (expected_ops if is_patched else set())

    expected_ops = {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}
    check(True)
    with torch.no_grad():
        assert model.eval()(**make_batch("cpu")).logits is not None
    model.train()
    handle.revert()
    check(False)
    if order == "shard, patch":
        assert [type(module) for module in model.modules()] == before
    handle = apply_liger_kernel_to_llama(model=model)
    check(True)
    handle.revert()


@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_in_bf16(mesh, reshard):
    """The head's policy casts its weight, and the second step accumulates its gradient."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    stock = build(tie_word_embeddings=False).train()
    models = [
        shard(m, mesh, {"reshard_after_forward": reshard}, mp_policy=policy)
        for m in (copy.deepcopy(stock), patched(stock))
    ]
    for _ in range(2):
        losses = [m(**make_batch("cpu"), num_items_in_batch=11).loss for m in models]
        torch.testing.assert_close(losses[1].double(), losses[0].double(), rtol=2e-2, atol=0)
        for loss in losses:
            loss.backward()
    expected, found = (m.lm_head.weight.grad.full_tensor() for m in models)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03 * expected.abs().max().item())
    assert "fused_linear_cross_entropy" in ops(models[1], **make_batch("cpu"))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("order", ["patch, shard", "shard, patch"])
def test_fsdp2_keeps_gradient_checkpointing(mesh, order, use_reentrant):
    stock = build().train()
    expected = step(stock, make_batch("cpu"))
    model = stock if order == "shard, patch" else patched(stock)
    model = shard(model, mesh)
    if order == "shard, patch":
        apply_liger_kernel_to_llama(model=model)
    checkpoint_layers(model, use_reentrant)
    calls = count_calls(model)
    result = sharded_step(model)
    assert len(calls) == 4
    assert_close(result, expected)


@pytest.mark.parametrize("order", ["patch, hook", "hook, patch"])
def test_accelerate_device_hooks(order):
    hooks = pytest.importorskip("accelerate.hooks")
    model = build().train()
    expected = step(copy.deepcopy(model), make_batch("cpu"))
    mlp, head = model.model.layers[0].mlp, model.lm_head
    if order == "patch, hook":
        handle = apply_liger_kernel_to_llama(model=model)

    class Halves(hooks.ModelHook):
        """A user's hook that changes the logits."""

        def post_forward(self, module, output):
            return output / 2

    for module in (mlp, head, model):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    if order == "hook, patch":
        handle = apply_liger_kernel_to_llama(model=model)
    result = step(model, make_batch("cpu"))
    assert "logits" not in result
    assert "fused_linear_cross_entropy" in ops(model, **make_batch("cpu"))
    assert_close(result, expected)
    with RecordCalls() as record:
        mlp(torch.randn(2, 64))
    assert len(record.calls) == 1
    hooks.add_hook_to_module(head, Halves(), append=True)
    halved = model(**make_batch("cpu")).loss
    assert "cross_entropy" in ops(model, **make_batch("cpu"))
    handle.revert()
    torch.testing.assert_close(halved, model(**make_batch("cpu")).loss)
    assert model(**make_batch("cpu")).logits is not None and not ops(model, **make_batch("cpu"))
    hooks.remove_hook_from_module(model, recurse=True)
    assert model(**make_batch("cpu")).logits is not None and not ops(model, **make_batch("cpu"))


class Holder(nn.Module):
    """A user's wrapper, whose config names no known model."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, {"model_type": "no attribute"}


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "torch.compile": torch.compile,
    "Sequential": nn.Sequential,
    "ModuleDict": lambda model: nn.ModuleDict({"other": nn.Linear(2, 2), "policy": model}),
    "in a wrapper": lambda model: nn.Sequential(nn.DataParallel(Holder(model))),
}


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("function", [apply_liger_kernel_to_llama, apply_liger_kernel_to_instance])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_inside_another_module(wrap, function):
    model, expected = build().train(), patched(build())
    before = [type(module) for module in model.modules()]
    wrapper = wrap(model)
    handle = function(model=wrapper, memory="low")
    assert [type(module) for module in model.modules()] == [type(module) for module in expected.modules()]
    assert model.liger_memory == "low"
    handle.revert()
    assert [type(module) for module in model.modules()] == before


def test_models_of_several_families_in_one_module():
    llamas, qwen2s = build(), family_models.build("qwen2")
    model = nn.ModuleList([nn.Linear(2, 2), qwen2s, llamas])
    with apply_liger_kernel_to_instance(model, rope=False):
        assert [type(m.model.norm).__module__.partition(".")[0] for m in (qwen2s, llamas)] == ["liger_ext"] * 2
        assert type(llamas.model.layers[0].self_attn) is modeling_llama.LlamaAttention
    with apply_liger_kernel_to_instance(llamas.model.layers):  # as a pipeline stage may hold the layers
        assert type(llamas.model.layers[0]) is llama.LlamaDecoderLayer


def test_a_distributed_weight_is_not_plain(mesh):
    head = nn.Linear(4, 8)
    assert is_plain_tensor(head.weight)
    weight = torch.distributed.tensor.distribute_tensor(head.weight.detach(), mesh)
    head.weight = nn.Parameter(weight)
    assert not is_plain_tensor(head.weight)
    norm = llama.LlamaRMSNorm(4)
    hidden_states = torch.randn(3, 4)
    expected = norm(hidden_states)
    norm.weight = nn.Parameter(torch.distributed.tensor.distribute_tensor(norm.weight.detach(), mesh))
    result = norm(torch.distributed.tensor.distribute_tensor(hidden_states, mesh))
    torch.testing.assert_close(result.full_tensor(), expected)


# Gemma 2 caps its logits before the loss; the head of older transformers is not known, and stays stock.
@pytest.mark.parametrize("family", ["llama", "gemma2"] if TRANSFORMERS >= (5, 0) else ["llama"])
def test_loss_of_sharded_logits(mesh, family):
    """Tensor parallelism keeps the logits sharded, and torch computes the loss from the shards (loss_parallel)."""
    parallel = torch.distributed.tensor.parallel
    stock = family_models.build(family, tie_word_embeddings=False)
    compared = family_models.patched(stock)
    for model in (stock, compared):
        parallel.parallelize_module(model, mesh, {"lm_head": parallel.ColwiseParallel(use_local_output=False)})
    with parallel.loss_parallel():
        results = [step(model, make_batch("cpu")) for model in (compared, stock)]
    for name in results[0]:
        found, expected = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (r[name] for r in results))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="DTensor takes no options"), parallel.loss_parallel():
        compared(**make_batch("cpu"), label_smoothing=0.1)
