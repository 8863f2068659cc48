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


def test_the_graph_holds_our_ops(device):
    stock = build(device=device, num_hidden_layers=1).eval()
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(patched(stock), fullgraph=True, backend=keep_graph)
    batch = batch_of(device)
    with torch.no_grad():
        expected, output = stock(**batch), compiled(**batch)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.loss, expected.loss)
        output = compiled(**batch, skip_logits=True)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected.loss)
    assert len(graphs) == 2
    for graph, loss in zip(graphs, (set(), {"fused_linear_cross_entropy"}), strict=True):
        names = {str(node.target) for node in graph.graph.nodes if str(node.target).startswith("liger_ext.")}
        assert {name.split(".")[1] for name in names} == {"rms_norm", "add_rms_norm", "glu", "rope"} | loss
