"""A patched model is one graph for torch.compile, forward and backward, with sizes that change."""

import torch
from llama_models import assert_as_good, batch_of, build, exact, one_thread, patched, step, tokens  # noqa: F401
from torch._dynamo.utils import counters


def test_training_step(device):
    stock = build(device=device, num_hidden_layers=1).train()
    model = patched(stock)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows, seq in ((3, 11), (2, 17)):
        batch = batch_of(device, rows, seq)
        batch["num_items_in_batch"] = torch.tensor(19, device=device)
        result = step(compiled, batch)
        result = {name.removeprefix("_orig_mod."): value for name, value in result.items()}
        assert_as_good(result, step(stock, batch), step(exact(stock), batch))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_evaluation(device):
    stock = build(device=device, num_hidden_layers=1).eval()
    torch._dynamo.reset()
    compiled = torch.compile(patched(stock), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        batch = batch_of(device)
        for options in ({}, dict(skip_logits=True), dict(logits_to_keep=1)):
            wanted = batch if "logits_to_keep" not in options else dict(input_ids=batch["input_ids"])
            expected = stock(**wanted, **{k: v for k, v in options.items() if k != "skip_logits"})
            output = compiled(**wanted, **options)
            if "logits_to_keep" not in options:
                torch.testing.assert_close(output.loss, expected.loss)
            if "skip_logits" not in options:
                torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
