"""Other code's replacements of transformers' code stay effective in a patched model, or a warning names them."""

import contextlib
import functools

import pytest
import torch
from cases import RecordCalls, python, slow_if
from llama_models import build, make_batch, one_thread, patched, step, tokens  # noqa: F401
from test_patch import PATCHED
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models import llama


def patched_class_names(model):
    return {
        type(module).__name__ for module in model.modules() if type(module).__module__.startswith("liger_ext.models.")
    }


def replace_forward(monkeypatch, name, decorate):
    """Replaces the class's forward, as users do, with a function that counts its calls."""
    cls, calls = getattr(modeling_llama, name), []
    original = cls.forward

    def theirs(self, *args, **kwargs):
        calls.append(None)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", functools.wraps(original)(theirs) if decorate else theirs)
    return calls


@pytest.mark.parametrize("decorate", [False, True], ids=["replaced", "decorated"])
@pytest.mark.parametrize("name", PATCHED)
def test_a_replaced_forward_is_called(monkeypatch, name, decorate):
    model = build().train()
    calls = replace_forward(monkeypatch, name, decorate)
    model(**make_batch("cpu"))
    expected = len(calls)
    with pytest.warns(
        UserWarning, match=rf"{name}\.forward of transformers was replaced by theirs \(.*foreign\.py"
    ) as w:
        handle = apply_liger_kernel_to_llama(model=model)
    assert len(w) == 1
    assert patched_class_names(model) == set(PATCHED) - {name}
    calls.clear()
    with RecordCalls() as record:
        model(**make_batch("cpu")).loss.backward()
    assert len(calls) == expected > 0
    assert record.calls  # the other classes are patched
    handle.revert()
    assert not patched_class_names(model)


def test_a_replaced_class_stays_as_it_is(monkeypatch):
    """As when Liger-Kernel puts its MLP into transformers' module, for all models that are built later."""

    class Mlp(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.up_proj = nn.Linear(config.hidden_size, config.hidden_size)

        def forward(self, x):
            return self.up_proj(x)

    monkeypatch.setattr(modeling_llama, "LlamaMLP", Mlp)
    model, batch = build().train(), make_batch("cpu")
    expected = model(**batch).loss
    with apply_liger_kernel_to_llama(model=model):
        assert patched_class_names(model) == set(PATCHED) - {"LlamaMLP"}
        torch.testing.assert_close(model(**batch).loss, expected)


def test_a_replaced_forward_is_called_in_what_is_built_later(monkeypatch):
    with apply_liger_kernel_to_llama():
        calls = replace_forward(monkeypatch, "LlamaMLP", decorate=False)
        with pytest.warns(UserWarning, match=r"LlamaMLP\.forward of transformers was replaced"):
            model = build()
    model(tokens(1, 4))
    assert len(calls) == 2
    monkeypatch.undo()
    with apply_liger_kernel_to_llama(model=model):
        assert type(model.model.layers[0].mlp) is llama.LlamaMLP


def test_a_replaced_rope_is_called(monkeypatch):
    calls = []
    original = modeling_llama.apply_rotary_pos_emb

    def theirs(*args, **kwargs):
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", theirs)
    model = build()
    with pytest.warns(UserWarning, match="apply_rotary_pos_emb of transformers was replaced by theirs"):
        apply_liger_kernel_to_llama(model=model)
    model(tokens(1, 4))
    assert len(calls) == 2
    assert patched_class_names(model) == set(PATCHED) - {"LlamaAttention"}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replaced_attention_function_is_called(monkeypatch, when):
    """A patch replaces only some globals of the module; all others are looked up in that module at each call."""
    calls = []
    original = modeling_llama.eager_attention_forward

    def theirs(module, query, *args, **kwargs):
        calls.append(query)
        return original(module, query, *args, **kwargs)

    model = build(attn_implementation="eager")
    for patch in (lambda: monkeypatch.setattr(modeling_llama, "eager_attention_forward", theirs),
                  lambda: apply_liger_kernel_to_llama(model=model))[:: 1 if when == "before" else -1]:  # fmt: skip
        patch()
    with RecordCalls() as record:
        model(tokens(1, 4))
    assert len(calls) == 2
    assert record.names.count("rope") == 2


def test_a_replaced_registry_of_attention_functions_is_used(monkeypatch):
    calls = []
    registry = modeling_llama.ALL_ATTENTION_FUNCTIONS
    model = patched(build(attn_implementation="sdpa"))

    class Registry(dict):
        def get_interface(self, name, default):
            return self[name]

        def __getitem__(self, name):
            calls.append(name)
            return registry[name]

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Registry())
    model(tokens(1, 4))
    assert calls == ["sdpa", "sdpa"]


def test_an_attention_function_of_the_users_own_gets_the_module_itself(monkeypatch):
    original = modeling_llama.eager_attention_forward

    @functools.wraps(original)
    def theirs(module, query, *args, **kwargs):
        assert module.q_proj.weight.dtype == query.dtype
        seen.append(module)
        return original(module, query, *args, **kwargs)

    model, seen = build(attn_implementation="eager").train(), []
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", theirs)
    patched_model = patched(model)
    patched_model(**make_batch("cpu")).loss.backward()
    assert all(found is layer.self_attn for found, layer in zip(seen, patched_model.model.layers, strict=True))


