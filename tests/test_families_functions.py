"""Tests of the functions `apply_liger_kernel_to_*`: arguments as in Liger-Kernel, model types, and models built
afterwards."""

import contextlib
import importlib.util
import inspect

import pytest
import test_families_images as images
import torch
from llama_models import TRANSFORMERS, assert_as_good, build, one_thread, step, tokens  # noqa: F401
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig

import liger_ext
from liger_ext.models import auto
from liger_ext.models.model_types import FAMILIES, FUNCTION_TYPES, model_folder
from liger_ext.models.modules import norms

# {positional arguments of a function of Liger-Kernel 0.8.5: names of the functions with these arguments}.
ALL = "rope cross_entropy fused_linear_cross_entropy rms_norm swiglu model"
UPSTREAM = {
    ALL: "deepseek_v4 exaone4 falcon_h1 glm4 glm4v glm4v_moe gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe llama "
    "ministral mistral mixtral olmo2 olmo3 phi3 qwen2 qwen2_5_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next "
    "qwen3_vl qwen3_vl_moe smollm3",
    ALL.replace("swiglu", "geglu"): "gemma gemma2 gemma3_text gemma4_text",
    ALL.replace("rms_norm swiglu", "layer_norm rms_norm geglu"): "gemma3 gemma4 paligemma",
    ALL.replace("rms_norm", "layer_norm rms_norm"): "mllama",
    ALL.replace("swiglu", "layer_norm swiglu"): "qwen2_vl",
    ALL + " layer_norm": "llama4",
    "cross_entropy fused_linear_cross_entropy model": "llava",
    "cross_entropy fused_linear_cross_entropy rms_norm layer_norm model": "internvl smolvlm",
    "relu_squared cross_entropy fused_linear_cross_entropy model": "nemotron",
    "rope rms_norm swiglu model": "pixtral",
}
NAMES = {name: arguments.split() for arguments, names in UPSTREAM.items() for name in names.split()}
PARTS = "llama4_text mllama_text_model qwen2_5_vl_text qwen2_vl_text qwen3_5_moe_text qwen3_5_text qwen3_vl_moe_text"
images_are_known = pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="older transformers have other code")


def test_names_and_arguments():
    assert len(NAMES) == 42 and NAMES.keys() <= FAMILIES.keys()
    assert len(NAMES.keys() | {*PARTS.split(), "qwen3_vl_text"}) == 50
    assert (
        NAMES.keys() | {*PARTS.split(), "qwen3_vl_text"} <= FUNCTION_TYPES.keys() == set(auto.supported_model_types())
    )
    everything = inspect.signature(liger_ext.apply_liger_kernel_to_llama).parameters.keys() - {"swiglu"}
    for name, arguments in NAMES.items():
        function = getattr(liger_ext, f"apply_liger_kernel_to_{name}")
        assert function.__name__ == f"apply_liger_kernel_to_{name}" in liger_ext.__all__
        parameters = inspect.signature(function).parameters
        by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert by_position == arguments, name
        unit = next((name for name in ("geglu", "relu_squared") if name in arguments), "swiglu")
        assert parameters.keys() == everything | {unit, *arguments}, name
        assert {n: p.default for n, p in parameters.items() if p.default is not True} == {
            "cross_entropy": False,
            "model": None,
            "memory": None,
        }


@pytest.mark.parametrize("model_type", [t for t in FUNCTION_TYPES if t not in ("qwen3_5_text", "llama4_text")])
def test_can_be_called(model_type):
    """Every model type can be patched if transformers has its family; a part of a model by the function of the
    whole."""
    folder = model_folder(FUNCTION_TYPES[model_type])
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        with pytest.raises(ImportError, match=f"no transformers.models.{folder}.modeling_{folder}; upgrade"):
            liger_ext.apply_liger_kernel(model_type)
    else:
        liger_ext.apply_liger_kernel(model_type, rope=False, rms_norm=False).revert()
        with pytest.raises(ValueError, match=f"holds no {FUNCTION_TYPES[model_type]} model"):
            auto._patch(model_type, {"model": nn.Linear(2, 2)}, auto.patch_function)


@pytest.mark.parametrize("family, unit", [("gemma", "geglu"), ("nemotron", "relu_squared"), ("mistral", "swiglu")])
def test_bad_arguments_are_named(family, unit):
    function = getattr(liger_ext, f"apply_liger_kernel_to_{family}")
    with pytest.raises(TypeError, match=f"{unit} is 3, of <class 'int'>, expected Python's True or False"):
        function(**{unit: 3})
    with pytest.raises(ValueError, match="cross_entropy and fused_linear_cross_entropy exclude each other"):
        function(cross_entropy=True)


