"""Models whose code comes with their weights (`trust_remote_code=True`): patches recognise it like transformers'
code."""

import copy
import pickle
import sys
import warnings

import family_models
import pytest
import test_trainer
import torch
from family_models import assert_same, clear_recognition  # noqa: F401
from llama_models import TRANSFORMERS, make_batch, one_thread, ops, step, tokens  # noqa: F401
from remote_code import build, write_repository
from test_trainer import LAYERS, LOSS, parameters
from transformers import AutoModelForCausalLM, dynamic_module_utils

from liger_ext import (
    AutoLigerKernelForCausalLM,
    apply_liger_kernel_to_instance,
    apply_liger_kernel_to_llama,
    apply_liger_kernel_to_qwen2,
    compat,
)
from liger_ext.models.modules.decoder import DecoderLayer
from liger_ext.models.modules.mlp import MLP
from liger_ext.models.patching.calls import is_patch

run = test_trainer.run
TYPES = "x", "llama"  # a model type of the repository; Llama's
types = pytest.mark.parametrize("model_type", TYPES)
PATCHED = {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention", "LlamaDecoderLayer", "LlamaForCausalLM"}
# One change per class that changes the result.
CHANGES = {
    "LlamaRMSNorm": ("return self.weight * ", "return (1 + self.weight) * "),
    "LlamaMLP": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.gate_proj(x)) + self.up_proj(x)",
    ),
    "LlamaAttention": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, x1), dim=-1)"),  # in a function that it calls
    "LlamaDecoderLayer": ("residual + hidden_states\n\n", "residual - hidden_states\n\n"),
    "LlamaForCausalLM": ("logits = self.lm_head(", "logits = 2 * self.lm_head("),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for repositories; transformers imports copies of their files from another folder."""
    modules = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", modules)
        patch.setattr(sys, "path", sys.path.copy())
        yield tmp_path_factory.mktemp("repositories")
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def repository(folder):
    """Writes a repository unless it exists."""

    def repository(name, *args, **kwargs):
        path = folder / name
        return path if path.exists() else write_repository(path, *args, **kwargs)

    return repository


@pytest.fixture
def llama(repository):
    return lambda model_type="x", *args: build(repository(f"a-copy_of.{model_type}", model_type), *args)


def patched_classes(model):
    return {type(module).__name__ for module in model.modules() if is_patch(type(module))}


def patched(model, **options):
    model = copy.deepcopy(model)
    apply_liger_kernel_to_instance(model, **options)
    return model


@types
def test_equals_stock(llama, model_type):
    stock = llama(model_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ours = patched(stock)
    assert patched_classes(ours) == PATCHED
    expected, found = step(stock, make_batch("cpu")), step(ours, make_batch("cpu"))
    assert "logits" in expected and "logits" not in found
    assert_same(found, expected)
    assert ops(ours, **make_batch("cpu")) >= LAYERS | LOSS
    evaluated = [model.eval()(**make_batch("cpu")) for model in (ours, stock)]
    torch.testing.assert_close(evaluated[0].logits, evaluated[1].logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(evaluated[0].loss, evaluated[1].loss)


@types
def test_is_undone(llama, model_type):
    model = llama(model_type)
    before = [type(module) for module in model.modules()]
    with apply_liger_kernel_to_instance(model), apply_liger_kernel_to_instance(model):
        assert patched_classes(model) == PATCHED
    assert [type(module) for module in model.modules()] == before


@types
@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.usefixtures("clear_recognition")
def test_a_class_with_one_change_stays(repository, model_type, changed):
    stock = build(repository(f"{changed}_{model_type}", model_type, dict([CHANGES[changed]])))
    with pytest.warns(UserWarning, match=rf"^{changed}: liger_ext does not know this code") as record:
        ours = patched(stock)
    with_it = (
        {"LlamaRMSNorm", "LlamaDecoderLayer"} if changed == "LlamaRMSNorm" else {changed}
    )  # the layer's norm is not known
    assert len(record) == 1 and patched_classes(ours) == PATCHED - with_it
    found, expected = step(ours, make_batch("cpu")), step(stock, make_batch("cpu"))
    assert_same(found, expected)
    unchanged = step(build(repository(f"a-copy_of.{model_type}", model_type)), make_batch("cpu"))
    assert abs(unchanged["loss"] - expected["loss"]) > 1e-3  # the change affects the result


@types
def test_names_that_are_swapped_are_followed(repository, model_type):
    """The source differs from Llama's only in names: gate and up, the two norms of a layer, and arguments."""
    swaps = {
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)": "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
        " = self.input_layernorm(": " = self.swapped(",
        " = self.post_attention_layernorm(": " = self.input_layernorm(",
        " = self.swapped(": " = self.post_attention_layernorm(",
        "self.variance_epsilon": "self.epsilon",
    }
    stock = build(repository(f"swapped-{model_type}", model_type, swaps))
    ours = patched(stock)
    assert patched_classes(ours) == PATCHED
    found, expected = step(ours, make_batch("cpu")), step(stock, make_batch("cpu"))
    assert_same(found, expected)
    unchanged = step(build(repository(f"not-swapped.{model_type}", model_type)), make_batch("cpu"))
    assert abs(unchanged["loss"] - expected["loss"]) > 1e-3  # the swap affects the result


