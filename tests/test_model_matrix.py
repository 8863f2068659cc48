"""Patched and stock Llamas with all settings that training combines: attention, heads, checkpointing, torch.compile,
precision, batch layout.

Each case compares loss and all gradients of a patched model with those of a stock model with the same weights, by the
rule of `llama_models`: the patched model's distance to a float64 model is at most a factor times the stock model's.
The stock model is neither checkpointed nor compiled; neither changes its values. The cases form an all-pairs design;
LIGER_EXT_MODELS=full (`make test-models`) runs all combinations.
"""

import contextlib
import functools
import itertools
import os

import pytest
import torch
from llama_models import (  # noqa: F401
    assert_as_good,
    build,
    checkpoint_layers,
    count_calls,
    exact,
    lora,
    one_thread,
    patched,
    step,
    tokens,
)
from pairs import pairwise, product
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LAYERS = 2
# The cases with torch.compile test the graph that Dynamo and AOTAutograd build of our ops and of the checkpoints around
# them. Inductor's code generation takes ten times as long; tests/test_llama_compile.py tests it.
BACKEND = "aot_eager_decomp_partition"

SDPA = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}
GPU_SDPA = {**SDPA, "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ATTENTION = {
    "cpu": ("eager", *SDPA),  # flex_attention has no backward on CPUs
    "cuda": ("eager", *GPU_SDPA, "flex_attention"),
}
DTYPES = {  # the model's dtype, and the parts in fp32; autocast computes in bf16
    "fp32": (torch.float32, ()),
    "bf16": (torch.bfloat16, ()),
    "autocast": (torch.float32, ()),
    "fp32 head": (torch.bfloat16, ("model.norm", "lm_head")),
    "fp32 norms, autocast": (torch.bfloat16, ("norm",)),
}
KEY_VALUE_HEADS = {"mha": 4, "gqa": 2, "mqa": 1}  # for 4 query heads


def factors(device_type):
    return dict(
        attention=ATTENTION[device_type],
        heads=tuple(KEY_VALUE_HEADS),
        checkpoint=("none", "reentrant", "non-reentrant", "whole", "selective"),
        compiled=("", "compiled"),
        dtype=tuple(DTYPES),
        layout=("full", "left", "right", "packed"),
    )


def cases():
    choose = list if os.environ.get("LIGER_EXT_MODELS") == "full" else pairwise
    for device_type in ATTENTION:
        for case in choose(product(factors(device_type))):
            name = "-".join(filter(None, (device_type, *case.values())))
            marks = [pytest.mark.cuda] * (device_type == "cuda") + [pytest.mark.slow] * bool(case["compiled"])
            yield pytest.param(device_type, case, id=name, marks=marks)


@pytest.mark.parametrize("device, case", cases(), indirect=["device"])
def test_case(device, case):
    stock, expected, reference = stock_results(
        device, *(case[name] for name in ("attention", "heads", "dtype", "layout"))
    )
    model = patched(stock)
    calls = count_calls(model)
    forward = make_forward(model, case, device)
    with attention_backend(case["attention"]):
        result = step(model, make_batch(device, case["layout"]), forward)
    assert_as_good(result, expected, reference)
    if not case["compiled"]:  # when compiled, the tracer makes these calls
        assert len(calls) == LAYERS * (1 if case["checkpoint"] == "none" else 2), "no recomputation"


def output_and_hidden_states(output):
    """A loss that also depends on the hidden states that the model returns."""
    return output.loss + sum(states.square().mean() for states in output.hidden_states)


@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "non-reentrant", "whole", "selective"])
@pytest.mark.parametrize("how", ["lora", "hidden states"])
def test_what_else_meets_checkpointing(device, how, checkpoint):
    stock = build(device=device, num_hidden_layers=LAYERS).train()
    batch, loss_function = make_batch(device, "left"), {}
    if how == "lora":
        stock = lora(stock, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]).train()
    else:
        batch["output_hidden_states"] = True
        loss_function = dict(loss_function=output_and_hidden_states)
    results = []
    for model, kind in ((patched(stock), checkpoint), (stock, "none"), (exact(stock), "none")):
        calls = count_calls(model)
        forward = make_forward(model, dict(checkpoint=kind, compiled="", dtype="fp32"), device, **loss_function)
        results.append(step(model, batch, forward))
        assert len(calls) == LAYERS * (1 if kind == "none" else 2)
    assert_as_good(*results)


