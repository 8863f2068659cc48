"""Tensors that the backward recomputes instead of loading them, in layers whose linear modules must be called (LoRA,
quantised weights, hooks): saved-tensor hooks store a function in place of a tensor."""

from types import SimpleNamespace

import pytest
import torch
from llama_models import (
    LEVELS,
    build,
    lora,
    make_batch,
    one_thread,  # noqa: F401
    patched,
    step,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from liger_ext.models.training.recompute import recompute_when_saved

LORA = {
    "": dict(target_modules="all-linear"),
    "dropout": dict(target_modules="all-linear", lora_dropout=0.5),
    "DoRA": dict(target_modules="all-linear", use_dora=True),
}


@pytest.mark.parametrize("options", LORA.values(), ids=LORA)
def test_adapters_get_the_bits_they_would_have_kept(device, options):
    stock = lora(build(device=device, dtype=torch.bfloat16), **options).to(device).train()
    results = []
    for memory in LEVELS[:2]:
        model = patched(stock, memory=memory)
        torch.manual_seed(3)  # for dropout
        loss = model(**make_batch(device)).loss
        for _ in range(2):  # the second run uses the graph again
            model.zero_grad()
            loss.backward(retain_graph=True)
            results.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for found in results[1:]:
        assert found.keys() == results[0].keys()
        assert all(torch.equal(found[name], results[0][name]) for name in found)


def test_a_remade_tensor_that_was_changed_is_an_error(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    weight = torch.randn(4, 4, device=device, requires_grad=True)
    for change in ("input", "other"):
        gate = x * 2
        h = gate.sin()
        with recompute_when_saved(SimpleNamespace(liger_memory="auto"), h, torch.sin, gate):
            y = h @ weight
            z = y * y
        (gate if change == "input" else y).detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_where_hooks_are_forbidden(device):
    def forward(model, **batch):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return model(**batch)

    stock = lora(build(device=device), target_modules="all-linear").train()
    expected = step(stock, make_batch(device))
    found = step(patched(stock), make_batch(device), forward)
    for name, value in expected.items():
        if name != "logits":
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_sparse_tensors_are_kept_as_they_are(device):
    """Sparse adapters (PEFT's SHiRA) save sparse tensors."""
    x = torch.randn(3, 4, device=device, requires_grad=True)
    few = torch.eye(4, device=device).to_sparse()
    h = x.sin()
    with recompute_when_saved(SimpleNamespace(liger_memory="auto"), h, torch.sin, x):
        y = torch.sparse.mm(few, h.t())
    y.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


@pytest.mark.filterwarnings("error")
def test_tensors_without_memory_are_told_apart():
    """Tensors of the meta device and fake tensors, with which tools compute the cost of a step."""
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            x = torch.empty(3, 4, requires_grad=True)
            weight = torch.empty(4, 50, requires_grad=True)
            h = x.sin()
            with recompute_when_saved(SimpleNamespace(liger_memory="auto"), h, torch.sin, x):
                y = h @ weight
            y.sum().backward()
        assert x.grad.shape == x.shape
        assert weight.grad.shape == weight.shape


def test_hooks_of_others_see_every_tensor(device):
    seen = []
    model = patched(lora(build(device=device), target_modules="all-linear", use_dora=True).train())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        model(**make_batch(device)).loss.backward()
    h = 33 * 128
    assert seen.count(h) >= 2 * 3  # gate, up and h of two layers


@pytest.mark.parametrize("memory", LEVELS)
def test_a_flop_counter_counts_recomputed_matmuls(memory):
    """Its hooks on all modules do not keep the nodes from running: it counts the matmuls that the profiler sees."""
    model, batch = patched(build(), memory=memory), make_batch("cpu")
    with FlopCounterMode(display=False) as counter:
        step(model, batch)
    with torch.profiler.profile(with_flops=True) as profiled:
        step(model, batch)
    expected = next(event.flops for event in profiled.key_averages() if event.key == "aten::mm")
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == expected
