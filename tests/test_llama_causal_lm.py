"""A patched LlamaForCausalLM returns the loss, logits and gradients of stock transformers, with options of the patch,
configurations of the model, and arguments of `forward`."""

import inspect
from collections import Counter

import pytest
import torch
from cases import RecordCalls
from llama_models import (
    TRANSFORMERS,
    VOCAB,
    build,
    checkpoint_layers,
    compare,
    config,
    count_calls,
    distance,
    exact,
    make_batch,
    one_thread,  # noqa: F401
    ops,
    patched,
    rounding,
    step,
    tokens,
)
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models import LigerCausalLMOutputWithPast

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


OPTIONS = {
    "all": {},
    "separate add and norm": dict(fused_add_rms_norm=False),
    "rope": dict(fused_linear_cross_entropy=False, rms_norm=False, swiglu=False),
    "norm": dict(rope=False, fused_linear_cross_entropy=False, swiglu=False),
    "swiglu": dict(rope=False, fused_linear_cross_entropy=False, rms_norm=False),
    "loss": dict(rope=False, rms_norm=False, swiglu=False),
    "loss of logits": dict(cross_entropy=True, fused_linear_cross_entropy=False),
}


@dtypes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option(device, dtype, options):
    compare(build(device=device, dtype=dtype).train(), make_batch(device), **options)


MODELS = {
    "untied": dict(tie_word_embeddings=False),
    "tied": dict(tie_word_embeddings=True),
    "biases": dict(mlp_bias=True, attention_bias=True),
    "heads": dict(num_key_value_heads=4),
    "wide heads": dict(head_dim=32),
    "gelu": dict(hidden_act="gelu"),
    "relu": dict(hidden_act="relu"),
    "eager attention": dict(attn_implementation="eager"),
}


@dtypes
@pytest.mark.parametrize("overrides", MODELS.values(), ids=MODELS)
def test_every_model(device, dtype, overrides):
    compare(build(device=device, dtype=dtype, **overrides).train(), make_batch(device))


def test_another_activation_leaves_the_mlp_alone():
    model = patched(build(hidden_act="relu"))
    assert type(model.model.layers[0].mlp) is modeling_llama.LlamaMLP
    assert type(model.model.norm) is not modeling_llama.LlamaRMSNorm


@dtypes
def test_bias_of_the_head(device, dtype):
    model = build(device=device, dtype=dtype).train()
    model.lm_head = nn.Linear(64, VOCAB, device=device, dtype=dtype)
    compare(model, make_batch(device))


def shifted(batch):
    return nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()


