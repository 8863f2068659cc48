"""Memory that a patched Llama's training step keeps for its backward, to the byte; keeping less changes no result."""

import copy
import functools
from collections.abc import Iterable

import pytest
import torch
from llama_models import (
    LEVELS,
    TRANSFORMERS,
    build,
    compare,
    frozen,
    levels,
    lora,
    make_batch,
    one_thread,  # noqa: F401
    patched,
    step,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from liger_ext import apply_liger_kernel_to_llama

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class Allocated(TorchDispatchMode):
    """Memory of all ops' results that are still alive; views of `others` are not counted."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.others = {t.untyped_storage().data_ptr() for t in others}
        self.storages = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = op(*args, **(kwargs or {}))
        for t in results if isinstance(results, tuple) else (results,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in self.others:
                self.storages[StorageWeakRef(t.untyped_storage())] = t.untyped_storage().nbytes()
        return results

    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.items() if not storage.expired())


def saved_bytes(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes that are allocated for the loss's backward, and freed with the loss: no reference cycle holds them."""
    with Allocated([*model.parameters(), *model.buffers(), *batch.values()]) as allocated:
        loss = model(**batch).loss
    saved = allocated.bytes()
    del loss
    assert allocated.bytes() == 0
    return saved


def saved_per_layer(device, dtype, **options) -> float:
    """Saved values per token."""
    batch = make_batch(device)
    sizes = []
    for layers in (2, 3):
        model = patched(build(device=device, dtype=dtype, num_hidden_layers=layers).train(), **options)
        sizes.append(saved_bytes(model, batch))
    return (sizes[1] - sizes[0]) / (batch["labels"].numel() * dtype.itemsize)


@dtypes
def test_what_a_layer_keeps(device, dtype):
    hidden, mlp, heads, key_values = 64, 128, 4, 2 * 32
    saved = {level: saved_per_layer(device, dtype, memory=level) for level in LEVELS}
    assert saved["fast"] - saved["auto"] == 2 * hidden + mlp  # the norms' outputs, and act(gate) * up
    assert saved["auto"] - saved["low"] == 2 * mlp
    if device.type == "cpu" and TRANSFORMERS >= (5, 0):  # other attention saves repeated keys and values, or more
        statistics = 4 / dtype.itemsize  # a row's rstd, or a head's log-sum-exp, in fp32
        attention = 2 * hidden + key_values + heads * statistics  # q, k, v, the output
        assert saved["low"] == attention + 2 * (hidden + statistics)


class MaximumAlive(Allocated):
    """Counts storages of exactly `size` bytes: the maximum that is alive at once."""

    def __init__(self, size: int) -> None:
        super().__init__(())
        self.size, self.most = size, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(op, types, args, kwargs)
        held = [size for storage, size in self.storages.items() if not storage.expired()]
        self.most = max(self.most, held.count(self.size))
        return results


@pytest.mark.parametrize("memory, at_once", [("fast", 3), ("auto", 3), ("low", 5)])
def test_h_takes_the_memory_of_its_gradient(device, memory, at_once):
    """An MLP's backward allocates the gradients of h, gate and up, and at "low" it recomputes gate and up."""
    mlp = 96  # columns that no other tensor has
    model = patched(build(device=device, intermediate_size=mlp, num_hidden_layers=1).train(), memory=memory)
    batch = make_batch(device)
    loss = model(**batch).loss
    with MaximumAlive(batch["labels"].numel() * mlp * 4) as allocated:
        loss.backward()
    assert allocated.most == at_once


def hooked(model: nn.Module, name: str) -> nn.Module:
    """Registers a hook that changes a module's result."""
    for found, module in model.named_modules():
        if found.endswith(name):
            module.register_forward_hook(lambda module, args, result: result * 0.5)
    return model


MODELS = {
    "biases": lambda: build(mlp_bias=True, attention_bias=True),
    "frozen weights": lambda: frozen(build(), "weight_proj", "layers.1.mlp", "layers.0.self_attn"),
    "frozen biases": lambda: frozen(build(mlp_bias=True, attention_bias=True), "bias"),
    "frozen norms": lambda: frozen(build(), "norm"),
    "frozen but for biases": lambda: frozen(build(mlp_bias=True, attention_bias=True), "weight"),
    "hook on q_proj": lambda: hooked(build(), "q_proj"),
    "hook on down_proj": lambda: hooked(build(), "down_proj"),
    "hook on a norm": lambda: hooked(build(), "input_layernorm"),
    "hook on the mlp": lambda: hooked(build(), "mlp"),
    "hook on the activation": lambda: hooked(build(), "act_fn"),
    "LoRA": lambda: lora(build(), target_modules=["q_proj", "v_proj"]),
    "LoRA on the MLP": lambda: lora(build(), target_modules=["up_proj"]),
}


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_level_gives_what_stock_gives(device, dtype, make, memory):
    compare(make().to(device, dtype).train(), make_batch(device), memory=memory)


@levels
def test_under_autocast(device, memory):
    def forward(model, **batch):
        enabled = next(model.parameters()).dtype != torch.float64
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            return model(**batch)

    model = compare(build(device=device).train(), make_batch(device), forward, memory=memory)
    expected = step(model, make_batch(device), forward)
    with torch.autocast(device.type, torch.bfloat16):  # includes the backward
        found = step(model, make_batch(device))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_levels_give_the_same_bits(device):
    """Recomputed tensors have the bits of saved ones. (The loss has its own level, "fast" in all runs.)"""
    batch = make_batch(device) | {"memory": "fast"}
    model = build(device=device, dtype=torch.bfloat16).train()
    fast, *others = (step(patched(model, memory=memory), batch) for memory in LEVELS)
    for found in others:
        assert found.keys() == fast.keys()
        assert all(torch.equal(found[name], fast[name]) for name in fast)


COMPILED = [
    ("biases", "fast", False),
    ("biases", "auto", True),
    ("biases", "low", False),
    ("frozen weights", "auto", False),
    ("frozen but for biases", "low", True),
    ("LoRA", "auto", False),
    ("LoRA on the MLP", "low", True),
    ("hook on the mlp", "auto", False),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, memory, autocast", COMPILED)
def test_compiled(device, name, memory, autocast):
    def forward(model, **batch):
        if next(model.parameters()).dtype == torch.float64:
            return model(**batch)
        torch.compiler.reset()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            return torch.compile(model, backend="aot_eager")(**batch)

    compare(MODELS[name]().to(device).train(), make_batch(device), forward, memory=memory)


@levels
@pytest.mark.parametrize("bias", [False, True])
def test_inside_selective_checkpoints(device, memory, bias):
    """Over two layers: the first layer's output is recomputed from saved results of matmuls."""
    matmuls = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def forward(model, input_ids, labels):
        loss = checkpoint(
            lambda embedded: model(inputs_embeds=embedded, labels=labels).loss,
            model.get_input_embeddings()(input_ids),
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, matmuls),
        )
        return {"loss": loss}

    compare(build(device=device, mlp_bias=bias).train(), make_batch(device), forward, memory=memory)


@levels
def test_a_graph_is_used_twice(device, memory):
    model = patched(build(device=device, mlp_bias=True).train(), memory=memory)
    loss = model(**make_batch(device)).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, first[name]) for name, p in model.named_parameters())


