"""Patched Llamas with LoRA adapters, plain and 4-bit, in drawn set-ups, and with PEFT's operations between two steps:
loss and gradients are as close to float64 of the decoded weights as those of a stock model with the same adapters."""

import copy
import pickle
import random
import warnings

import pytest
import torch
from llama_models import LEVELS, assert_as_good, build, checkpoint_layers, exact, make_batch, one_thread, step  # noqa: F401
from pairs import pairwise, product
from test_adapter_nodes import adapters, recorded_calls
from test_adapter_options import CASES, drawn, with_adapters, with_masks  # noqa: F401
from test_four_bit_layers import decoded, four_bit
from torch import nn

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.training import nodes

peft = pytest.importorskip("peft")

# Options of the 4-bit layers, and whether PEFT knows that they have 4 bits: then its class is Linear4bit, else Linear.
BASES = {"plain": None, "nf4": (dict(quant_type="nf4"), True), "fp4": (dict(quant_type="fp4"), False)}
# The dtypes of the model, of its adapters and of autocast, and the factor of the loss.
PRECISIONS = {
    "fp32": (torch.float32, torch.float32, None, 1),
    "bf16": (torch.bfloat16, torch.bfloat16, None, 1),
    "fp16": (torch.float16, torch.float16, None, 2**10),
    "fp32, autocast": (torch.float32, torch.float32, torch.bfloat16, 1),
    "bf16, autocast": (torch.bfloat16, torch.float32, torch.bfloat16, 1),
    "fp32, fp16 autocast": (torch.float32, torch.float32, torch.float16, 2**10),
}
FACTORS = dict(
    base=tuple(BASES),
    adapters=("none", *CASES),
    precision=tuple(PRECISIONS),
    memory=LEVELS,
    checkpoint=(None, "reentrant", "not reentrant"),
    backward=("once", "twice", "create_graph"),
    rows=((3, 11, None), (8, 32, None), (8, 32, 100)),  # of the batch, and of the tiles
)


def set_ups() -> list[dict]:
    has_node = [c for c in product(FACTORS) if (c["base"], c["adapters"]) != ("plain", "none")]
    return pairwise(random.Random(3).sample(has_node, 2000))


def make(base: str, adapters: str, precision: str = "fp32", device="cpu", change=lambda model: model) -> nn.Module:
    """Returns a model with these weights and adapters. `change` is applied before the adapters are added."""
    dtype, adapter_dtype, autocast, _ = PRECISIONS[precision]
    model = build(dtype=dtype, device=device, tie_word_embeddings=False)
    if BASES[base] is not None:
        options, model.is_loaded_in_4bit = BASES[base]
        model = four_bit(model, autocast or dtype, **options)
    change(model)
    model = model if adapters == "none" else with_adapters(model, adapters)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.to(adapter_dtype)
    return model.train()


def run(model: nn.Module, batch: dict, precision: str, backward: str = "once") -> dict[str, torch.Tensor]:
    """Returns the loss and the gradients of its multiple."""
    *_, autocast, factor = PRECISIONS[precision]
    casts = autocast is not None and model.dtype != torch.float64
    with torch.autocast(batch["input_ids"].device.type, autocast, enabled=casts):
        output = model(**batch)
    loss = output.loss * factor

    def gradients(**options):
        model.zero_grad(set_to_none=True)
        loss.backward(**options)
        return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}

    first = gradients(retain_graph=True) if backward == "twice" else {}
    found = gradients(create_graph=backward == "create_graph")
    assert all(torch.equal(found[name], gradient) for name, gradient in first.items())
    if backward == "create_graph" and any(p.grad.requires_grad for p in model.parameters() if p.grad is not None):
        with pytest.raises(RuntimeError, match="second derivative"):
            sum(p.grad.float().square().sum() for p in model.parameters() if p.grad is not None).backward()
    model.zero_grad(set_to_none=True)
    return {name: output[name].detach() for name in ("loss", "logits") if output.get(name) is not None} | found


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("case", set_ups(), ids=lambda case: "-".join(str(value) for value in case.values()))
def test_as_good_as_stock(device, drawn, monkeypatch, case):  # noqa: F811
    precision = case["precision"]
    stock, model = (make(case["base"], case["adapters"], precision, device) for _ in range(2))
    apply_liger_kernel_to_llama(model=model, memory=case["memory"])
    if case["checkpoint"]:
        checkpoint_layers(model, case["checkpoint"] == "reentrant")
    rows, seq, tile = case["rows"]
    if tile:
        monkeypatch.setattr(nodes, "TILE", tile * 128)
    batch = make_batch(device, rows, seq)
    with recorded_calls(adapters(model)) as calls:
        found = run(model, batch, precision, case["backward"])
    # At "fast" nothing tells a reentrant checkpoint's first run from an evaluation, unless it draws masks.
    assert not calls or (case["memory"], case["checkpoint"]) == ("fast", "reentrant")  # of PEFT's forward
    if case["adapters"] != "none":
        stock = with_masks(stock, drawn[:6])
    reference = exact(decoded(copy.deepcopy(stock)))
    assert_as_good(found, run(stock, batch, precision), run(reference, batch, precision))


def loss(model: nn.Module, **options) -> torch.Tensor:
    return model(**make_batch("cpu"), **options).loss.detach()


def inside(context):
    """Returns an operation that computes the loss in `context(model)`."""

    def operation(model, **_):
        with context(model):
            return loss(model)

    return operation


