"""memory="min" on a GPU: inputs of checkpointed layers are stored in host memory until the backward, with equal
results."""

import pytest
import torch
from llama_models import build, make_batch, patched, step
from test_llama_checkpoint import MODELS, assert_same_bits, by_layer, checkpointed, reentrant

from liger_ext.models.training import offload


@pytest.fixture
def small_inputs(monkeypatch):
    """Offloads even small inputs, in several pieces."""
    monkeypatch.setattr(offload, "_WORTHWHILE", 1)
    monkeypatch.setattr(offload, "_PIECE", 4096)


@pytest.mark.cuda
@by_layer
@reentrant
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_inputs_that_wait_on_the_host(make, use_reentrant, small_inputs):
    model = checkpointed(make().cuda().train(), use_reentrant)
    batch = make_batch("cuda") | {"memory": "fast"}  # the loss uses "fast"
    expected = step(patched(model, memory="low"), batch)
    model = patched(model, memory="min")
    for _ in range(3):  # later steps reuse the host memory
        assert_same_bits(step(model, batch), expected)


@pytest.mark.cuda
@by_layer
def test_what_waits_on_the_host_is_not_on_the_gpu(small_inputs):
    def saved(memory: str, layers: int) -> int:
        model = checkpointed(build(device="cuda", num_hidden_layers=layers).train(), False)
        model, batch = patched(model, memory=memory), make_batch("cuda", 4, 64)
        model(**batch).loss.backward()
        before = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        return torch.cuda.memory_allocated() - before + 0 * loss.item()

    layer_bytes = 4 * 64 * 64 * 4
    assert saved("low", 6) - saved("low", 3) == 3 * layer_bytes
    assert saved("min", 6) - saved("min", 3) == 0


@pytest.mark.cuda
@by_layer
@pytest.mark.parametrize("twice", [False, True])
def test_inputs_on_the_host_are_used_again(twice, small_inputs):
    """By a second backward, and after a first backward that stopped early."""
    model = checkpointed(patched(build(device="cuda", num_hidden_layers=3).train(), memory="min"), False)
    expected = step(model, make_batch("cuda"))
    model.zero_grad()
    loss = model(**make_batch("cuda")).loss
    if twice:
        loss.backward(retain_graph=True)
        model.zero_grad()
    else:
        torch.autograd.grad(loss, model.model.layers[2].mlp.up_proj.weight, retain_graph=True)
    loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}, expected)


@pytest.mark.cuda
@by_layer
def test_an_input_on_the_host_that_was_written_is_an_error(small_inputs):
    model = checkpointed(patched(build(device="cuda").train(), memory="min"), False)
    model.model.layers[1].input_layernorm.register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(**make_batch("cuda")).loss.backward()


@pytest.mark.cuda
@by_layer
def test_hooks_of_others_see_inputs_themselves(small_inputs):
    model = checkpointed(patched(build(device="cuda").train(), memory="min"), False)
    expected = step(model, make_batch("cuda"))
    with torch.autograd.graph.save_on_cpu():
        assert_same_bits(step(model, make_batch("cuda")), expected)