@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_a_norm_of_the_users_own_class_is_called(name):
    class Doubled(llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    model, doubled = patched(build()), patched(build())
    for layer, other in zip(model.model.layers, doubled.model.layers, strict=True):
        getattr(layer, name).__class__ = Doubled
        nn.init.constant_(getattr(layer, name).weight, 1.0)
        nn.init.constant_(getattr(other, name).weight, 2.0)
    torch.testing.assert_close(model(tokens(1, 4)).logits, doubled(tokens(1, 4)).logits)


def halve_linears(monkeypatch, how):
    """Changes all linear layers as other code might; returns the context manager that a step must enter."""
    method, function = nn.Linear.forward, nn.functional.linear

    class Mode(TorchFunctionMode):
        def __torch_function__(self, called, types, args=(), kwargs=None):
            result = called(*args, **(kwargs or {}))
            return result * 0.5 if called is function else result

    if how == "method":
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: method(self, x) * 0.5)
    elif how == "function":
        monkeypatch.setattr(nn.functional, "linear", lambda *args: function(*args) * 0.5)
    else:
        return Mode()
    return contextlib.nullcontext()


@pytest.mark.parametrize("how", ["method", "function", "mode"])
def test_replaced_linear_layers_have_their_own_gradients(monkeypatch, how):
    stock = build().train()
    model, batch = patched(stock), make_batch("cpu")
    labels = batch.pop("labels")

    def forward(model, input_ids):
        with halve_linears(monkeypatch, how):
            logits = model(input_ids).logits
        monkeypatch.undo()
        return {"loss": stock.loss_function(logits, labels, stock.config.vocab_size)}

    expected, found = (step(each, batch, forward) for each in (stock, model))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


BEFORE_THE_IMPORT = """
import functools, sys, warnings, torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as m

what, *names = sys.argv[1:]
calls, originals = set(), {name: getattr(m, name).forward for name in names}

class BoundLater(functools.partial):
    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)

def replacement(name):
    def theirs(self, *args, **kwargs):
        calls.add(name)
        return originals[name](self, *args, **kwargs)
    return theirs

for name in names:
    if what == "class":
        setattr(m, name, type(name, (getattr(m, name),), {"forward": replacement(name)}))
    else:
        getattr(m, name).forward = replacement(name) if what == "function" else BoundLater(replacement(name))

from liger_ext import apply_liger_kernel_to_llama
sizes = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1)
model = m.LlamaForCausalLM(LlamaConfig(**sizes)).train()
ids = torch.arange(6).view(1, 6)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    apply_liger_kernel_to_llama(model=model)
messages = [str(warning.message) for warning in caught]
for name in names:
    assert sum(f"{name}.forward of transformers was replaced" in message for message in messages) == 1, messages
model(input_ids=ids, labels=ids)
assert calls == set(names), calls
if what == "function":  # what was found at the import is not taken for transformers' own when that is back
    for name in names:
        getattr(m, name).forward = originals[name]
    calls.clear()
    apply_liger_kernel_to_llama(model=model)
    model(input_ids=ids, labels=ids)
    assert not calls, calls
"""


SOME = ("LlamaAttention", "LlamaMLP")


@pytest.mark.parametrize(
    "what, names",
    [("function", PATCHED), slow_if(True, "callable object", SOME), slow_if(True, "class", SOME)],
    ids=["function", "callable object", "class"],
)
def test_replaced_before_the_import(what, names):
    python("-c", BEFORE_THE_IMPORT, what, *names, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_of_the_users_own_gets_what_it_gets_unpatched(device, training):
    """The loss function receives all arguments of the call, even those that our losses would use."""
    seen = []

    def loss_function(logits, labels, vocab_size, **kwargs):
        seen.append(kwargs)
        return logits.float().square().mean()

    weight = torch.ones(3, device=device)
    options = dict(label_smoothing=0.3, ce_weight=weight, return_token_accuracy=True, memory=1 << 20, mine="too")
    stock = build(device=device).train(training)
    model = patched(stock)
    for each in (stock, model):
        each.loss_function = loss_function
        output = each(**make_batch(device), **options, num_items_in_batch=7)
        torch.testing.assert_close(output.loss, output.logits.float().square().mean())
    assert seen[0].keys() >= options.keys()
    assert seen[1].keys() == seen[0].keys()
    assert all(seen[1][name] is value for name, value in options.items())


def test_another_activation_of_an_instance_is_used():
    model = build()
    first, second = (layer.mlp for layer in model.model.layers)
    first.act_fn = nn.Tanh()
    x = torch.randn(3, 64)
    expected = first(x)
    apply_liger_kernel_to_llama(model=model)
    assert torch.equal(first(x), expected)
    assert type(second) is llama.LlamaMLP


@pytest.mark.parametrize("change", ["another", "a hook", "a forward"])
def test_an_activation_changed_after_patching_is_used(change):
    stock = build()
    compared = patched(stock)
    for model in (stock, compared):
        mlp = model.model.layers[0].mlp
        if change == "another":
            mlp.act_fn = nn.Tanh()
        elif change == "a hook":
            mlp.act_fn.register_forward_hook(lambda module, args, output: 2 * output)
        else:
            mlp.act_fn.forward = torch.tanh
    x = torch.randn(3, 64)
    assert torch.equal(compared.model.layers[0].mlp(x), stock.model.layers[0].mlp(x))


def test_projections_of_two_dtypes():
    stock = build(dtype=torch.bfloat16)
    stock.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: output.float())
    stock.model.layers[0].mlp.down_proj.float()
    compared, x = patched(stock), torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(compared.model.layers[0].mlp(x), stock.model.layers[0].mlp(x))


def test_a_learned_scale_of_rope():
    """cos and sin that require a gradient receive it."""

    def gradient(model):
        scale = torch.ones((), requires_grad=True)
        model.model.rotary_emb.register_forward_hook(lambda module, args, output: [scale * table for table in output])
        model(**make_batch("cpu")).loss.backward()
        return scale.grad

    stock = build()
    compared = patched(stock)
    torch.testing.assert_close(gradient(compared), gradient(stock))