def then(change):
    """Returns an operation that calls `change(model)`. A module that it returns replaces the model."""
    return lambda model, **_: change(model)


def added(model, **options):
    torch.manual_seed(9)
    model.add_adapter("third", peft.LoraConfig(r=8, target_modules=["q_proj", "up_proj", "down_proj"], **options))
    model.set_adapter("third")
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B.third" in name:
            nn.init.normal_(parameter, std=0.1)


def in_rows(model):
    with torch.no_grad():
        return loss(model, adapter_names=["default", "second", "__base__"])


def merged(model):
    model.merge_adapter()
    found = loss(model)
    model.unmerge_adapter()
    return found


def unloaded(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.is_floating_point() and "proj" not in name)
    return model


def loaded(model, folder, **_):
    model.save_pretrained(folder)
    model.load_adapter(folder / "second", "third", is_trainable=True)
    model.set_adapter("third")


def swapped(model, folder, **_):
    model.save_pretrained(folder)
    peft.utils.hotswap.hotswap_adapter(model, folder / "second", "default")


def weighted(model):
    model.add_weighted_adapter(["default", "second"], [0.5, 1.5], "third", combination_type="cat")
    model.set_adapter("third")


# Each changes a model with the adapters default (active) and second; a tensor that it returns is compared.
OPERATIONS = {
    "disable_adapter": inside(lambda model: model.disable_adapter()),
    "disable_adapter_layers": then(lambda model: model.base_model.disable_adapter_layers()),
    "set_adapter": then(lambda model: model.set_adapter("second")),
    "two active": then(lambda model: model.base_model.set_adapter(["default", "second"])),
    "adapter_names": then(lambda model: in_rows(model.eval())),
    "adapter_names in training": then(in_rows),  # PEFT raises
    "merge, unmerge": then(merged),
    "merge": then(lambda model: model.merge_adapter()),
    "merge both": then(lambda model: model.merge_adapter(["default", "second"])),
    "merge, disable": then(lambda model: model.merge_adapter() or inside(lambda m: m.disable_adapter())(model)),
    "merge_and_unload": then(lambda model: unloaded(model.merge_and_unload())),
    "unload": then(lambda model: unloaded(model.unload())),
    "save and load": loaded,
    "hotswap": swapped,
    "revert": lambda model, handle, **_: handle and handle.revert(),
    "generate": then(lambda m: m.eval().generate(make_batch("cpu")["input_ids"], max_new_tokens=5, do_sample=False)),
    "deepcopy": then(copy.deepcopy),
    "pickle": then(lambda model: pickle.loads(pickle.dumps(model))),
    "add_adapter": then(added),
    "add DoRA": then(lambda model: added(model, use_dora=True)),
    "add and delete": then(lambda model: added(model) or model.delete_adapter("third")),
    "delete_adapter": then(lambda model: model.delete_adapter("second")),
    "delete the active one": then(lambda model: model.delete_adapter("default")),
    "add_weighted_adapter": then(weighted),
    "rescale": inside(lambda model: peft.helpers.rescale_adapter_scale(model, 0.5)),
    "eval": inside(lambda model: model.eval() and torch.no_grad()),
    "inference_mode": inside(lambda model: torch.inference_mode()),
    "state_dict": then(lambda model: model.load_state_dict(model.state_dict()) and None),
    "checkpoints": then(lambda model: checkpoint_layers(model, False)),
    "frozen A": then(lambda model: [p.requires_grad_(False) for n, p in model.named_parameters() if "lora_A" in n]),
}
RUN_PEFT = ("revert", "add DoRA")  # after these, PEFT's own forward runs


def outcome(operation, model, **options) -> tuple:
    """Returns the model in training, the tensor or None, and the exception and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, error = operation(model, **options), None
        except Exception as raised:
            found, error = None, (type(raised), str(raised))
    model = (found if isinstance(found, nn.Module) else model).train()
    return model, found, error, [(w.category, str(w.message)) for w in caught]


@pytest.mark.parametrize("order", ["patch, adapt", "adapt, patch"])
@pytest.mark.parametrize("base", ["plain", "nf4"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_between_steps(tmp_path, name, base, order):
    handles, batch = [], make_batch("cpu")

    def patch(model):
        handles.append(apply_liger_kernel_to_llama(model=model))

    stock = make(base, "two adapters")
    model = make(base, "two adapters", change=patch if order == "patch, adapt" else lambda model: None)
    if order == "adapt, patch":
        patch(model)
    for one in (stock, model):
        one.base_model.set_adapter("default")
        step(one, batch)
    with torch.no_grad():  # both take the stock model's step
        for theirs, ours in zip(stock.parameters(), model.parameters(), strict=True):
            if theirs.grad is not None:
                theirs -= 0.1 * theirs.grad
                ours.copy_(theirs)
    stock, expected, *expected_messages = outcome(OPERATIONS[name], stock, folder=tmp_path / "stock", handle=None)
    model, found, *messages = outcome(OPERATIONS[name], model, folder=tmp_path / "ours", handle=handles[0])
    assert messages == expected_messages
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights, ours = stock.state_dict(), model.state_dict()
    assert weights.keys() == ours.keys() and all(torch.equal(weights[key], ours[key]) for key in ours)
    with recorded_calls(adapters(model)) as calls:
        found = step(model, batch)
    assert bool(calls) == (name in RUN_PEFT)
    assert_as_good(found, step(stock, batch), step(exact(decoded(copy.deepcopy(stock))), batch))