@levels
def test_kept_tensors_may_be_moved(device, memory):
    model = patched(build(device=device).train(), memory=memory)
    expected = step(model, make_batch(device))
    with torch.autograd.graph.save_on_cpu():
        found = step(model, make_batch(device))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@levels
def test_part_of_the_gradients(device, memory):
    """torch.autograd.grad with respect to one weight, and to the embedded tokens."""
    stock = build(device=device).train()
    model = patched(stock, memory=memory)
    embedded = torch.randn(2, 5, 64, device=device)
    labels = make_batch(device, 2, 5)["labels"]
    results = []
    for each in (stock, model):
        x = embedded.clone().requires_grad_()
        loss = each(inputs_embeds=x, labels=labels).loss
        results.append(torch.autograd.grad(loss, (each.model.layers[1].mlp.up_proj.weight, x)))
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@levels
@pytest.mark.parametrize("adapted", [False, True], ids=["", "LoRA"])
def test_weights_that_are_replaced_before_the_backward(device, memory, adapted):
    """The backward uses the weights that the forward read, as with torch's linear layers. (A separate norm, as the last
    one, reads the new weight, as in transformers.)"""
    stock = build(device=device)
    model = patched(lora(stock) if adapted else stock, memory=memory).train()
    expected = step(model, make_batch(device))
    model.zero_grad()
    loss = model(**make_batch(device)).loss
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("proj", "lm_head", "layernorm")):
            parameter.data = torch.zeros_like(parameter)
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=0)


