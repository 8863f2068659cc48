"""Outputs of a training step without logits: the loss, and errors that name what an unpatched model would return."""

import copy
import dataclasses
import io
import pickle

import family_models
import pytest
import torch
from llama_models import TRANSFORMERS, build, checkpoint_layers, make_batch, one_thread, patched, step  # noqa: F401
from torch import nn

from liger_ext.models.modules.loss import CACHES

LOGITS = r"no logits: .*model\(\.\.\., skip_logits=False\)"
CACHE = r"no (past_key_values|cache): .*model\(\.\.\., use_cache=True\)"


def test_reading_what_was_not_made():
    """Reading raises an error that states how to request it; copying or unpickling an output does not."""
    model, batch = patched(build(tie_word_embeddings=False)).train(), make_batch("cpu")
    output = model(**batch)
    for name, message in dict(logits=LOGITS, past_key_values=CACHE).items():
        with pytest.raises(AttributeError, match=message):
            getattr(output, name)
        with pytest.raises(KeyError, match=message):
            output[name]
        assert getattr(output, name, None) is None and output.get(name) is None
        assert name not in output and f"{name}=" not in repr(output)
    assert isinstance(output, type(build()(**batch)))
    leaves, spec = torch.utils._pytree.tree_flatten(output)
    copies = [pickle.loads(pickle.dumps(output)), torch.utils._pytree.tree_unflatten(leaves, spec)]
    for same in [*copies, dataclasses.replace(output), type(output)(dict(output)), copy.copy(output)]:
        assert type(same) is type(output) and list(same) == ["loss"] and same.loss == output.loss
    assert [field.name for field in dataclasses.fields(output)][:2] == ["loss", "hidden_states"]
    assert model(**batch, skip_logits=False).logits.shape == (*batch["labels"].shape, model.config.vocab_size)


def test_what_was_not_made_can_be_set():
    """To None, by code that frees memory before the backward; to logits, by code that computed them."""
    output = patched(build()).train()(**make_batch("cpu"))
    output.logits = output.past_key_values = None
    assert output.logits is None and output.past_key_values is None and list(output) == ["loss"]
    del output.logits
    with pytest.raises(AttributeError, match=LOGITS):
        output.logits  # noqa: B018
    logits = torch.ones(2, 3)
    for put in (lambda: setattr(output, "logits", logits), lambda: output.__setitem__("logits", logits)):
        put()
        same = pickle.loads(pickle.dumps(output))
        assert torch.equal(same.logits, logits) and torch.equal(same["logits"], logits) and torch.equal(same[1], logits)
        assert output.logits is output["logits"] is output[1] is logits and output.to_tuple()[1] is logits


@pytest.mark.parametrize("options", [{}, dict(use_cache=True), dict(use_cache=False)], ids=str)
def test_pickled_outputs(options):
    """Unpickling finds each output class by its name."""
    output = patched(build()).train()(**make_batch("cpu"), **options, output_hidden_states=True)
    buffer = io.BytesIO()
    torch.save(output, buffer)
    buffer.seek(0)
    same = torch.load(buffer, weights_only=False)
    assert type(same) is type(output) and list(same) == list(output)
    assert torch.equal(same.hidden_states[-1], output.hidden_states[-1])


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("use_cache", [None, True])
def test_places_are_those_of_an_unpatched_model(family, use_cache):
    """Mixtral's outputs have the auxiliary loss between the loss and the logits."""
    stock = build().train() if family == "llama" else family_models.build(family, "cpu").train()
    batch = make_batch("cpu") | dict(output_hidden_states=True, use_cache=use_cache)
    if family == "mixtral":
        batch["output_router_logits"] = True
    expected, output = (
        stock(**batch),
        patched(stock)(**batch) if family == "llama" else family_models.patched(stock)(**batch),
    )
    names = list(expected)
    missing = {"logits"} | (set(CACHES) if use_cache is None else set())
    for place, name in enumerate(names):
        for index in (place, place - len(names)):
            if name in missing:
                with pytest.raises(IndexError, match=f"no {name}"):
                    output[index]
            else:
                assert output[index] is output[name]
    first = names.index("logits")
    assert [item is output[name] for item, name in zip(output[:first], names, strict=False)] == [True] * first
    with pytest.raises(IndexError, match="no logits"):
        output[: first + 1]
    with pytest.raises(IndexError, match="no logits"):
        output[1:]
    with pytest.raises(IndexError):
        output[len(names)]
    torch.testing.assert_close(output[0], expected[0])


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_cache_where_one_is_asked_for(device, asked):
    model, batch = patched(build(device=device).train()), make_batch(device)
    made = model(**batch, use_cache=asked)
    assert (not made.keys().isdisjoint(CACHES)) == (asked is True)
    assert hasattr(made, "past_key_values") == (asked is not None)
    # With logits, a step returns exactly what an unpatched model returns.
    assert (model(**batch, use_cache=asked, skip_logits=False).past_key_values is not None) == (asked is not False)
    cache = model.eval()(batch["input_ids"], use_cache=True).past_key_values
    assert model(**batch, use_cache=asked).past_key_values is not None or asked is False
    longer = model.train()(**batch, past_key_values=cache, use_cache=asked).past_key_values
    assert cache.get_seq_length() == 2 * batch["input_ids"].shape[1]
    assert longer is cache or asked is False  # transformers 4 returns no cache here


