"""What other code has put in place of transformers' own keeps its say in a patched model."""

import pytest
import torch
from llama_models import batch_of, build, one_thread, patched  # noqa: F401


@pytest.mark.parametrize("training", [True, False])
def test_a_loss_of_the_users_own_gets_what_it_gets_unpatched(device, training):
    """All arguments of the call, whatever our own losses would do with them."""
    seen = []

    def loss_function(logits, labels, vocab_size, **kwargs):
        seen.append(kwargs)
        return logits.float().square().mean()

    weight = torch.ones(3, device=device)
    options = dict(label_smoothing=0.3, ce_weight=weight, return_token_accuracy=True, memory=1 << 20, mine="too")
    stock = build(device=device).train(training)
    model = patched(stock)
    for each in (stock, model):
        each.loss_function = loss_function
        output = each(**batch_of(device), **options, num_items_in_batch=7)
        torch.testing.assert_close(output.loss, output.logits.float().square().mean())
    assert seen[0].keys() >= options.keys()
    assert seen[1].keys() == seen[0].keys()
    assert all(seen[1][name] is value for name, value in options.items())
