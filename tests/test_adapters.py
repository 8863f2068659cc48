"""Tests of PEFT's adapters on patched models: loss and gradients equal those of a stock model with the same
adapters, within a tolerance."""

import functools
from collections.abc import Callable

import pytest
import torch
from llama_models import (  # noqa: F401
    LEVELS,
    VOCAB,
    assert_as_good,
    build,
    checkpoint_layers,
    distance,
    exact,
    make_batch,
    one_thread,
    ops,
    patched,
    step,
)
from packaging.version import Version
from torch import nn
from transformers.integrations.peft import MIN_PEFT_VERSION

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.ops._loss_plan import SMALLEST

peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME = ["q_proj", "v_proj", "gate_proj", "down_proj"]
Change = Callable[[nn.Module], nn.Module]
orders = pytest.mark.parametrize("order", ["patch, adapt", "adapt, patch"])


def adapt(model: nn.Module, kind: str, options: dict) -> nn.Module:
    """Adds adapters to the model and changes their weights, so that they influence the output."""
    config = getattr(peft, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this peft has no {kind}")
    torch.manual_seed(5)
    return stirred(peft.get_peft_model(model, config(task_type="CAUSAL_LM", **options)))


def stirred(model: nn.Module, std: float = 0.05) -> nn.Module:
    torch.manual_seed(6)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape).to(parameter) * std)
    return model


def both(order: str, change: Change, dtype=torch.float32, device="cpu", sizes=None, **options) -> list[nn.Module]:
    """Returns a stock model and a patched one. `change` is applied to both, to the latter before or after the patch.

    Each model is built anew, because a copy loses the hooks of its parameters and some adapters cannot be copied.
    """
    models = []
    for is_patched in (False, True):
        model = build(dtype=dtype, **(sizes or {}))
        if is_patched and order == "patch, adapt":
            apply_liger_kernel_to_llama(model=model, **options)
        model = change(model)
        if is_patched and order == "adapt, patch":
            apply_liger_kernel_to_llama(model=model, **options)
        models.append(model.to(device).train())
    stock, model = models
    for (name, ours), theirs in zip(model.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    return models


def assert_trains_as_stock(stock, model, batch, fused=True, **options):
    """Asserts equal steps. `fused`: the patched model returns no logits. Only the patched model's forward takes
    `options`."""
    torch.manual_seed(7)
    expected = step(stock, batch)
    torch.manual_seed(7)
    found = step(model, {**batch, **options})
    assert expected.keys() - found.keys() == ({"logits"} if fused else set())
    assert any(result.any() for name, result in found.items() if name != "loss")
    try:
        reference = step(exact(stock), batch)
    except RuntimeError as error:  # adapters that store results cannot be copied
        assert "deepcopy" in str(error)
        return assert_close(found, expected)
    assert_as_good(found, expected, reference)


def assert_close(found, expected):
    for name, result in found.items():
        difference = distance(result, expected[name])
        assert difference <= 2e-4, (name, difference)


TUNERS = {
    "LoRA": ("Lora", dict(r=4, target_modules=ALL)),
    "LoRA, scale by rank": ("Lora", dict(r=4, target_modules=ALL, use_rslora=True, lora_alpha=3)),
    "LoRA, all biases": ("Lora", dict(r=4, target_modules=SOME, bias="all", lora_dropout=0.0)),
    "LoRA, one layer": ("Lora", dict(r=4, target_modules=["q_proj", "up_proj"], layers_to_transform=[1])),
    "LoRA, norms": ("Lora", dict(r=4, target_modules=["o_proj"], modules_to_save=["input_layernorm", "norm"])),
    "DoRA": ("Lora", dict(r=4, target_modules=ALL, use_dora=True)),
    "parameters": ("Lora", dict(r=4, target_modules=[], target_parameters=["mlp.up_proj.weight", "v_proj.weight"])),
    "IA3": ("IA3", dict(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])),
    "AdaLoRA": ("AdaLora", dict(init_r=4, target_r=2, total_step=10, target_modules=SOME)),
    "LoHa": ("LoHa", dict(r=2, target_modules=SOME)),
    "LoKr": ("LoKr", dict(r=2, target_modules=SOME)),
    "VeRA": ("Vera", dict(r=4, target_modules=["q_proj", "o_proj"])),
    "OFT": ("OFT", dict(oft_block_size=8, target_modules=SOME)),
    "BOFT": ("BOFT", dict(boft_block_size=4, target_modules=["v_proj", "up_proj"])),
    "HRA": ("HRA", dict(r=4, target_modules=SOME)),
    "FourierFT": ("FourierFT", dict(n_frequency=50, target_modules=SOME)),
    "VB-LoRA": ("VBLoRA", dict(r=2, num_vectors=16, vector_length=8, topk=2, target_modules=SOME)),
    "SHiRA": ("Shira", dict(r=2, target_modules=SOME)),
    "norms": ("LNTuning", dict(target_modules=["input_layernorm", "post_attention_layernorm", "norm"])),
    "adaption prompt": ("AdaptionPrompt", dict(adapter_len=3, adapter_layers=1)),
    "prompt": ("PromptTuning", dict(num_virtual_tokens=3)),
    "p-tuning": ("PromptEncoder", dict(num_virtual_tokens=3, encoder_hidden_size=16)),
    "OSF": ("OSF", dict(target_modules=SOME)),
    "Shadow": ("Shadow", {}),
    "prefix": ("PrefixTuning", dict(num_virtual_tokens=3)),
}