@pytest.mark.parametrize("why", ["config", "checkpoints", "loss of the user's own"])
def test_the_cache_is_stocks_where_it_makes_none_or_is_called(device, why):
    stock = build(device=device).train()
    if why == "config":
        stock.config.use_cache = False
    model, batch = patched(stock), make_batch(device)
    for of in (stock, model):
        if why == "checkpoints":
            checkpoint_layers(of, use_reentrant=False)
        elif why == "loss of the user's own":
            of.loss_function = lambda logits, labels, **kwargs: logits.float().mean()
    expected, found = (of(**batch).past_key_values for of in (stock, model))
    assert (found is None) == (expected is None) or (why == "checkpoints" and found is None)
    assert (found is None) == (why != "loss of the user's own")


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3"])
def test_truncated_backpropagation(device, family):
    """Each step receives the previous step's cache. Without `use_cache=True` an unpatched model returns it, too: here
    reading it raises an error, instead of a loss that ignores the past."""
    stock = build(device=device).train() if family == "llama" else family_models.build(family, device).train()
    model = patched(stock) if family == "llama" else family_models.patched(stock)
    batch = make_batch(device, seq=12)

    def losses(model: nn.Module, **options) -> list[float]:
        past, found = None, []
        for columns in (slice(0, 6), slice(6, 12)):
            part = {name: value[:, columns] for name, value in batch.items()}
            output = model(**part, past_key_values=past, **options)
            past = output.past_key_values
            found.append(output.loss.item())
        return found

    expected = losses(stock, use_cache=True)
    torch.testing.assert_close(losses(model, use_cache=True), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses(stock), expected)
    assert abs(expected[1] - stock(**{name: value[:, 6:] for name, value in batch.items()}).loss.item()) > 1e-3
    with pytest.raises(AttributeError, match=CACHE):
        losses(model)


@pytest.mark.parametrize("value", ["no", 0, 1])
def test_skip_logits_is_a_bool(value):
    with pytest.raises(TypeError, match=f"skip_logits is {value!r}, expected True, False or None"):
        patched(build())(**make_batch("cpu"), skip_logits=value)


class Reader(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch) -> tuple[torch.Tensor, ...]:
        output = self.model(**batch)
        return output.loss, output["loss"], output[0], *output[:1], getattr(output, "logits", None)


@pytest.mark.skipif(TRANSFORMERS < (5, 0), reason="its outputs are read in graphs by transformers 5")
def test_read_in_a_graph():
    model, batch = Reader(patched(build().train())), make_batch("cpu")
    *losses, logits = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch)
    expected = model(**batch)[0]
    assert logits is None
    for loss in losses:
        torch.testing.assert_close(loss, expected)
