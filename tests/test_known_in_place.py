"""Known code in a class that had other known code: the patch computes what the class's present code computes.

A test puts the code of a family's norm, MLP, attention, decoder layer and head in the place of Llama's, or of
Mistral's, whose patches exist by then. The modules of a model of that family get these classes, and the patched model
is compared with the stock one.
"""

import copy
import itertools

import pytest
import test_families_all
import test_families_images
import torch
from family_models import LAYERS, OPTIONS, assert_same, build, patched
from in_place import put_class
from llama_models import TRANSFORMERS, one_thread, step, tokens  # noqa: F401
from mutations import find_class

from liger_ext.models import patches
from liger_ext.models.modules import causal_lm, decoder, mlp, norms
from liger_ext.models.recognise.known import look_up

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="older transformers have other code")
KINDS = {  # by our mixin: the end of the name of Llama's class
    norms.Norm: "RMSNorm",
    mlp.MLP: "MLP",
    decoder.Attention: "Attention",
    decoder.DecoderLayer: "DecoderLayer",
    (causal_lm.CausalLM, causal_lm.CausalLMInside): "ForCausalLM",
}
PLACES = "llama.Llama", "mistral.Mistral"
QUICK = "cohere2", "deepseek_v3", "falcon_h1", "gemma2", "glm4", "granite", "jetmoe", "nanochat", "phi3"
FAMILIES = sorted({*OPTIONS, *LAYERS, *test_families_all.KNOWN, *test_families_images.MODELS})


def build_model(family):
    if family in {*OPTIONS, *LAYERS}:
        return build(family)
    return (test_families_all if family in test_families_all.KNOWN else test_families_images).build(family)


def recognised(model):
    """{class: what is recognised in it}, for the classes of a model that run known code."""
    found = {cls: patches.recognise(cls) for cls in patches.stock_classes(model.modules())}
    return {cls: known for cls, known in found.items() if known and known.kind}


def rows(known):
    """Yields {class: the end of the name of Llama's class}, with at most one class of each kind."""
    by_kind = ([cls for cls, found in known.items() if issubclass(found.kind, kind)] for kind in KINDS)
    for row in itertools.zip_longest(*by_kind):
        yield {cls: end for cls, end in zip(row, KINDS.values(), strict=True) if cls is not None}


def is_relative(cls):
    """Returns whether the table lists the code of `cls`, a layer or a head, as its difference from Llama's class, so
    that it is not known while Llama's class has other code."""
    found = look_up(cls)
    return found is not None and found[0].part in ("layer", "head")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_equals_stock(monkeypatch, family, place):
    model = build_model(family)
    ids = tokens(2, 9) % 297 + 3
    batch = dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    batch |= {"token_type_ids": torch.zeros_like(ids)} if family == "paligemma" else {}
    known, without = recognised(model), patched(model)
    assert known
    for row in rows(known):
        in_place = {other: find_class(place + end) for other, end in row.items()}
        in_place = {other: cls for other, cls in in_place.items() if cls is other or cls not in known}
        unknown = [cls for other, cls in in_place.items() if is_relative(other) and place == "llama.Llama"]
        before = {cls: patches.find_patch(cls) for cls in in_place.values()}
        with monkeypatch.context() as patch:
            for other, cls in in_place.items():
                put_class(patch, cls, other)
            stock = copy.deepcopy(model)
            for module in stock.modules():
                module.__class__ = in_place.get(type(module), type(module))
            ours = patched(stock)
            for other, cls in in_place.items():
                found = patches.recognise(cls)
                if found is None and cls in unknown:
                    continue
                assert (found.kind, found.attributes) == (known[other].kind, known[other].attributes)
                assert found.functions.keys() == known[other].functions.keys()
                assert count(ours, cls, found.kind) == count(without, other, found.kind)
            assert_same(run(ours, batch), run(stock, batch))
        assert before == {cls: patches.find_patch(cls) for cls in before}


def count(model, *classes):
    """The number of modules that are instances of all `classes`."""
    return sum(all(isinstance(module, cls) for cls in classes) for module in model.modules())


def run(model, batch):
    torch.manual_seed(1)  # for dropout
    return step(model, batch)