def unknown(repository, model_type):
    return build(repository(f"unknown-{model_type}", model_type, dict(CHANGES.values())))


@types
def test_nothing_is_recognised(repository, model_type):
    model = unknown(repository, model_type)
    before = [type(module) for module in model.modules()]
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM of .* stays as it is|'x' is not known to") as record:
        apply_liger_kernel_to_instance(model).revert()
    assert len(record) == 1 and [type(module) for module in model.modules()] == before
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no llama model"):
        apply_liger_kernel_to_llama(model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        path = repository(f"unknown-{model_type}", model_type)
        assert not patched_classes(build(path, AutoLigerKernelForCausalLM))


def test_a_function_of_one_family(llama):
    """The function of a model type accepts models of remote code whose configuration has this type."""
    model = llama("llama")
    with apply_liger_kernel_to_llama(model=model, swiglu=False):
        assert patched_classes(model) == PATCHED - {"LlamaMLP"}
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no qwen2 model"):
        apply_liger_kernel_to_qwen2(model=model)
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no llama model"):
        apply_liger_kernel_to_llama(model=llama("x"))


@types
def test_the_auto_class(repository, model_type):
    path = repository(f"auto_{model_type}", model_type)  # a repository that transformers has not imported yet
    model = build(path, AutoLigerKernelForCausalLM)
    assert patched_classes(model) == PATCHED and type(model)._auto_class in (None, "AutoModelForCausalLM")
    assert_same(step(model, make_batch("cpu")), step(build(path), make_batch("cpu")))


@types
@pytest.mark.parametrize("copied", ["deepcopy", 2, pickle.HIGHEST_PROTOCOL])
def test_copies_and_pickles(llama, model_type, copied):
    model = llama(model_type)
    stock = type(model)
    apply_liger_kernel_to_instance(model)
    found = copy.deepcopy(model) if copied == "deepcopy" else pickle.loads(pickle.dumps(model, copied))
    assert [type(module) for module in found.modules()] == [type(module) for module in model.modules()]
    assert_same(step(found, make_batch("cpu")), step(model, make_batch("cpu")))
    with pytest.MonkeyPatch.context() as patch:  # unpickled by a version without this class
        patch.setattr("liger_ext.models.patches.find_patch", lambda cls: None)
        assert type(pickle.loads(pickle.dumps(model))) is stock


@types
def test_saved_with_its_code(llama, model_type, tmp_path):
    model = llama(model_type)
    type(model).register_for_auto_class("AutoModelForCausalLM")  # as from_pretrained does
    type(model.config).register_for_auto_class()
    apply_liger_kernel_to_instance(model)
    model.save_pretrained(tmp_path)
    assert {"modeling_x.py", "configuration_x.py"} <= {path.name for path in tmp_path.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).train()
    assert not patched_classes(loaded) and type(loaded).__name__ == "LlamaForCausalLM"
    assert_same(step(model, make_batch("cpu")), step(loaded, make_batch("cpu")))
    again = AutoLigerKernelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, rope=False).train()
    assert patched_classes(again) == PATCHED - {"LlamaAttention"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(llama, reentrant):
    stock = llama()
    ours = patched(stock)
    for model in (stock, ours):
        model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
        model.enable_input_require_grads()
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))


def test_compiled(llama):
    torch._dynamo.reset()
    ours = patched(llama())
    expected = step(ours, make_batch("cpu"))
    compiled = torch.compile(lambda m, **b: m(**b), backend="aot_eager", fullgraph=True)
    assert_same(step(ours, make_batch("cpu"), compiled), expected)


def test_generates_the_same(llama):
    model, ids = llama().eval(), tokens(2, 9)
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert torch.equal(patched(model).generate(ids, **options), model.generate(ids, **options))


CALLS = """class LlamaMLP(nn.Module):
    def __call__(self, x):
        return 2 * super().__call__(x)

"""


def test_a_call_of_its_own_is_called(repository):
    """Recognition does not read __call__, and our patches fuse nothing across it."""
    stock = build(repository("calls", "x", {"class LlamaMLP(nn.Module):\n": CALLS}))
    ours = patched(stock)
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))


STORES = "        attn_output = self.o_proj(attn_output)\n"


