"""A patched Llama with checkpointed layers: results, the recomputation, and long inputs in tiles."""

import functools

import pytest
import torch
from llama_models import (
    TRANSFORMERS,
    build,
    checkpoint_layers,
    compare,
    frozen,
    levels,
    lora,
    make_batch,
    one_thread,  # noqa: F401
    patched,
    step,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from transformers import LlamaModel

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.training import nodes as layer

reentrant = pytest.mark.parametrize("use_reentrant", [True, False])
# Older versions checkpoint a layer from outside, in the model's forward.
by_layer = pytest.mark.skipif(TRANSFORMERS < (4, 53), reason="transformers checkpoints layers from outside")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that are smaller than the batch, which has 33 rows."""
    monkeypatch.setattr(layer, "TILE", 8 * 128)


def checkpointed(model: nn.Module, use_reentrant: bool, **options) -> nn.Module:
    checkpoint_layers(model, use_reentrant, **options)
    return model


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


MODELS = {
    "plain": build,
    "biases": lambda: build(mlp_bias=True, attention_bias=True),
    "frozen MLP": lambda: frozen(build(mlp_bias=True), "mlp"),
    "frozen but for norms": lambda: frozen(build(), "proj"),
    "LoRA": lambda: lora(build(), target_modules=["q_proj", "up_proj"]),
}


@reentrant
@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_tiles_give_what_stock_gives(device, dtype, make, memory, use_reentrant, small_tiles):
    compare(checkpointed(make().to(device, dtype).train(), use_reentrant), make_batch(device), memory=memory)


@reentrant
@levels
def test_in_one_tile(device, memory, use_reentrant):
    compare(checkpointed(build(device=device).train(), use_reentrant), make_batch(device), memory=memory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_tiles_without_a_checkpoint(device, dtype, small_tiles):
    compare(build(mlp_bias=True).to(device, dtype).train(), make_batch(device), memory="low")


def test_tiles_of_a_layout_that_is_not_contiguous(device, small_tiles):
    def forward(model, input_ids, labels):
        states = model(input_ids).last_hidden_state
        return {"loss": (states.transpose(0, 1) * torch.arange(64, device=device)).square().mean()}

    compare(build(LlamaModel, device=device).train(), make_batch(device), forward, memory="low")


def test_the_sum_over_tiles_is_rounded_once(device, monkeypatch):
    """As close to float64 as one product over all rows, with many tiles."""
    torch.manual_seed(0)
    model = build(device=device, dtype=torch.bfloat16, num_hidden_layers=1).train()
    batch = make_batch(device, 8, 64)
    results = []
    for tile in (1 << 30, 4):
        monkeypatch.setattr(layer, "TILE", tile * 128)
        results.append(step(patched(model, memory="low"), batch))
    exact = step(model.double(), batch)
    for name in (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")):
        whole, tiled = ((result[name].double() - exact[name]).norm() for result in results)
        assert tiled < 1.2 * whole


@reentrant
@pytest.mark.parametrize("memory", ["auto", "low", "min"])
def test_a_checkpoint_changes_no_bit(device, memory, use_reentrant):
    model = patched(build(device=device, dtype=torch.bfloat16).train(), memory=memory)
    expected = step(model, make_batch(device))
    assert_same_bits(step(checkpointed(model, use_reentrant), make_batch(device)), expected)


class Multiplied(TorchDispatchMode):
    """Counts the FLOPs of matrix products. (torch's counter hooks modules, and our patches call hooked modules.)"""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            *_, a, b = args[:3]
            self.count += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return op(*args, **(kwargs or {}))


def flops(model, batch) -> int:
    with Multiplied() as multiplied:
        model(**batch).loss.backward()
    return multiplied.count


@by_layer
@reentrant
def test_the_second_run_ends_before_down_proj(device, use_reentrant):
    """The checkpoint recomputes all matmuls of a layer's forward except down_proj."""
    batch, model = make_batch(device), patched(build(device=device).train())
    plain = flops(model, batch)
    again = flops(checkpointed(model, use_reentrant), batch) - plain
    rows = batch["labels"].numel()
    down = 2 * rows * 64 * 128
    linears = sum(2 * rows * m.weight.numel() for m in model.model.layers.modules() if isinstance(m, nn.Linear))
    assert again == linears - 2 * down


@reentrant
@levels
def test_a_checkpoint_inside_a_checkpoint(device, memory, use_reentrant):
    """The recomputation of the outer checkpoint is the first run of each layer, whose result the next layer reads."""

    def forward(model, input_ids, labels):
        states = checkpoint(
            lambda embedded: model.model(inputs_embeds=embedded).last_hidden_state,
            model.get_input_embeddings()(input_ids),
            use_reentrant=False,
        )
        return {"loss": states.square().mean()}

    compare(checkpointed(build(device=device).train(), use_reentrant), make_batch(device), forward, memory=memory)


@pytest.mark.parametrize("memory", ["auto", "low", "min"])
def test_all_of_a_second_run(device, memory):
    """Without an early stop, the recomputation of a checkpoint runs to the end of the layer."""
    model = patched(build(device=device).train(), memory=memory)
    expected = step(model, make_batch(device))
    checkpointed(model, False)
    with set_checkpoint_early_stop(False):
        assert_same_bits(step(model, make_batch(device)), expected)


def test_a_graph_is_used_twice(device):
    model = checkpointed(patched(build(device=device).train()), False)
    loss = model(**make_batch(device)).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert_same_bits({name: p.grad for name, p in model.named_parameters()}, first)


@reentrant
def test_hooks_on_a_layer_see_what_it_returns(device, use_reentrant):
    """Also where transformers runs the hooks a second time."""
    model, seen = patched(build(device=device).train()), []
    model.model.layers[0].register_forward_hook(
        lambda module, arguments, result: seen.append((result[0] if isinstance(result, tuple) else result).sum().item())
    )
    checkpointed(model, use_reentrant)
    model(**make_batch(device)).loss.backward()
    assert len(set(seen)) == 1


def test_other_checkpoints_get_whole_results(device):
    """A checkpoint that calls a layer twice and returns the second result, and one with contexts."""

    def twice(function, *args):
        function(*args)
        return function(*args)

    matmuls = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, matmuls)
    model = patched(build(device=device).train())
    expected = step(model, make_batch(device))
    checkpointed(model, False, context_fn=contexts)
    assert_same_bits(step(model, make_batch(device)), expected)
    for module in model.model.layers:
        module._gradient_checkpointing_func = twice
    assert_same_bits(step(model, make_batch(device)), expected)


def scaled_layers(model):
    """Replaces each layer's class by a subclass whose forward reads the original forward's result."""
    for module in model.model.layers:
        base = type(module)

        def forward(self, x, *args, base=base, **kwargs):
            result = base.forward(self, x, *args, **kwargs)
            return (self.scale * result[0],) if isinstance(result, tuple) else self.scale * result

        module.scale = nn.Parameter(torch.full_like(module.input_layernorm.weight, 1.5))
        module.__class__ = type("Scaled", (base,), {"forward": forward})


def scaled_functions(model):
    """Wraps each layer's checkpoint function, so that the checkpointed function reads the layer's result."""
    for module in model.model.layers:
        module.scale = nn.Parameter(torch.full_like(module.input_layernorm.weight, 1.5))

        def around(forward, *args, old=module._gradient_checkpointing_func, scale=module.scale):
            def scaled(*args):
                result = forward(*args)
                return (scale * result[0],) if isinstance(result, tuple) else scale * result

            return old(scaled, *args)

        module._gradient_checkpointing_func = around


def replaced_function(model):
    """Replaces torch's checkpoint by a function that reads the results of both runs."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, function, x):
            ctx.function, ctx.result = function, function(x)
            ctx.save_for_backward(x)
            return ctx.result[0] if isinstance(ctx.result, tuple) else ctx.result

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                result = ctx.function(x)
            result, first = (r[0] if isinstance(r, tuple) else r for r in (result, ctx.result))
            torch.testing.assert_close(result, first)
            torch.autograd.backward(result, gradient)
            return None, x.grad

    def user_checkpoint(function, x):
        result = Checkpoint.apply(function, x)
        return (result,) if TRANSFORMERS < (4, 54) else result

    for module in model.model.layers:
        module._gradient_checkpointing_func = user_checkpoint


@by_layer
@reentrant
@pytest.mark.parametrize("change", [scaled_layers, scaled_functions, replaced_function])
def test_code_of_others_that_reads_the_second_result(device, change, use_reentrant):
    stock = checkpointed(build(device=device).train(), use_reentrant)
    model = patched(stock, memory="auto")
    results = []
    for each in (stock, model):
        change(each)
        results.append(step(each, make_batch(device)))
    expected, found = results
    for name in expected.keys() & found.keys():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    assert change is replaced_function or "model.layers.1.scale" in found


@by_layer
def test_a_layers_function_for_more_than_the_layer(device):
    stock = checkpointed(build(device=device).train(), False)
    gradients = []
    for model in (stock, patched(stock)):
        layers, checkpoints = model.model.layers, model.model.layers[0]._gradient_checkpointing_func
        for module in layers:
            module.gradient_checkpointing = False
        x = torch.ones(1, 9, 64, device=device, requires_grad=True)
        places = model.model.rotary_emb(x, torch.arange(9, device=device)[None])

        def block(x, layers=layers, places=places):
            for module in layers:
                x = module(x, position_embeddings=places)
                x = x[0] if isinstance(x, tuple) else x
            return x

        checkpoints(block, x).square().mean().backward()
        gradients.append([x.grad, layers[0].mlp.up_proj.weight.grad, layers[1].mlp.up_proj.weight.grad])
    torch.testing.assert_close(*reversed(gradients), rtol=1e-4, atol=1e-6)


def test_the_function_that_checkpoints_is_as_it_was_set():
    model = build(num_hidden_layers=1)
    module = model.model.layers[0]
    with apply_liger_kernel_to_llama(model=model):
        assert not hasattr(module, "_gradient_checkpointing_func")
        module._gradient_checkpointing_func = checkpoint
        assert module._gradient_checkpointing_func is not checkpoint
    assert module._gradient_checkpointing_func is checkpoint
    module._gradient_checkpointing_func = function = functools.partial(checkpoint, use_reentrant=False)
    with apply_liger_kernel_to_llama(model=model, memory="fast"):
        assert module._gradient_checkpointing_func is function
        del module._gradient_checkpointing_func
        assert not hasattr(module, "_gradient_checkpointing_func")


@pytest.mark.slow
@reentrant
@pytest.mark.parametrize("first", ["patch", "checkpoint"])
def test_compiled(device, use_reentrant, first):
    """Also without a run before the compilation."""
    torch._dynamo.reset()
    stock = build(device=device).train()
    model = checkpointed(stock, use_reentrant) if first == "checkpoint" else stock
    model = checkpointed(patched(model), use_reentrant)
    compare_with = step(checkpointed(stock, use_reentrant), make_batch(device))
    result = step(torch.compile(model, backend="aot_eager", fullgraph=True), {**make_batch(device), "use_cache": False})
    for name, value in compare_with.items():
        if f"_orig_mod.{name}" in result:
            torch.testing.assert_close(result[f"_orig_mod.{name}"], value, rtol=1e-4, atol=1e-5)
