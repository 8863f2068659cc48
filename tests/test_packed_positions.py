"""Rows that contain several documents, which only `position_ids` separate. Patched models do as transformers does: it
masks the documents from each other where it builds no cache of keys and values (since 4.53)."""

import family_models
import llama_models
import pytest
import torch
from family_models import assert_same
from llama_models import TRANSFORMERS, build, checkpoint_layers, one_thread, patched, step, tokens  # noqa: F401

POSITIONS = torch.cat([torch.arange(6), torch.arange(5)])
FIRST = 6  # tokens of the first document


def make_batch(device, seed=1):
    """Labels belong to the second document only; the first document's tokens depend on the seed."""
    ids = tokens(2, len(POSITIONS), device=device)
    ids[:, :FIRST] = tokens(2, FIRST, device=device, seed=seed)
    labels = ids.clone()
    labels[:, : FIRST + 1] = -100
    return dict(input_ids=ids, labels=labels, position_ids=POSITIONS.to(device).expand(2, -1))


def keeps_apart(model, device, **options):
    losses = [step(model, make_batch(device, seed) | options)["loss"] for seed in (1, 2)]
    return torch.allclose(*losses, rtol=1e-5)


USE_CACHE = pytest.mark.parametrize("options", [{}, dict(use_cache=False), dict(use_cache=True)], ids=str)


@USE_CACHE
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_as_transformers_does(device, attention, options):
    stock = build(device=device, attn_implementation=attention).train()
    model, batch = patched(stock), make_batch(device) | options
    assert_same(step(model, batch), step(stock, batch))
    apart = options == dict(use_cache=False) and TRANSFORMERS >= (4, 53)
    assert keeps_apart(model, device, **options) is keeps_apart(stock, device, **options) is apart


@USE_CACHE
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_checkpoints(device, use_reentrant, options):
    stock = build(device=device).train()
    model, batch = patched(stock), make_batch(device) | options
    for of in (stock, model):
        checkpoint_layers(of, use_reentrant)
    assert_same(step(model, batch), step(stock, batch))
    assert keeps_apart(model, device, **options) is keeps_apart(stock, device, **options)


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3"])
def test_of_other_families(device, family):
    """Also with layers with a sliding window."""
    stock = family_models.build(family, device, num_hidden_layers=2)
    model, batch = family_models.patched(stock), make_batch(device)
    assert_same(step(model, batch), step(stock, batch))
    assert keeps_apart(model, device) is keeps_apart(stock, device)


def test_positions_that_are_left_out(device):
    """Gaps in the positions start no document: transformers lets a token attend to all previous ones."""
    stock = build(device=device).train()
    batch = llama_models.make_batch(device)
    positions = torch.arange(batch["labels"].shape[1], device=device) * 2
    batch["position_ids"] = positions.expand(len(batch["labels"]), -1)
    assert_same(step(patched(stock), batch), step(stock, batch))


def test_no_cache_where_positions_tell_nothing(device):
    """With a mask, or without positions, a training step builds no cache unless use_cache=True."""
    model, batch = patched(build(device=device).train()), make_batch(device)
    mask = torch.ones_like(batch["input_ids"])
    assert "past_key_values" not in model(**batch, attention_mask=mask)
    del batch["position_ids"]
    assert "past_key_values" not in model(**batch)
    assert "past_key_values" in model(**batch, use_cache=True)