@pytest.mark.parametrize(
    "added", ["        self.seen = attn_output\n", "        assert len(list(super().children())) == 4\n"]
)
def test_an_attention_that_does_more_with_itself(repository, added):
    """Its projections then run inside the attention's own forward."""
    name = f"itself-{len(added)}"
    stock = build(repository(name, "x", {STORES: added + STORES}))
    ours = patched(stock)
    assert "LlamaAttention" in patched_classes(ours)
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))
    seen = [getattr(m.model.layers[0].self_attn, "seen", torch.zeros(())) for m in (ours, stock)]
    torch.testing.assert_close(*seen)


DECORATED = """class LlamaMLP(nn.Module):
    def auto_docstring(function):
        @functools.wraps(function)
        def doubled(self, x):
            return 2 * function(self, x)
        return doubled
"""


def test_a_decorator_of_its_own_is_called(repository):
    """The decorator shares its name with one of transformers that changes nothing."""
    forward = "    def forward(self, x):\n        down_proj"
    changes = {
        "class LlamaMLP(nn.Module):\n": "import functools\n" + DECORATED,
        forward: "    @auto_docstring\n" + forward,
    }
    stock = build(repository("decorated", "x", changes))
    with pytest.warns(UserWarning, match=r"LlamaMLP\.forward .* was replaced by doubled"):
        ours = patched(stock)
    assert patched_classes(ours) == PATCHED - {"LlamaMLP"}
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))


DERIVED = """
from torch import nn
from transformers.models.llama import modeling_llama
from .configuration_x import XConfig

class MyMLP(modeling_llama.LlamaMLP):
    pass
class MyLayer(modeling_llama.LlamaDecoderLayer):
    def __init__(self, *args):
        super().__init__(*args)
        self.mlp = MyMLP(args[0])
class LlamaForCausalLM(modeling_llama.LlamaForCausalLM):
    config_class = XConfig
    def __init__(self, config):
        super().__init__(config)
        self.model.layers = nn.ModuleList(MyLayer(config, i) for i in range(config.num_hidden_layers))
"""


def test_derived_from_transformers_own(repository):
    path = repository("derived", "x")
    (path / "modeling_x.py").write_text(DERIVED)
    stock = build(path)
    ours = patched(stock)
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))
    assert ops(ours, **make_batch("cpu")) >= LAYERS | LOSS
    assert all(isinstance(layer, DecoderLayer) and isinstance(layer.mlp, MLP) for layer in ours.model.layers)
    layer = pickle.loads(pickle.dumps(ours)).model.layers[0]
    assert [type(m) for m in layer.modules()] == [type(m) for m in ours.model.layers[0].modules()]


@pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="older transformers have other code")
def test_a_copy_of_an_earlier_llama(repository):
    """Its head has the code from before 5.21."""
    changes = {
        "        hidden_states = slice_logits_to_keep(hidden_states, logits_to_keep)\n": (
            "        slice_indices = "
            "slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep\n"
        ),
        "logits = self.lm_head(hidden_states)": "logits = self.lm_head(hidden_states[:, slice_indices, :])",
    }
    stock = build(repository("earlier", "x", changes))
    ours = patched(stock)
    assert patched_classes(ours) == PATCHED
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))


@pytest.mark.skipif(TRANSFORMERS < (5, 17), reason="older transformers have other code")
@pytest.mark.parametrize("family", ["gemma2", "granite", "mixtral", "qwen3"])
def test_other_families(repository, family):
    """Also by the functions with their own arguments: `geglu` of Gemma."""
    options = family_models.OPTIONS[family]
    stock = build(repository(family, family, family=family, options=options))
    family_models.set_experts(stock, "eager")
    ours = patched(stock)
    head = f"{family.capitalize()}ForCausalLM"
    assert patched_classes(ours) >= {head, head.replace("ForCausalLM", "RMSNorm")}
    assert_same(step(ours, make_batch("cpu")), step(stock, make_batch("cpu")))


@pytest.mark.parametrize("model_type", [*TYPES, *(f"{name}, unknown" for name in TYPES)])
def test_trains(run, repository, llama, model_type):
    """The Trainer patches the model; where nothing is recognised, it warns and trains unpatched."""
    name, _, is_unknown = model_type.partition(", ")
    make = (lambda: unknown(repository, name)) if is_unknown else (lambda: llama(name))
    model, stock = make(), make()
    start = parameters(stock)
    with warnings.catch_warnings(record=True) as caught, compat.install():
        warnings.simplefilter("always")
        found = run(model, use_liger_kernel=True)
    assert sum("liger_ext" in str(warning.message) for warning in caught) == bool(is_unknown)
    test_trainer.assert_same(found, run(stock), start)
    assert found.ops >= LAYERS | LOSS if not is_unknown else not found.ops