@levels
def test_a_second_derivative_is_an_error(device, memory):
    model = patched(build(device=device).train(), memory=memory)
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = model(**make_batch(device)).loss
    (expected,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.equal(gradient, expected)
    with pytest.raises(RuntimeError, match=r"twice|second derivative|double backward"):
        gradient.sum().backward()


def test_what_the_compiler_is_told(device):
    """Shapes, dtypes and strides of the two halves of a layer, which are ops in a graph."""
    x, norm = torch.randn(2, 3, 8, device=device), torch.rand(8, device=device)
    weights = [torch.randn(n, 8, device=device) for n in (12, 12, 8)]
    down = torch.randn(8, 12, device=device)
    bias = torch.randn(12, device=device)
    ops, checks = torch.ops.liger_ext_models, ("test_schema", "test_faketensor")

    # For each linear layer: weight, bias, four statistics of 4-bit weights; A, B, bias of its adapters; then the seed.
    def filled(layer, empty):
        base, adapter = layer[:2], layer[2:]
        return *base, *[empty] * (6 - len(base)), *((*adapter, empty) if adapter else ())

    def layers(*parameters):
        return [*(p for layer in parameters for p in filled(layer, None)), None]

    def constants(*scalings):  # None: no adapter
        return torch.float32, [c for s in scalings for c in (0.0, 0.0, 0.0, *((0.0,) if s is None else (1.0, s, 0.0)))]

    def needs(*wanted):
        return [True, True, *(need for layer in wanted for need in filled(layer, False)), False]

    a, b = torch.randn(2, 8, device=device), torch.randn(12, 2, device=device)
    two = (weights[0], bias), (weights[1], None, a, b)
    last = 1e-6, *constants(None, 0.5, None), layers(*two, weights[2:])
    arguments = x, norm, True, *last
    y, rstd, low, _, *outs = ops.norm_linears(*arguments)
    torch.library.opcheck(ops.norm_linears, arguments, test_utils=checks)
    wanted = needs((True, True), (False, False, True, True), (True,))
    for douts in ([x, *outs], [None, *outs], [x, None, *outs[1:]]):
        for saved in (y, None):
            arguments = douts, x, norm, rstd, (saved, low, None), wanted, *last
            torch.library.opcheck(ops.norm_linears_backward, arguments, test_utils=checks)

    wanted = needs((True, True), (False, False, True, True), (True, False, True, True))
    last = 1e-6, *constants(None, 0.5, 2.0), layers(*two, (down, None, b.t().contiguous(), a.t().contiguous()))
    for memory in ("fast", "auto", "low"):
        arguments = x, x * 2, norm, memory, True, *last
        out, total, rstd, *saved = ops.norm_mlp(*arguments)
        torch.library.opcheck(ops.norm_mlp, arguments, test_utils=checks)
        saved = [t if t.numel() else None for t in saved]
        arguments = out, total, norm, rstd, saved, wanted, *last
        torch.library.opcheck(ops.norm_mlp_backward, arguments, test_utils=checks)


def test_the_level_of_a_patch(device):
    model = build(device=device).train()
    with apply_liger_kernel_to_llama(model=model, memory="low"):
        assert {m.liger_memory for m in (model, *model.model.layers)} == {"low"}
        assert copy.deepcopy(model).liger_memory == "low"
        with apply_liger_kernel_to_llama(model=model, memory="fast"):
            assert model.liger_memory == "fast"
    assert not any("liger_memory" in module.__dict__ for module in model.modules())
    with pytest.raises(ValueError, match="memory is 'most', expected 'fast', 'auto', 'low'"):
        apply_liger_kernel_to_llama(model=model, memory="most")


@pytest.mark.parametrize("bias", [False, True], ids=["", "with biases"])
def test_what_adapters_need_not_keep(device, bias):
    """LoRA's layers save their inputs: the norms' outputs and h, once each, even if several layers share them."""
    hidden, mlp, tokens = 64, 128, 33
    options = dict(target_modules="all-linear", lora_bias=bias)

    def saved(memory: str) -> int:
        model = patched(lora(build(device=device), **options).train(), memory=memory)
        return saved_bytes(model, make_batch(device))

    assert saved("fast") - saved("auto") == tokens * 2 * (2 * hidden + mlp) * 4  # two layers


def test_what_lora_keeps_under_autocast(device):
    """The same as with plain layers (o_proj is plain): fp32 adapters of 16-bit weights save no fp32 copies of
    inputs."""

    def saved(adapted: bool) -> int:
        model = build(device=device, dtype=torch.bfloat16)
        if adapted:
            model = lora(model, target_modules=["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])
            assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
        model = patched(model.train())
        with torch.autocast(device.type, torch.bfloat16):
            return saved_bytes(model, make_batch(device))

    casts_of_adapters = 2 * 2 * 4 * (6 * 64 + 4 * 128 + 64 + 2 * 32)  # two layers of rank 4
    assert saved(True) <= saved(False) + casts_of_adapters
