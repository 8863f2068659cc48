"""Tests that a changed call of a module stays in effect: fused code replaces a module only if a call of the module
would run its known forward and nothing else."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import family_models
import pytest
import torch
from family_models import assert_same
from llama_models import TRANSFORMERS, lora, one_thread, step, tokens  # noqa: F401
from torch import nn
from torch.nn.modules import module as torchs
from transformers import activations

from liger_ext import apply_liger_kernel_to_instance
from liger_ext.models.patching.calls import only_forward_runs

SMALL = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8
)


calls: list[None] = []  # grows with each call of a function that a test has inserted


def halved(result):
    """Returns the output of a changed module instead of `result`."""
    if isinstance(result, tuple):
        return tuple(map(halved, result))
    return 0.5 * result if isinstance(result, torch.Tensor) and result.is_floating_point() else result


def halving(function: Callable) -> Callable:
    @functools.wraps(function)
    def changed(*args, **kwargs):
        calls.append(None)
        return halved(function(*args, **kwargs))

    return changed


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    yield
    delattr(owner, name) if before is missing else setattr(owner, name, before)


def on_instance(name: str, like: str | None = None) -> Callable:
    return lambda module: replaced(module, name, halving(getattr(module, like or name)))


def on_class(name: str) -> Callable:
    return lambda module: replaced(type(module), name, halving(getattr(type(module), name)))


@contextmanager
def in_a_subclass(name: str, module: nn.Module) -> Iterator[None]:
    cls = type(module)
    module.__class__ = type(cls)(cls.__name__, (cls,), {name: halving(getattr(cls, name)), "__module__": __name__})
    yield
    module.__class__ = cls


@contextmanager
def hooked(register: str, hook: Callable, module: nn.Module, **options) -> Iterator[None]:
    handle = getattr(module, register)(hook, **options)
    yield
    handle.remove()


@contextmanager
def hooked_globally(register: Callable, hook: Callable, module: nn.Module) -> Iterator[None]:
    handle = register(lambda called, *args: hook(called, *args) if called is module else None)
    yield
    handle.remove()


def result_hook(module, *arguments):
    calls.append(None)
    return halved(arguments[-1])


def argument_hook(module, args, kwargs):
    calls.append(None)
    return halved(args), {name: halved(v) if name == "hidden_states" else v for name, v in kwargs.items()}


def gradient_hook(module, gradients, *_):
    calls.append(None)
    return halved(gradients)


CHANGES: dict[str, Callable] = {
    "its own forward": on_instance("forward"),
    "its own _call_impl": on_instance("_call_impl"),
    "compiled": on_instance("_compiled_call_impl", "_call_impl"),
    "forward of the class": on_class("forward"),
    "_call_impl of the class": on_class("_call_impl"),
    "__call__ of the class": on_class("__call__"),
    "a decorator of torch on the class": lambda m: replaced(type(m), "forward", torch.no_grad()(type(m).forward)),
    "_call_impl of a subclass": functools.partial(in_a_subclass, "_call_impl"),
    "__call__ of a subclass": functools.partial(in_a_subclass, "__call__"),
    "forward of a subclass": functools.partial(in_a_subclass, "forward"),
    "forward hook": functools.partial(hooked, "register_forward_hook", result_hook),
    "pre-hook with kwargs": functools.partial(hooked, "register_forward_pre_hook", argument_hook, with_kwargs=True),
    "backward hook": functools.partial(hooked, "register_full_backward_hook", gradient_hook),
    "backward pre-hook": functools.partial(hooked, "register_full_backward_pre_hook", gradient_hook),
    "global forward hook": functools.partial(hooked_globally, torchs.register_module_forward_hook, result_hook),
    "global backward hook": functools.partial(
        hooked_globally, torchs.register_module_full_backward_pre_hook, gradient_hook
    ),
}
LAYER = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "",
)
MLP = "mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.down_proj"
OTHERS = "model.embed_tokens", "model.norm", "lm_head"
LORAS = (
    *(f"self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")),
    *(
        f"mlp.up_proj{part}"
        for part in ("", ".base_layer", ".lora_A.default", ".lora_B.default", ".lora_dropout.default")
    ),
    "mlp.down_proj",
)
# Before transformers 5 each expert is an MLP.
EXPERTS = (
    ("mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn")
    if TRANSFORMERS >= (5, 0)
    else tuple(f"block_sparse_moe{part}" for part in ("", ".gate", ".experts.0", ".experts.0.w1", ".experts.0.act_fn"))
)
MODELS = {  # {model: modules of a layer to change}
    "llama": (*LAYER, *MLP),
    "llama with LoRA": LORAS,
    "mixtral": (*LAYER[:2], *EXPERTS),
    "gemma2": (*LAYER, "pre_feedforward_layernorm", "post_feedforward_layernorm", *MLP),
}


class Head(nn.Linear):
    """The class of the head alone, so that a change of it does not affect other linear layers."""


@functools.cache
def build(name: str) -> nn.Module:
    family, _, adapter = name.partition(" with ")
    family, _, option = family.partition(" of ")
    options = dict(hidden_act=option) if option == "gelu" else family_models.all_experts(family)
    if family == "mixtral":
        # transformers 4.54 to 5.0 records router logits by replacing the forward of instances.
        options["output_router_logits"] = False
    model = family_models.build(family, num_hidden_layers=1, **SMALL, **options)
    if option and option != "gelu":
        family_models.set_experts(model, option)
    if name == "llama":
        model.lm_head.__class__ = Head
    return lora(model, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]) if adapter else model


@functools.cache
def patched(name: str, memory: str) -> nn.Module:
    return family_models.patched(build(name), memory=memory)


def changed_modules(name: str) -> list[str]:
    layer = next(n for n, _ in build(name).named_modules() if n.endswith("layers.0"))
    others = [n for n, _ in build(name).named_modules() if n.endswith(OTHERS)]
    return [f"{layer}.{part}".rstrip(".") for part in MODELS[name]] + others * (name == "llama")


def batch() -> dict:
    ids = tokens(2, 7) % 64
    return dict(input_ids=ids, labels=ids)


def changed_step(model: nn.Module, module: str, change: Callable) -> dict:
    calls.clear()
    with change(model.get_submodule(module)):
        return {**step(model, batch()), "calls": torch.tensor(len(calls))}


@functools.cache
def stock_step(name: str) -> dict:
    return {**step(build(name), batch()), "calls": torch.tensor(0)}


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)


def assert_obeyed(name: str, memory: str, module: str, change: Callable) -> None:
    expected = changed_step(build(name), module, change)
    assert not same(expected, stock_step(name)), "the change has no effect"
    found = changed_step(patched(name, memory), module, change)
    assert found.keys() | {"logits"} == expected.keys()
    assert_same(found, expected)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", MODELS)
def test_every_change(name, change):
    for i, module in enumerate(changed_modules(name)):
        if change.startswith("a decorator") and "dropout" in module:
            continue  # dropout returns its argument, and with it the gradient
        memory = ("auto", "low", "fast")[(i + list(CHANGES).index(change)) % 3]
        try:
            assert_obeyed(name, memory, module, CHANGES[change])
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{module}, memory={memory}: {error}") from error


METHODS = [  # methods that a forward calls
    ("gemma2", "layers.0.pre_feedforward_layernorm", "_norm"),
    ("gemma2", "layers.0.input_layernorm", "_norm"),
    ("gemma2", "model.norm", "_norm"),
    ("llama with LoRA", "q_proj", "_cast_input_dtype"),
    ("llama with LoRA", "down_proj", "_cast_input_dtype"),
    *[("mixtral of batched_mm", "experts", "_apply_gate")] * (TRANSFORMERS >= (5, 0)),
]


METHOD_CHANGES = {
    "instance": on_instance,
    "class": on_class,
    "subclass": lambda method: functools.partial(in_a_subclass, method),
}


@pytest.mark.parametrize(
    "name, module, method, make_change",
    # An activation stores its function on the instance.
    [
        ("llama of gelu", "act_fn", "act", on_instance),
        *[("gemma2", "act_fn", "act", on_instance)] * hasattr(activations, "GELUTanh"),
        *((*method, make_change) for method in METHODS for make_change in METHOD_CHANGES.values()),
    ],
)
def test_a_method(name, module, method, make_change):
    change = make_change(method)
    module = next(n for n, _ in build(name).named_modules() if n.endswith(module))
    for memory in ("auto", "low"):
        assert_obeyed(name, memory, module, change)


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("name, module, method", [m for m in METHODS if m[2] in ("_norm", "_apply_gate")])
def test_a_method_of_a_subclass_that_is_patched(name, module, method, memory):
    """A user's subclass that inherits transformers' forward but overrides one of its methods is not patched."""
    model = build(name)
    module = next(n for n, _ in model.named_modules() if n.endswith(module))
    with in_a_subclass(method, model.get_submodule(module)):
        expected = changed_step(model, module, contextlib.nullcontext)
        with pytest.warns(UserWarning, match=f"has a {method} of its own and is not patched"):
            compared = copy.deepcopy(model)
            apply_liger_kernel_to_instance(compared, memory=memory)
        found = changed_step(compared, module, contextlib.nullcontext)
    assert int(expected["calls"]) > 0
    assert_same(found, expected)


@pytest.mark.parametrize("name", MODELS)
def test_what_all_modules_do(name):
    """A replaced nn.Module.__call__ stays in effect, as used by tools that trace or count calls."""
    call = nn.Module.__call__

    def counting(module, *args, **kwargs):
        calls.append(None)
        return call(module, *args, **kwargs)

    def all_modules(module):
        return replaced(nn.Module, "__call__", counting)

    assert_obeyed(name, "auto", "", all_modules)


def test_what_was_replaced_and_is_put_back_is_fused_again():
    """Recognition reads the current attributes of a class, not those at the time of the patch."""
    model = patched("llama", "low")
    mlp = model.model.layers[0].mlp
    assert only_forward_runs(mlp)
    for change in (on_class("forward"), on_class("_call_impl"), on_instance("forward"), on_instance("_call_impl")):
        with change(mlp):
            assert not only_forward_runs(mlp)
        assert only_forward_runs(mlp)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, module",
    [
        ("its own _call_impl", "mlp.up_proj"),
        ("_call_impl of a subclass", "post_attention_layernorm"),
        ("forward of the class", "mlp"),
    ],
)
def test_in_a_graph(change, module):
    """torch.compile traces the changed call into one graph."""
    module = f"model.layers.0.{module}"
    expected = changed_step(build("llama"), module, CHANGES[change])
    compared = patched("llama", "auto")
    with CHANGES[change](compared.get_submodule(module)):
        torch.compiler.reset()
        found = step(torch.compile(compared, backend="aot_eager", fullgraph=True), batch())
    found = {name.removeprefix("_orig_mod."): result for name, result in found.items()}
    del expected["calls"]
    assert_same(found, expected)