@orders
@pytest.mark.parametrize("kind, options", TUNERS.values(), ids=TUNERS)
def test_tuners(device, kind, options, order):
    models = both(order, lambda m: adapt(m, kind, options), device=device)
    holds_forward = (kind, order) == ("AdaptionPrompt", "adapt, patch")  # PEFT stores the unpatched forward
    assert_trains_as_stock(*models, make_batch(device), fused=not holds_forward)


IN_BF16 = ["LoRA", "DoRA", "LoRA, norms", "IA3", "prompt", "prefix", "norms"]


@orders
@pytest.mark.parametrize("name", IN_BF16)
def test_tuners_in_bf16(device, name, order):
    """bf16 models with adapters in fp32, as PEFT creates them, and with everything in bf16."""
    for whole in (False, True):
        models = both(order, lambda m: adapt(m, *TUNERS[name]), torch.bfloat16, device)
        if whole:
            models = [m.bfloat16() for m in models]
        assert_trains_as_stock(*models, make_batch(device))


@orders
@pytest.mark.parametrize("memory", LEVELS)
def test_lora_under_autocast(device, memory, order):
    """16-bit weights with fp32 adapters under autocast, as a Trainer with bf16=True runs them."""
    options = dict(r=4, target_modules=ALL, use_rslora=True, lora_alpha=3)
    models = both(order, lambda m: adapt(m, "Lora", options), torch.bfloat16, device, memory=memory)
    with torch.autocast(device.type, torch.bfloat16):
        assert_trains_as_stock(*models, make_batch(device))


class Halved(nn.Identity):
    def forward(self, x):
        return x * 0.5


class HalvedDropout(nn.Dropout):
    def forward(self, x):
        return x * 0.5


