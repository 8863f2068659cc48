"""Tests of log-probabilities and entropies of every family. test_llama_log_probs.py has more tests, of Llama."""

import family_models
import pytest
import test_families_heads
import test_families_images
import torch
from cases import slow_if
from llama_models import TRANSFORMERS, one_thread, tokens  # noqa: F401
from test_llama_log_probs import OPTIONS, from_logits, judge, make_inputs
from torch import nn

pytestmark = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason="the families are in the newest")


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2", "falcon_h1"])
def test_families(device, family):
    """Softcaps and factors of the logits apply to the results."""
    stock = family_models.build(family, device)
    for temperature in (1.0, 0.6):
        judge(stock, make_inputs(device, temperature=temperature))


def test_experts(device):
    """The loss that balances the experts is added to the loss only."""
    stock = family_models.build("mixtral", device)
    model, batch = family_models.patched(stock), make_inputs(device)
    expected, found = stock(**batch), model(**batch, **OPTIONS)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    torch.testing.assert_close(found.log_probs, from_logits(stock, **batch)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_a_called_head_of_a_family(device, family):
    """A user's head with its own forward is called, and the family's factor or softcap applies to its logits."""

    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    stock = family_models.build(family, device, tie_word_embeddings=False)
    stock.lm_head.__class__ = Doubled
    judge(stock, make_inputs(device, temperature=0.6))


FAMILIES = dict.fromkeys({**family_models.LAYERS, **family_models.OPTIONS}, family_models.build)
FAMILIES |= dict.fromkeys(test_families_heads.BUILT, test_families_heads.build_model)
FAMILIES |= dict.fromkeys(test_families_images.MODELS, test_families_images.build)
QUICK = "llama4", "mamba"


@pytest.mark.parametrize("family, make", [slow_if(name not in QUICK, name, FAMILIES[name]) for name in FAMILIES])
def test_every_family(device, family, make):
    """If the head belongs to an inner language model (Llama 4 with images), the results are computed from the
    logits."""
    stock = make(family, device).eval()
    ids = tokens(2, 9, device=device) % 900 + 3
    batch = dict(input_ids=ids, labels=ids.masked_fill(ids < 200, -100), temperature=0.7)
    with torch.no_grad():
        output, expected = family_models.patched(stock)(**batch, **OPTIONS), from_logits(stock, **batch)
    assert ("logits" in output) is (family == "llama4")
    tolerance = dict(rtol=1e-3 if family == "dbrx" else 1e-4, atol=1e-4)
    torch.testing.assert_close((output.log_probs, output.entropy), expected[1:], **tolerance)


def test_heads_with_another_loss(device):
    """Bamba's loss has a term of all logits, which excludes log-probabilities."""
    model = family_models.patched(family_models.build("bamba", device, z_loss_coefficient=0.5))
    with pytest.raises(ValueError, match="z_loss_coefficient"):
        model(**make_inputs(device), return_log_probs=True)
