"""Patched models whose weights are not plain parameters on the model's device from start to end: loaded later,
offloaded, shared, copied, cast, or computed from other tensors."""

import copy
import io

import pytest
import torch
from llama_models import (  # noqa: F401
    LEVELS,
    assert_as_good,
    build,
    config,
    exact,
    frozen,
    make_batch,
    one_thread,
    ops,
    patched,
    step,
)
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM

from liger_ext import apply_liger_kernel_to_llama

OURS = {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}
first = pytest.mark.parametrize("patch_first", [True, False], ids=["patch first", "patch last"])
tied = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


def build_patched(patch_first, change, **options) -> nn.Module:
    """A model that is patched before or after `change`, which may return another model."""
    model = build(**options)
    if patch_first:
        apply_liger_kernel_to_llama(model=model)
    model = change(model) or model
    if not patch_first:
        apply_liger_kernel_to_llama(model=model)
    return model


def assert_close(found, expected, rtol=1e-4, atol=1e-5):
    assert expected.keys() - found.keys() <= {"logits"}
    for name in found:
        torch.testing.assert_close(found[name], expected[name].to(found[name].device), rtol=rtol, atol=atol)


def assert_trains_as(stock, model, batch):
    assert ops(model, **batch) == OURS
    found = step(model.train(), batch)
    assert_as_good(found, step(stock.train(), batch), step(exact(stock).train(), batch))


def with_torch():
    with torch.device("meta"):
        return LlamaForCausalLM(config(tie_word_embeddings=False))


def with_accelerate():
    with pytest.importorskip("accelerate").init_empty_weights():
        return LlamaForCausalLM(config(tie_word_embeddings=False))


@first
@pytest.mark.parametrize("assigned", [True, False], ids=["assign", "to_empty"])
@pytest.mark.parametrize("empty", [with_torch, with_accelerate])
def test_made_on_the_meta_device(device, empty, assigned, patch_first):
    stock = build(device=device, tie_word_embeddings=False).train()
    model = empty()
    assert model.lm_head.weight.is_meta
    if patch_first:
        apply_liger_kernel_to_llama(model=model)
    if not assigned:
        model.to_empty(device=device)
    model.load_state_dict({n: t.clone() for n, t in stock.state_dict().items()}, assign=assigned)
    buffers = dict(stock.named_buffers())  # the rotary frequencies are not in the state dict
    for path, _ in list(model.named_buffers()):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, buffers[path].clone())
    if not patch_first:
        apply_liger_kernel_to_llama(model=model)
    assert_trains_as(stock, model, make_batch(device))


def test_a_step_without_memory():
    """On the meta device, as in tools that estimate the memory of a step."""
    model = patched(build(tie_word_embeddings=False)).to("meta").train()
    batch = {name: t.to("meta") for name, t in make_batch("cpu").items()}
    model(**batch).loss.backward()
    assert all(p.grad.shape == p.shape and p.grad.is_meta for p in model.parameters())


def offload_to_cpu(model, device, folder):
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device=device)


def offload_to_disk(model, device, folder):
    return pytest.importorskip("accelerate").disk_offload(model, folder, execution_device=device)


