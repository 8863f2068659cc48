"""Counts the adapters that run PEFT's own forward in a training step of a patched family: none, unless an adapter
computes more than plain LoRA. Loss and gradients are as close to float64 as those of a stock step."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from family_models import assert_same, build, patched
from llama_models import (  # noqa: F401
    LEVELS,
    assert_as_good,
    checkpoint_layers,
    lora,
    make_batch,
    one_thread,
    step,
)
from torch import nn

peft = pytest.importorskip("peft")
from peft.tuners.lora import Linear, LoraLayer  # noqa: E402

FAMILIES = ("llama", "gemma2", "phi3", "olmo3", "cohere2", "qwen3_5_text")
# Families with other modules that have no patch, and the adapters that run PEFT's forward: one whose weight the module
# reads by itself, and one of the model, outside of its layers.
OTHERS = {
    "apertus": None,
    "bamba": "mamba.out_proj",
    "gemma4_text": "per_layer_model_projection",
    "qwen2_moe": None,
}
ORDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "patch, adapt": lambda model: adapt(patched(model)),
    "adapt, patch": lambda model: patched(adapt(model)),
}
orders = pytest.mark.parametrize("order", ORDERS)


def adapt(model: nn.Module) -> nn.Module:
    return lora(model, target_modules="all-linear")


def adapters(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def recorded_calls(modules: dict[str, nn.Module]) -> Iterator[list[str]]:
    """Records the names of the modules whose forward runs, by a profiler: a hook or a wrapped function would keep the
    nodes from running."""
    names, found = {id(module): name for name, module in modules.items()}, []
    codes = {type(module).forward.__code__ for module in modules.values()}

    def profile(frame, event, _):
        if event == "call" and frame.f_code in codes and id(frame.f_locals["self"]) in names:
            found.append(names[id(frame.f_locals["self"])])

    sys.setprofile(profile)
    try:
        yield found
    finally:
        sys.setprofile(None)


def calls_in_step(model: nn.Module, find: Callable[[nn.Module], dict] = adapters) -> set[str]:
    with recorded_calls(find(model)) as found:
        step(model, make_batch(next(model.parameters()).device))
    return set(found)


@orders
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_no_adapter_runs_pefts_forward(family, order):
    stock, model = adapt(build(family)), ORDERS[order](build(family))
    count = len(adapters(model))
    assert len(calls_in_step(stock)) == count > 0
    left = OTHERS.get(family)
    assert calls_in_step(model) == {name for name in adapters(model) if left and name.endswith(left)}


@pytest.mark.parametrize("family", ["cohere2", "gemma2", "olmo3"])
def test_layers_of_one_input_are_one_node(family):
    """In each layer: q, k and v; the attention's result; gate and up; down."""
    model = patched(adapt(build(family)))
    loss = model(**make_batch("cpu")).loss
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [n for n, _ in node.next_functions if n is not None]
    assert sum(type(n).__name__ == "_AdaptedBackward" for n in seen) == 4 * model.config.num_hidden_layers


def make_dora(layer: Linear) -> None:
    options = dict(lora_dropout=0.0, init_lora_weights=True, use_rslora=False, use_dora=True)
    config = peft.LoraConfig(**options)  # PEFT 0.18 reads the options, later versions the config
    layer.update_layer("other", r=2, lora_alpha=2, config=config, **options)
    layer.set_adapter("other")


def make_hooked(layer: Linear) -> None:
    layer.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [make_dora, make_hooked])
@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_of_an_adapter_that_is_not_plain(family, change):
    model = patched(adapt(build(family)))
    wanted = {n for n in adapters(model) if n.endswith((".k_proj", ".up_proj", ".gate_up_proj", ".in_proj_z"))}
    for name in wanted:
        change(adapters(model)[name])
    assert calls_in_step(model) == wanted


@pytest.mark.parametrize("checkpoints", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_as_good_as_stock(family, memory, checkpoints):
    stock = adapt(build(family))
    model, reference = patched(stock, memory=memory), copy.deepcopy(stock).double()
    if checkpoints:
        for each in (stock, model, reference):
            checkpoint_layers(each, checkpoints == "reentrant")
    found, expected, exact = (step(each, make_batch("cpu")) for each in (model, stock, reference))
    if family == "qwen3_5_text":  # a float64 copy still computes in fp32, so it is no reference
        assert_same(found, expected)
    else:
        assert_as_good(found, expected, exact)


def test_without_gradients_pefts_forward_runs():
    model = patched(adapt(build("gemma2")))
    with torch.no_grad(), recorded_calls(adapters(model)) as found:
        model(**make_batch("cpu"))
    assert set(found) == set(adapters(model))


def test_a_users_attention_function_receives_the_module():
    """Then the attention's adapters run PEFT's code. Those of the MLP are nodes."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen = []

    def attention(module, *args, **kwargs):
        seen.append(module)
        return sdpa_attention_forward(module, *args, **kwargs)

    AttentionInterface.register("recording", attention)
    model = patched(adapt(build("phi3")))
    model.set_attn_implementation("recording")
    found = calls_in_step(model)
    assert all(isinstance(module, nn.Module) for module in seen) and seen
    assert found == {name for name in adapters(model) if "self_attn" in name}