@pytest.mark.parametrize("device_type", ATTENTION)
def test_every_pair_of_settings_is_in_a_case(device_type):
    settings = factors(device_type)
    chosen = pairwise(product(settings))
    for first, second in itertools.combinations(settings, 2):
        found = {(case[first], case[second]) for case in chosen}
        assert found == set(itertools.product(settings[first], settings[second])), (first, second)
    assert len(chosen) <= 2 * 5 * len(ATTENTION["cuda"]), "the all-pairs design has too many cases"
    assert chosen == pairwise(product(settings))


@functools.cache
def stock_results(device, attention, heads, dtype, layout):
    """A stock model, its results, and the results of a float64 model."""
    of_all, in_fp32 = DTYPES[dtype]
    stock = build(
        device=device,
        dtype=of_all,
        num_hidden_layers=LAYERS,
        num_key_value_heads=KEY_VALUE_HEADS[heads],
        attn_implementation=attention if attention in ("eager", "flex_attention") else "sdpa",
    ).train()
    for name, module in stock.named_modules():
        if name.endswith(in_fp32):
            module.float()
    batch = make_batch(device, layout)
    float64 = exact(stock)
    float64.config._attn_implementation = "sdpa"  # eager attention computes softmax in fp32; Triton has no float64
    with attention_backend("math"):
        reference = step(float64, batch)
    with attention_backend(attention), autocast_for(dtype, device):
        return stock, step(stock, batch), reference


def make_forward(model, case, device, loss_function=lambda output: output.loss):
    """Returns a function that calls the model on a batch and returns the loss; configures checkpoints and
    compilation."""
    if case["checkpoint"] in CHECKPOINTS:
        checkpoint_layers(model, **CHECKPOINTS[case["checkpoint"]])
    callee = model
    if case["compiled"]:
        torch._dynamo.reset()
        callee = torch.compile(model, backend=BACKEND)

    def forward(model, **batch):
        def loss():
            return loss_function(callee(**batch))

        with autocast_for(case["dtype"], device):
            return {"loss": checkpoint(loss, use_reentrant=False) if case["checkpoint"] == "whole" else loss()}

    return forward


def keep_products(context, op, *args, **kwargs):
    """Policy of a selective checkpoint: saves results of matrix products and recomputes all others."""
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "reentrant": dict(use_reentrant=True),
    "non-reentrant": dict(use_reentrant=False),
    "selective": dict(
        use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_products)
    ),
}


def attention_backend(attention):
    """Selects the backend, and math for calls that it does not support: GPUs' flash attention has neither masks nor
    fp32."""
    backend = GPU_SDPA.get(attention)
    if backend is None:
        return contextlib.nullcontext()
    return sdpa_kernel([backend, SDPBackend.MATH], set_priority=True)


def autocast_for(dtype, device):
    return torch.autocast(device.type, torch.bfloat16, enabled="autocast" in dtype)


def make_batch(device, layout):
    """Three rows of eleven positions. Results at padding are not compared: attention without any key depends on the
    implementation."""
    ids = tokens(3, 11, device=device)
    labels = ids.clone()
    labels[0, 3:5] = -100
    position = torch.arange(11, device=device)
    lengths = torch.tensor([[11], [9], [6]], device=device)
    batch = dict(input_ids=ids, labels=labels, use_cache=False)
    if layout == "packed":  # each row holds two sequences
        batch["position_ids"] = torch.where(position < lengths - 4, position, position - (lengths - 4))
    elif layout != "full":
        mask = position < lengths if layout == "right" else position >= 11 - lengths
        judged = mask & mask.roll(1, dims=1)  # the predecessor predicts the label
        batch.update(attention_mask=mask.long(), labels=labels.where(judged, -100))
    return batch