CHANGES = {
    "identity": lambda layer: layer.lora_dropout.update({"default": Halved()}),
    "dropout": lambda layer: layer.lora_dropout.update({"default": HalvedDropout(0.0)}),
    "learned scale": lambda layer: layer.scaling.update({"default": nn.Parameter(torch.tensor(3.0))}),
    "cast of the input": lambda layer: setattr(layer, "_cast_input_dtype", lambda x, dtype: 0.5 * x.to(dtype)),
    "scales of columns": lambda layer: layer.scaling.update({"default": torch.linspace(0.5, 2, layer.out_features)}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_users_have_changed(change):
    """A user's changes of PEFT's layers stay in effect."""

    def changed(model):
        model = adapt(model, "Lora", dict(r=4, target_modules=ALL))
        for module in list(model.modules()):
            if isinstance(module, peft.tuners.lora.Linear):
                change(module)
                scale = module.scaling["default"]
                if isinstance(scale, nn.Parameter):
                    module.register_parameter("learned_scale", scale)
        return model

    for order in ("patch, adapt", "adapt, patch"):
        stock, model = both(order, changed)
        for each in (stock, model):
            for module in each.modules():
                if "learned_scale" in dict(module.named_parameters(recurse=False)):
                    module.scaling["default"] = module.learned_scale
        found, expected = step(model, make_batch("cpu")), step(stock, make_batch("cpu"))
        assert len(found) == len(expected) - 1  # only the logits are absent
        assert_close(found, expected)


def test_a_forward_that_users_have_wrapped(monkeypatch):
    cls = peft.tuners.lora.Linear
    old = cls.forward

    @functools.wraps(old)
    def forward(self, x, *args, **kwargs):
        return old(self, x, *args, **kwargs) * 1.3

    for order in ("patch, adapt", "adapt, patch"):
        models = both(order, lambda m: adapt(m, "Lora", dict(r=4, target_modules=ALL)))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", forward)
            found, expected = (step(m, make_batch("cpu")) for m in reversed(models))
        assert_close(found, expected)


def test_how_large_a_loss_may_be_scaled_in_fp16(device):
    """A small scaling factor of the adapter is applied before the sum over the rows, as in PEFT's layer, so that loss
    scales up to nearly the same size leave the gradients finite."""
    options = dict(r=64, lora_alpha=1, target_modules=["down_proj"])
    models = both("adapt, patch", lambda m: adapt(m, "Lora", options), torch.float16, device)
    batch, largest = make_batch(device, 8, 64), []
    batch["labels"] = torch.full_like(batch["labels"], 7)
    for model in models:
        model.half()
        largest.append(0)
        for exponent in range(10, 40):
            model.zero_grad()
            (model(**batch).loss.float() * 2.0**exponent).backward()
            if not all(p.grad.isfinite().all() for n, p in model.named_parameters() if "lora_B" in n):
                break
            largest[-1] = exponent
    stock, ours = largest
    assert ours >= stock - 1 > 0


@orders
@pytest.mark.parametrize("memory", [level for level in LEVELS if level != "auto"])
@pytest.mark.parametrize("targets", [ALL, ["k_proj", "up_proj"]], ids=["all", "some"])
def test_levels_of_memory(device, memory, targets, order):
    models = both(order, lambda m: adapt(m, "Lora", dict(r=4, target_modules=targets)), device=device, memory=memory)
    assert_trains_as_stock(*models, make_batch(device))


@orders
@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(device, use_reentrant, memory, order):
    models = both(order, lambda m: adapt(m, "Lora", dict(r=4, target_modules=SOME)), device=device, memory=memory)
    for model in models:
        checkpoint_layers(model, use_reentrant)
    assert_trains_as_stock(*models, make_batch(device))


ADAPTER_PAIRS = {
    "layers": (dict(target_modules=SOME), dict(target_modules=["k_proj", "up_proj"])),
    "heads": (dict(target_modules=["lm_head", "q_proj"]), dict(target_modules=["lm_head"])),
    "saved heads": (dict(target_modules=["v_proj"], modules_to_save=["lm_head"]),) * 2,
    "norms": (dict(target_modules=["q_proj"], modules_to_save=["norm"]), dict(target_modules=["o_proj"])),
}


def with_adapter_pair(first, second):
    def change(model):
        model = adapt(model, "Lora", dict(r=4, **first))
        model.add_adapter("other", peft.LoraConfig(r=2, task_type="CAUSAL_LM", **second))
        model.set_adapter("other")
        return stirred(model)

    return change


@orders
@pytest.mark.parametrize("first, second", ADAPTER_PAIRS.values(), ids=ADAPTER_PAIRS)
def test_two_adapters(device, first, second, order):
    models = both(order, with_adapter_pair(first, second), device=device)
    batch = make_batch(device)
    assert_trains_as_stock(*models, batch)
    losses = [step(models[1], batch)["loss"]]
    for model in models:
        model.set_adapter("default")
    assert_trains_as_stock(*models, batch)
    losses.append(step(models[1], batch)["loss"])
    inside = []
    for model in models:
        with model.disable_adapter():
            inside.append(model(**batch).loss.detach())
    assert torch.allclose(inside[1], inside[0], rtol=1e-5)
    assert_trains_as_stock(*models, batch)
    assert len({round(loss.item(), 3) for loss in (*losses, inside[1])}) == 3


@orders
@pytest.mark.parametrize("targets", [SOME, ["lm_head", "q_proj"]], ids=["layers", "head"])
def test_an_adapter_for_each_row(device, targets, order):
    change = with_adapter_pair(dict(target_modules=targets), dict(target_modules=targets))
    models = [model.eval() for model in both(order, change, device=device)]
    batch = make_batch(device)
    names = ["default", "other", "__base__"]
    with torch.no_grad():
        expected, found = (model(**batch, adapter_names=names) for model in models)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        loss = models[1](**batch, adapter_names=names, skip_logits=True, memory=SMALLEST).loss
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)


@orders
@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="transformers requires a newer PEFT for its adapters"
)
def test_adapters_of_transformers_itself(device, order):
    def change(model):
        torch.manual_seed(5)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"]), "one")
        return stirred(model)

    models = both(order, change, device=device)
    assert_trains_as_stock(*models, make_batch(device))
    with_adapter = models[1](**make_batch(device)).loss
    for model in models:
        model.disable_adapters()
    torch.testing.assert_close(models[1](**make_batch(device)).loss, models[0](**make_batch(device)).loss)
    assert models[1](**make_batch(device)).loss != with_adapter
    for model in models:
        model.enable_adapters()
    assert_trains_as_stock(*models, make_batch(device))


@orders
def test_a_prompt_that_reads_logits(device, order):
    """CPT computes its own loss from logits, so the forward requires `skip_logits=False`."""
    options = dict(cpt_token_ids=[1, 2, 3], cpt_tokens_type_mask=[1, 1, 1])
    stock, model = both(order, lambda m: adapt(m, "CPT", options), device=device)
    with pytest.raises(AttributeError, match="skip_logits=False"):
        model(**make_batch(device))
    found = model(**make_batch(device), skip_logits=False).logits
    torch.testing.assert_close(found, stock(**make_batch(device)).logits, rtol=1e-4, atol=1e-5)