BATCHES = {
    "plain": lambda b: b,
    "number of items": lambda b: {**b, "num_items_in_batch": 57},
    "number of items as a tensor": lambda b: {**b, "num_items_in_batch": torch.tensor(57, device=b["labels"].device)},
    "shifted labels": lambda b: {**b, "shift_labels": shifted(b)},
    "another ignore_index": lambda b: {**b, "labels": b["labels"].where(b["labels"] >= 0, 7), "ignore_index": 7},
    "left padding": lambda b: {**b, "attention_mask": (torch.ones_like(b["labels"]).cumsum(1) > 2).long()},
    "positions": lambda b: {**b, "position_ids": torch.arange(5, 16, device=b["labels"].device).expand(3, -1)},
    "last positions": lambda b: {**b, "logits_to_keep": 4, "labels": b["labels"][:, -4:]},
    "indexed positions": lambda b: {
        **b, "logits_to_keep": torch.tensor([1, 5, 6], device=b["labels"].device), "labels": b["labels"][:, [1, 5, 6]]
    },
    "one row": lambda b: {k: v[:1] for k, v in b.items()},
    "no cache": lambda b: {**b, "use_cache": False},
    "hidden states": lambda b: {**b, "output_hidden_states": True},
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("change", BATCHES.values(), ids=BATCHES)
def test_every_batch_in_training(device, dtype, change):
    compare(build(device=device, dtype=dtype).train(), change(make_batch(device)))


@dtypes
@pytest.mark.parametrize("change", BATCHES.values(), ids=BATCHES)
def test_every_batch_in_evaluation(device, dtype, change):
    model = build(device=device, dtype=dtype).eval()
    batch = change(make_batch(device))
    compare(model, batch)
    output = patched(model)(**batch, skip_logits=True)
    assert "logits" not in output
    reference = exact(model)(**batch)
    error = (model(**batch).logits.double() - reference.logits).square().mean().sqrt().item()
    assert distance(output.loss, reference.loss) <= 2 * error / reference.loss.item() + rounding(torch.float32)


def masks(device):
    mask = torch.zeros(3, 11, dtype=torch.bool, device=device)
    mask[0, 3:5] = mask[1, 10] = mask[2, :7] = True
    index = torch.tensor([[0, 4], [3, 9], [10, 2]], device=device)
    return {"bool": (mask, tokens(10, device=device)), "index": (index, tokens(3, 2, device=device))}


@dtypes
@pytest.mark.parametrize("kind", ["bool", "index"])
def test_positions_row_by_row(device, dtype, kind):
    keep, labels = masks(device)[kind]
    batch = dict(input_ids=tokens(3, 11, device=device), logits_to_keep=keep, labels=labels, shift_labels=labels)
    model = build(device=device, dtype=dtype).train()
    if TRANSFORMERS >= (5, 23):
        compare(model, batch)
        compare(model.eval(), batch)
        return
    # Older versions have no such argument: select the rows from all logits.
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
        logits = logits[keep] if kind == "bool" else torch.stack([row[k] for row, k in zip(logits, keep, strict=True)])
        expected = nn.functional.cross_entropy(logits.flatten(0, -2).double(), labels.flatten())
        loss = patched(model)(**batch).loss
    assert (loss.double() - expected).abs() < (1e-5 if dtype == torch.float32 else 3e-2)


@dtypes
def test_embeddings_as_input(device, dtype):
    model = build(device=device, dtype=dtype).train()
    embeddings = torch.randn(2, 9, 64, device=device).to(dtype)
    compare(model, dict(inputs_embeds=embeddings, labels=tokens(2, 9, device=device)))
    with torch.inference_mode():  # the output of a frozen encoder, or a prefix that is computed once
        embeddings = embeddings.detach().clone()
    for memory in ("fast", "auto", "low"):
        compare(model, dict(inputs_embeds=embeddings, labels=tokens(2, 9, device=device)), memory=memory)


@dtypes
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(device, dtype, use_reentrant):
    def forward(model, **batch):
        checkpoint_layers(model, use_reentrant)
        calls = count_calls(model)
        output = model(**batch)
        first = len(calls)
        output.loss.backward(retain_graph=True)
        model.zero_grad()
        assert (first, len(calls)) == (2, 4), "the backward did not recompute the layers"
        return output

    compare(build(device=device, dtype=dtype).train(), make_batch(device), forward)


def test_checkpointing_warns_about_the_cache_as_transformers_does(device):
    model = patched(build(device=device).train())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    assert model(**make_batch(device), use_cache=True).past_key_values is None or TRANSFORMERS >= (5, 0)


@dtypes
def test_logits_on_demand_in_training(device, dtype):
    def forward(model, **batch):
        wanted = dict(skip_logits=False) if "skip_logits" in inspect.signature(model.forward).parameters else {}
        output = model(**batch, **wanted)
        assert output.logits is not None
        return output

    model = compare(build(device=device, dtype=dtype).train(), make_batch(device), forward)
    assert model(**make_batch(device), skip_logits=False).logits.shape == (3, 11, VOCAB)
    assert "logits" not in model(**make_batch(device))
    assert model(tokens(2, 5, device=device)).logits is not None


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_logits_without_labels_are_not_skipped(train):
    """A Trainer that evaluates passes skip_logits=True, and removes the labels if it computes the loss itself."""
    model, ids = patched(build()).train(train), tokens(1, 4)
    assert torch.equal(model(ids, skip_logits=True).logits, model(ids).logits)


def test_as_many_labels_as_positions():
    with pytest.raises(ValueError, match="labels for 33 positions, but 12 are kept"):
        patched(build().train())(**make_batch("cpu"), logits_to_keep=4)


@pytest.mark.parametrize("training", [True, False])
def test_labels_with_a_dimension_too_many(device, training):
    """The shift would act on their last dimension, of size 1, and leave no label."""
    model, batch = patched(build(device=device).train(training)), make_batch(device)
    with pytest.raises(ValueError, match=r"labels have shape \[3, 11, 1\], expected \[batch, sequence\]"):
        model(**{**batch, "labels": batch["labels"].unsqueeze(-1)}, skip_logits=True)


@pytest.mark.parametrize("items", [None, 9])
def test_all_labels_ignored(device, items):
    model = patched(build(device=device).train())
    batch = dict(input_ids=tokens(2, 6, device=device), labels=torch.full((2, 6), -100, device=device))
    results = step(model, {**batch, "num_items_in_batch": items})
    assert results.pop("loss") == 0
    assert results and all(not gradient.any() for gradient in results.values())


def test_shifted_labels_alone_suffice(device):
    model = patched(build(device=device).train())
    batch = make_batch(device)
    expected = model(**batch).loss
    labels = shifted(batch)
    assert torch.equal(model(batch["input_ids"], shift_labels=labels).loss, expected)
    evaluated = model.eval()(batch["input_ids"], shift_labels=labels)
    assert evaluated.logits is not None
    torch.testing.assert_close(evaluated.loss, expected)


def test_positional_arguments(device):
    model = patched(build(device=device).train())
    batch = make_batch(device)
    assert torch.equal(model(batch["input_ids"], None, None, None, None, batch["labels"]).loss, model(**batch).loss)


@pytest.mark.parametrize("training", [True, False])
def test_tuples(device, training):
    stock = build(device=device).train(training)
    model = patched(stock)
    batch = make_batch(device)
    expected, result = (m(**batch, return_dict=False, use_cache=True) for m in (stock, model))
    assert isinstance(result, tuple)
    kinds = [type(item) for item in expected]
    assert [type(item) for item in result] == (kinds[:1] + kinds[2:] if training else kinds)
    torch.testing.assert_close(result[0], expected[0])


@dtypes
def test_hidden_states_and_attentions(device, dtype):
    stock = build(device=device, dtype=dtype, attn_implementation="eager").eval()
    model = patched(stock)
    batch = dict(input_ids=tokens(2, 7, device=device), output_hidden_states=True, output_attentions=True)
    reference = exact(stock)(**batch)
    for field in ("hidden_states", "attentions"):
        fields = (reference[field], stock(**batch)[field], model(**batch)[field])
        assert len(fields[0]) == len(fields[1]) == len(fields[2]) == (3 if field == "hidden_states" else 2)
        for exactly, expected, result in zip(*fields, strict=True):
            assert distance(result, exactly) <= 1.5 * distance(expected, exactly) + rounding(dtype)
    # Some versions leave hooks or wrappers behind when they record outputs; these must not bind either model to the
    # other.
    handle = apply_liger_kernel_to_llama(model=stock)
    assert ops(stock, input_ids=tokens(1, 3, device=device)) >= {"add_rms_norm", "rms_norm", "glu", "rope"}
    stock(**batch)
    handle.revert()
    assert not ops(stock, input_ids=tokens(1, 3, device=device))


def test_generation_with_a_cache(device):
    stock = build(device=device).eval()
    model = patched(stock)
    prompt = tokens(2, 5, device=device)
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = stock.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert torch.equal(model.train().eval().generate(prompt, **options, use_cache=False), expected)
    first = model(prompt, use_cache=True)
    second = model(expected[:, 5:6], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(second.logits[:, -1], stock(expected[:, :6]).logits[:, -1], rtol=1e-4, atol=1e-4)


def test_every_op_is_used(device):
    model = patched(build(device=device).train())
    with RecordCalls() as record:
        model(**make_batch(device)).loss.backward()
    # Counts for two layers. rms_norm runs for the input norms and the last norm, and again in the backward for all
    # norms of the layers, whose backward adds the gradient of the residual stream.
    forward = {"rms_norm": 3 + 4, "add_rms_norm": 2, "glu": 2, "rope": 2, "fused_linear_cross_entropy": 1}
    backward = {"rms_norm": 1, "add_rms_norm": 4, "rope": 2, "fused_linear_cross_entropy": 1}
    backward = {f"{op}_backward": count for op, count in backward.items()} | {"glu_backward_with_h_": 2}
    assert Counter(record.names) == forward | backward


def test_loss_options(device):
    stock = build(device=device).train()
    model, batch = patched(stock), make_batch(device)
    logits = stock(**batch).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    valid = targets != -100
    weight = torch.rand(VOCAB, device=device) + 0.5
    cross_entropy = nn.functional.cross_entropy
    expected = {
        "label_smoothing": (0.1, cross_entropy(logits, targets, label_smoothing=0.1)),
        "ce_weight": (weight, cross_entropy(logits, targets, weight)),
        "lse_square_scale": (1e-2, cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square()[valid].mean()),
    }
    for name, (value, loss) in expected.items():
        for skip_logits in (None, False):
            torch.testing.assert_close(model(**batch, **{name: value}, skip_logits=skip_logits).loss, loss)
    probability = (-cross_entropy(logits[valid], targets[valid], reduction="none")).exp()
    scaled = (probability.detach() * -probability.log()).mean()
    torch.testing.assert_close(model(**batch, use_token_scaling=True).loss, scaled)
    with pytest.raises(ValueError, match="use_token_scaling needs the loss fused"):
        model(**batch, use_token_scaling=True, skip_logits=False)
    output = model(**batch, accum_dtype=torch.float32, memory=1 << 20, return_z_loss=True)
    torch.testing.assert_close(output.loss, cross_entropy(logits, targets))


@pytest.mark.parametrize("skip_logits", [None, False])
def test_accuracy_and_predictions(device, skip_logits):
    stock = build(device=device).train()
    batch = make_batch(device)
    output = patched(stock)(**batch, return_token_accuracy=True, return_predicted_tokens=True, skip_logits=skip_logits)
    assert isinstance(output, LigerCausalLMOutputWithPast)
    targets = shifted(batch).flatten()
    predictions = stock(**batch).logits.flatten(0, 1).argmax(-1)
    assert torch.equal(output.predicted_tokens, predictions.where(targets != -100, -1))
    accuracy = (predictions == targets)[targets != -100].float().mean()
    torch.testing.assert_close(output.token_accuracy, accuracy)
    assert output.loss is not None


def test_a_loss_of_the_users_own_is_obeyed(device):
    model = patched(build(device=device).train())
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().square().mean()
    output = model(**make_batch(device))
    assert output.logits is not None
    torch.testing.assert_close(output.loss, output.logits.float().square().mean())


def test_hooks_on_the_head_run(device):
    stock = build(device=device).train()
    model = patched(stock)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output) or output * 2)
    output = model(**make_batch(device))
    assert len(seen) == 1
    assert "logits" not in output
    doubled = build(device=device).train()
    doubled.lm_head.weight.data.mul_(2)
    torch.testing.assert_close(output.loss, doubled(**make_batch(device)).loss)
    hook.remove()
    torch.testing.assert_close(model(**make_batch(device)).loss, stock(**make_batch(device)).loss)


def test_hooks_on_a_norm_see_what_they_saw(device):
    seen = []
    stock = build(device=device).eval()
    for model in (stock, patched(stock)):
        norm = model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        model(tokens(1, 6, device=device))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-5)


def test_frozen_head_and_frozen_backbone(device):
    model = build(device=device, tie_word_embeddings=False).train()
    model.lm_head.requires_grad_(False)
    compare(model, make_batch(device))
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    compare(model, make_batch(device))


def test_rope_scaling(device):
    scaling = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
    scaling["original_max_position_embeddings"] = 32
    if TRANSFORMERS >= (5, 0):
        overrides = dict(rope_parameters=dict(scaling, rope_theta=10000.0))
    else:
        overrides = dict(rope_scaling=scaling)
    compare(build(device=device, **overrides).train(), make_batch(device))


def test_signature_is_kept():
    stock = inspect.signature(LlamaForCausalLM(config(num_hidden_layers=1)).forward).parameters
    ours = inspect.signature(patched(build(num_hidden_layers=1)).forward).parameters
    assert [name for name in ours if name != "skip_logits"] == list(stock)
    assert all(ours[name] == parameter for name, parameter in stock.items())