def test_an_instance_of_another_family():
    with pytest.raises(ValueError, match="LlamaForCausalLM holds no llava model"):
        liger_ext.apply_liger_kernel_to_llava(model=build())


@images_are_known
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "mllama", "gemma3"])
def test_models_of_images_that_are_built_later(family):
    """The patch includes the inner language model, of any family, and the norms of the towers."""
    apply = getattr(liger_ext, f"apply_liger_kernel_to_{family}")
    stock = images.build(family)
    with apply():
        model = images.build(family)
    assert not any(
        type(m).__module__.startswith("liger_ext") for m in (*stock.modules(), *images.build(family).modules())
    )
    names = {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("liger_ext")}
    assert {type(stock).__name__} < names
    assert ("LayerNorm" in names) is (family != "llava")
    ids = tokens(2, 9) % 900 + 3
    batch = dict(input_ids=ids, labels=ids)
    torch.testing.assert_close(model(**batch).loss, stock(**batch).loss)


@images_are_known
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "autocast"])
def test_norms_of_towers(device, dtype):
    """Patched norms equal torch's, dtypes included; `layer_norm=False` leaves them unpatched."""
    model = images.build("qwen2_vl", device)
    if dtype == "bf16":
        model = model.bfloat16()
    block = model.model.visual.blocks[0].norm1
    x = torch.randn(5, 32, device=device, dtype=torch.bfloat16 if dtype != "fp32" else torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == "autocast"):
        expected = block(x)
        with liger_ext.apply_liger_kernel_to_qwen2_vl(model=model, layer_norm=False):
            assert type(block) is nn.LayerNorm
        with liger_ext.apply_liger_kernel_to_instance(model):
            assert type(block) is not nn.LayerNorm
            found = block(x)
    torch.testing.assert_close(found, expected)
    assert type(block) is nn.LayerNorm


@images_are_known
def test_norms_of_towers_that_are_parametrized():
    model = images.build("qwen2_vl")
    norm, other = model.model.visual.blocks[0].norm1, model.model.visual.blocks[0].norm2
    parametrize.register_parametrization(norm, "weight", nn.Identity())
    other.__class__ = type("Other", (nn.LayerNorm,), {})
    handle = liger_ext.apply_liger_kernel_to_qwen2_vl(model=model)
    assert isinstance(norm, norms.LayerNorm) and not isinstance(other, norms.LayerNorm)
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is norms.LayerNorm
    handle.revert()
    assert type(norm) is nn.LayerNorm


@images_are_known
@pytest.mark.parametrize("first, second", [("llama", "llava"), ("llava", "llama")])
def test_a_patch_of_a_model_and_one_of_the_model_inside(first, second):
    """The inner model is patched with the options of its own family's call, the outer model with those of the other
    call."""
    options = {"llama": dict(rope=False, memory="low"), "llava": dict(rms_norm=False)}
    with contextlib.ExitStack() as stack:
        for family in (first, second):
            stack.enter_context(getattr(liger_ext, f"apply_liger_kernel_to_{family}")(**options[family]))
        model = images.build("llava")
    inner = model.model.language_model
    found = {name: type(m).__module__.startswith("liger_ext") for name, m in inner.layers[0].named_children()}
    assert found == dict(self_attn=False, mlp=True, input_layernorm=True, post_attention_layernorm=True)
    assert type(model).__module__.startswith("liger_ext") and {inner.norm.liger_memory, model.liger_memory} == {"low"}


@images_are_known
def test_a_vision_model_alone():
    config = images.fill(AutoConfig.for_model("pixtral"), images.VISION | dict(hidden_act="silu", head_dim=8))
    from transformers import PixtralVisionModel

    model = PixtralVisionModel(config)
    ours = PixtralVisionModel(config)
    ours.load_state_dict(model.state_dict())
    liger_ext.apply_liger_kernel_to_pixtral(model=ours)
    assert {type(m).__name__ for m in ours.modules() if type(m).__module__.startswith("liger_ext")} == {
        "PixtralRMSNorm",
        "PixtralMLP",
        "PixtralAttention",
        "PixtralAttentionLayer",
    } - {type(m).__name__ for m in ours.modules() if not type(m).__module__.startswith("liger_ext")}
    pixels = torch.randn(1, 3, 16, 16)
    found, expected = (m(pixels, image_sizes=[(16, 16)]).last_hidden_state for m in (ours, model))
    torch.testing.assert_close(found, expected)
