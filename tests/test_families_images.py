"""Models of images and text: their language models, and the loss of their heads, against transformers' own."""

import copy

import pytest
import torch
from cases import RecordCalls
from family_models import patched
from llama_models import SIZES, TRANSFORMERS, assert_as_good, one_thread, randomised, step, tokens  # noqa: F401
from transformers import AutoConfig, AutoModelForImageTextToText

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="older transformers have other code")
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    image_size=16,
    patch_size=8,
    depth=1,
    num_heads=4,
    embed_dim=32,
    out_hidden_size=64,
    projection_dim=64,
    fullatt_block_indexes=[0],
    deepstack_visual_indexes=[0],
)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
TEXT = SIZES | dict(head_dim=16, rope_parameters=ROPE)
MODELS = ["glm4v", "hunyuan_vl", "idefics3", "internvl", "llava", "mistral3", "mllama", "paligemma"]
MODELS += ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"]


def fill(config, values):
    for name, value in values.items():
        if hasattr(config, name):
            of_two = isinstance(getattr(config, name), list | tuple) and name in ("image_size", "patch_size")
            setattr(config, name, [value, value] if of_two else value)
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def build(model_type, device="cpu"):
    config = AutoConfig.for_model(model_type)
    fill(config.text_config, TEXT)
    if config.text_config.pad_token_id is None:
        config.text_config.pad_token_id = 0
    if hasattr(config.text_config, "cross_attention_layers"):
        config.text_config.cross_attention_layers = []
    fill(config.vision_config, VISION)
    torch.manual_seed(0)
    return randomised(AutoModelForImageTextToText.from_config(config)).to(device).train()


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("model_type", MODELS)
def test_text_as_stock(device, model_type, train):
    model = build(model_type, device).train(train)
    ours = patched(model)
    assert type(ours).__module__ == "liger_ext.models.families"
    ids = tokens(2, 9, device=device) % 900 + 3
    batch = dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
    if model_type == "paligemma":
        batch["token_type_ids"] = torch.zeros_like(ids)
    found = step(ours, batch)
    assert_as_good(found, step(model, batch), step(copy.deepcopy(model).double(), batch))
    assert ("logits" in found) is not train
    stock = {name for name, value in model(**batch).items() if value is not None}
    assert stock - set(ours(**batch)) <= {"logits", "past_key_values"}


@pytest.mark.parametrize("model_type", MODELS)
def test_generates_the_same(device, model_type):
    model = build(model_type, device).eval()
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    ids = tokens(2, 9, device=device) % 900 + 3
    assert torch.equal(patched(model).generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model_type", ["glm4v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl"])
def test_a_tower_as_stock(device, model_type, dtype):
    """Two images of 8 x 4 and 4 x 4 patches: result and gradients, of which the rotary embedding is ours."""
    model = build(model_type, device).to(dtype)
    towers = [m.model.visual for m in (patched(model), model, copy.deepcopy(model).double())]
    grid = torch.tensor([[1, 8, 4], [1, 4, 4]], device=device)
    config = model.config.vision_config
    columns = config.in_channels * config.temporal_patch_size * config.patch_size**2
    patches = torch.randn(48, columns, generator=torch.Generator().manual_seed(3)).to(device)

    def run(tower):
        tower.zero_grad()
        with RecordCalls() as record:
            out = tower(patches.to(next(tower.parameters()).dtype), grid_thw=grid).pooler_output
            out = torch.cat(list(out)) if isinstance(out, list | tuple) else out
            out.double().square().sum().backward()
        results = {name: p.grad for name, p in tower.named_parameters() if p.grad is not None}
        return record.names, {"out": out.detach(), **results}

    (ours, found), (_, stock), (_, reference) = map(run, towers)
    assert ours.count("rope") == ours.count("rope_backward") == len(model.model.visual.blocks)
    assert_as_good(found, stock, reference)


def test_an_image(device):
    model = build("llava", device)
    ours, config = patched(model), model.config
    ids = tokens(1, 12, device=device) % 900 + 3
    ids[0, 2:6] = config.image_token_id = model.model.config.image_token_id = ours.model.config.image_token_id = 999
    batch = dict(input_ids=ids, labels=ids.clone(), attention_mask=torch.ones_like(ids))
    batch["pixel_values"] = torch.randn(1, 3, 16, 16, device=device)
    exact = copy.deepcopy(model).double()
    reference = step(exact, batch | dict(pixel_values=batch["pixel_values"].double()))
    found = step(ours, batch)
    assert any("vision" in name for name in found)
    assert_as_good(found, step(model, batch), reference)
    torch.testing.assert_close(ours(**batch).image_hidden_states, model(**batch).image_hidden_states)