def dispatch(model, device, folder):
    places = {"model.embed_tokens": device, "model.rotary_emb": device, "model.layers.0": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.1": "disk", "model.norm": "disk"}
    options = dict(main_device=device, offload_dir=folder, force_hooks=True)
    return pytest.importorskip("accelerate").dispatch_model(model, places, **options)


@first
@pytest.mark.parametrize("offload", [offload_to_cpu, offload_to_disk, dispatch])
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
def test_offloaded(device, tmp_path, offload, trains, patch_first):
    """accelerate loads weights when a module is called: code that reads them without a call reads no values."""
    stock = build(device=device, tie_word_embeddings=False).train(trains)
    model = build_patched(patch_first, lambda m: offload(m.train(trains), device, tmp_path), tie_word_embeddings=False)
    assert model.lm_head.weight.is_meta
    with torch.no_grad():
        expected, found = stock(**make_batch(device)), model(**make_batch(device))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    assert ("logits" in found) is not trains
    if not trains:
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@first
@tied
def test_two_gpus(tied, patch_first):
    accelerate = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    places.update({"model.norm": 1, "lm_head": 0 if tied else 1})
    stock = build(device="cuda", tie_word_embeddings=tied).train()
    model = build_patched(patch_first, lambda m: accelerate.dispatch_model(m, places), tie_word_embeddings=tied)
    assert model.model.layers[1].mlp.up_proj.weight.device.index == 1
    assert_close(step(model.train(), make_batch("cuda")), step(stock, make_batch("cuda")))


def averaged(model):
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    return average.module


def through_a_state(model):
    """Loads the state into another model, which had other weights."""
    other = patched(build(seed=7, tie_word_embeddings=model.config.tie_word_embeddings))
    other.load_state_dict(model.state_dict())
    return other


def through_a_file(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [averaged, copy.deepcopy, through_a_state, through_a_file]


@tied
@pytest.mark.parametrize("copy_model", COPIES, ids=["EMA", "deepcopy", "state", "file"])
def test_copies(device, copy_model, tied):
    """A copy trains like the stock model, and changes to the original do not affect it."""
    stock = build(device=device, tie_word_embeddings=tied).train()
    model = patched(stock)
    copied = copy_model(model).to(device)
    assert (copied.lm_head.weight is copied.model.embed_tokens.weight) is tied
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert_trains_as(stock, copied, make_batch(device))


def test_average_of_two_models(device):
    stock, other = build(device=device).train(), build(device=device, seed=3).train()
    averages = []
    for model in (stock, patched(stock)):
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        average.update_parameters(other)
        averages.append(average)
    losses = [average(**make_batch(device)).loss for average in averages]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    assert ops(averages[1], **make_batch(device)) == OURS
    assert abs(losses[1] - stock(**make_batch(device)).loss) > 1e-3


def run_from_queue(queue, results):
    torch.set_num_threads(1)
    model = queue.get()
    loss = model(**make_batch("cpu")).loss
    loss.backward()
    results.put(
        (loss.item(), model.lm_head.weight.grad.norm().item(), type(model).__module__, model.lm_head.weight.is_shared())
    )
    queue.get()  # keeps the shared memory alive until the other process has read all


@pytest.mark.slow
def test_sent_to_another_process():
    context = torch.multiprocessing.get_context("spawn")
    queue, results = context.Queue(), context.Queue()
    model = patched(build(tie_word_embeddings=False).train()).share_memory()  # torch would send tied weights twice
    process = context.Process(target=run_from_queue, args=(queue, results))
    process.start()
    queue.put(model)
    loss, norm, module, shared = results.get(timeout=100)
    queue.put(None)
    process.join()
    expected = step(model, make_batch("cpu"))
    assert module == "liger_ext.models.llama" and shared and loss == pytest.approx(expected["loss"].item())
    assert norm == pytest.approx(expected["lm_head.weight"].norm().item(), rel=1e-5)


CASTS = {
    "bf16": lambda m: m.bfloat16(),
    "half": lambda m: m.half(),
    "float64": lambda m: m.double(),
    "and back": lambda m: m.bfloat16().float(),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_cast_after_the_patch(device, cast):
    stock = build(device=device, tie_word_embeddings=False).train()
    model = cast(patched(stock))
    if cast is CASTS["float64"] and device.type == "cuda":
        with pytest.raises(ValueError, match="float64 works on the CPU only"):
            model(**make_batch(device))
        return
    stock = cast(stock)
    expected, found = step(stock, make_batch(device)), step(model, make_batch(device))
    if cast is CASTS["float64"]:
        assert expected["loss"].dtype == torch.float32  # transformers rounds the logits
        found["loss"] = found["loss"].float()
    assert_as_good(found, expected, step(exact(stock), make_batch(device)))


@pytest.mark.parametrize("memory", LEVELS)
def test_what_trains_changes_between_steps(device, memory):
    stock = build(device=device, mlp_bias=True).train()
    model = patched(stock, memory=memory)
    for names in (("q_proj", "embed"), ("norm", "down_proj.bias"), ("layers.0",), (), ("",)):
        for each in (stock, model):
            each.requires_grad_(True)
            frozen(each, *names)
        reference = step(exact(stock), make_batch(device))
        assert_as_good(step(model, make_batch(device)), step(stock, make_batch(device)), reference)


def test_functional_call(device):
    """Replaces the weights, also tied ones, for one call; the replacements receive the gradients."""
    stock = build(device=device).train()
    model = patched(stock)
    results = []
    for each in (stock, model):
        weights = {n: (p.detach() * 0.7).requires_grad_() for n, p in each.named_parameters()}
        loss = torch.func.functional_call(each, weights, kwargs=make_batch(device))["loss"]
        loss.backward()
        results.append({"loss": loss.detach(), **{n: w.grad for n, w in weights.items()}})
    assert results[1].keys() == results[0].keys()
    assert_close(results[1], results[0])
    assert all(p.grad is None for p in model.parameters())
    assert (model(**make_batch(device)).loss - results[1]["loss"]).abs() > 1e-3


REWRITES = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": lambda module: parametrizations.spectral_norm(module, n_power_iterations=3).eval(),
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": nn.utils.weight_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.4),
    "pruned rows": lambda module: prune.ln_structured(module, "weight", 0.4, n=2, dim=0),
}


@first
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("where", ["q_proj", "up_proj", "down_proj", "lm_head"])
@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES)
def test_weights_that_are_computed(device, rewrite, where, patch_first):
    def change(model):
        torch.manual_seed(4)
        for path, module in list(model.named_modules()):
            if path.endswith(where):
                rewrite(module)

    models = [build(tie_word_embeddings=False), build_patched(patch_first, change, tie_word_embeddings=False)]
    change(models[0])
    stock, model = (m.to(device) for m in models)
    for each in (stock, model):
        each.train()
        for path, module in each.named_modules():
            if path.endswith(where) and "spectral" in str(module):
                module.eval()  # its power iteration writes buffers
    for _ in range(2):
        expected, found = step(stock, make_batch(device)), step(model, make_batch(device))
        assert expected.keys() - found.keys() == {"logits"}
        assert_close(found, expected, rtol=1e-3, atol=2e-5)
        assert any(where in name for name in found)
        for each in (stock, model):  # the next step must not use the old weights
            torch.optim.SGD(each.parameters(), lr=0.1).step()
