"""A patched model under torch.compile: one graph for forward and backward, with varying sizes; and what it saves."""

import importlib
import sys

import pytest
import torch
from cases import slow_if
from family_models import assert_same
from functorch.compile import make_boxed_func
from llama_models import (  # noqa: F401
    TRANSFORMERS,
    VOCAB,
    assert_as_good,
    build,
    checkpoint_layers,
    exact,
    lora,
    make_batch,
    one_thread,
    ops,
    patched,
    step,
    tokens,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.decomposition import select_decomp_table
from transformers import LlamaModel
from transformers.models.llama import modeling_llama

# Inductor's partitioner chooses the saved tensors. This backend generates no code, which would take most of the test.
WITHOUT_CODE = "aot_eager_decomp_partition"
REENTRANT = [slow_if(value is not None, value) for value in (None, False, True)]
LAYERS = pytest.mark.parametrize("use_reentrant", REENTRANT, ids=["kept", "non-reentrant", "reentrant"])


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def compiled_step(model, batch):
    results = step(model, batch)
    return {name.removeprefix("_orig_mod."): value for name, value in results.items()}


def attention_calls(graphs):
    calls = (node for graph in graphs for node in graph.graph.nodes)
    return [node.kwargs for node in calls if node.target is nn.functional.scaled_dot_product_attention]


def keep_graphs_in(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return backend


def test_training_step(device):
    stock = build(device=device, num_hidden_layers=1).train()
    model = patched(stock)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows, seq in ((3, 11), (2, 17)):
        batch = make_batch(device, rows, seq)
        batch["num_items_in_batch"] = torch.tensor(19, device=device)
        result = compiled_step(compiled, batch)
        assert_as_good(result, step(stock, batch), step(exact(stock), batch))
    # For an op without a lowering, torch before 2.13 writes a log text that spells out all of its inputs, recursively:
    # for the loss of a deep model this takes forever.
    lowerings = sys.modules["torch._inductor.graph"].lowerings
    assert {torch.ops.liger_ext_models.norm_mlp.default, torch.ops.liger_ext.softmax.default} <= lowerings.keys()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_lora(device, dynamic):
    stock = lora(build(device=device, num_hidden_layers=1), target_modules="all-linear", use_rslora=True).train()
    model, called = patched(stock), set()

    def look(graph, inputs):
        called.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=look))
    for rows in (3, 2):
        batch = make_batch(device, rows)
        assert_as_good(compiled_step(compiled, batch), step(stock, batch), step(exact(stock), batch))
    assert {f"liger_ext_models.{name}.default" for name in ("norm_linears", "norm_mlp", "adapted")} <= called


@pytest.mark.slow
@LAYERS
@pytest.mark.parametrize("dynamic, graphs", [(None, 2), (True, 1)], ids=["", "dynamic"])
def test_no_graph_is_made_for_a_third_length(device, dynamic, graphs, use_reentrant):
    """No graph break either. By default, torch.compile finds out at the second length that the length varies."""
    stock = build(device=device, num_hidden_layers=1).train()
    model = patched(stock)
    if use_reentrant is not None:
        checkpoint_layers(model, use_reentrant)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=WITHOUT_CODE)
    for seq in (11, 17, 13):
        batch = make_batch(device, 2, seq)
        result = compiled_step(compiled, {**batch, "use_cache": False})
        assert_as_good(result, step(stock, batch), step(exact(stock), batch))
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]


@LAYERS
def test_layers_compiled_one_by_one(device, use_reentrant):
    stock = build(device=device, num_hidden_layers=3).train()
    model = patched(stock)
    if use_reentrant is not None:
        checkpoint_layers(model, use_reentrant)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=WITHOUT_CODE)
    for seq in (11, 17, 13):
        batch = make_batch(device, 2, seq)
        assert_as_good(step(model, batch), step(stock, batch), step(exact(stock), batch))
    assert not counters["graph_break"]


@pytest.mark.slow
def test_mixed_precision(device):
    stock = build(device=device).train()

    def forward(model, **batch):
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return model(**batch)

    batch = make_batch(device)
    compiled = torch.compile(patched(stock), fullgraph=True, backend=WITHOUT_CODE)
    result = step(compiled, batch, forward)
    result = {name.removeprefix("_orig_mod."): value for name, value in result.items()}
    assert_as_good(result, step(stock, batch, forward), step(exact(stock), batch))


def saved_bytes(model, batch):
    """Bytes that the compiled forward saves for its backward, without parameters and buffers."""
    torch._dynamo.reset()
    held = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            kept[storage._cdata] = storage  # keeps it alive, so that its address is not used again
        return tensor

    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=WITHOUT_CODE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(**batch).loss.backward()
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_what_a_layer_keeps(hooks):
    """A layer saves neither the outputs of its norms and its activation, which are recomputed, nor a mask of [seq,
    seq], which is never built. Where hooks on linear layers prevent our ops, checkpoints recompute these outputs."""
    sizes = dict(num_key_value_heads=4, hidden_size=64, intermediate_size=192)
    batch, kept = make_batch("cpu", 2, 32), []
    for layers in (1, 3):
        model = patched(build(num_hidden_layers=layers, **sizes).train())
        for name, module in model.named_modules():
            if hooks and name.endswith(("q_proj", "up_proj")):
                module.register_forward_hook(lambda module, arguments, result: None)
        kept.append(saved_bytes(model, batch))
    hidden = 2 * 32 * 64 * 4
    layer_input, summand, qkv_and_output, gate_and_up = 1, 1, 4, 2 * 3
    log_sum_exp = 4 / 64  # for each head
    copied_output = TRANSFORMERS < (4, 57)  # attention copies its inputs, and o_proj has to copy the output
    rstd = 0 if hooks else 2 / 64  # of both norms
    expected = layer_input + summand + qkv_and_output + gate_and_up + log_sum_exp + copied_output + rstd
    assert (kept[1] - kept[0]) / 2 / hidden == expected


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("memory", ["auto", "low"])
def test_a_training_step_is_exported(memory, strict):
    model, batch = patched(build(num_hidden_layers=1).train(), memory=memory), make_batch("cpu")
    program = torch.export.export(model, (), dict(**batch, use_cache=False), strict=strict)
    assert ops_in(program) == {*OPS, "fused_linear_cross_entropy"}
    assert_same(step(program.module(), dict(batch, use_cache=False)), step(model, batch))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_has_our_ops(strict):
    """The graph has no other ops of liger_ext; the program's results equal the module's. The export leaves no state
    behind."""
    stock, ids = build(num_hidden_layers=2).eval(), tokens(2, 8)
    model = patched(stock)
    program = torch.export.export(model, (), dict(input_ids=ids, use_cache=False), strict=strict)
    assert ops_in(program) == OPS
    result = program.module()(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(result, model(ids).logits)
    torch.testing.assert_close(result, stock(ids).logits, rtol=1e-4, atol=1e-4)
    assert ops(model, input_ids=ids) == OPS
    calls, replaced = [], nn.Module.__call__
    with pytest.MonkeyPatch.context() as patch:  # replacements of every module's __call__ still run
        patch.setattr(nn.Module, "__call__", lambda self, *a, **k: calls.append(self) or replaced(self, *a, **k))
        model(ids)
    assert model.model.layers[0].mlp.act_fn in calls and model.model.layers[0].post_attention_layernorm in calls


OPS = {"rms_norm", "add_rms_norm", "glu", "rope"}


def ops_in(program):
    """Names of liger_ext's ops in a graph, which has no ATen ops that do their work."""
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    names = [op.name() for op in calls if isinstance(op, torch._ops.OpOverload)]
    assert not {"aten::silu", "aten::rsqrt", "aten::_log_softmax"} & set(names)
    return {name.removeprefix("liger_ext::") for name in names if name.startswith("liger_ext")}


@pytest.mark.slow
def test_nothing_is_recomputed_in_evaluation():
    """A checkpoint cannot be exported; a model in eval mode with gradients enabled (the default) can."""
    model = patched(build(LlamaModel).eval())
    ids = tokens(2, 8)
    program = torch.export.export(model, (), dict(input_ids=ids, use_cache=False), strict=True)
    result = program.module()(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(result, model(ids, use_cache=False).last_hidden_state)


@pytest.mark.skipif(not hasattr(modeling_llama, "create_causal_mask"), reason="LlamaModel is not patched")
@pytest.mark.parametrize("tied", [slow_if(not tied, tied) for tied in (False, True)], ids=["", "tied"])
def test_the_gradient_of_the_embedding(device, tied):
    """It is one op, whose sums have the weight's dtype and the same bits in each run; inductor would sum in fp32."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table())
    stock = build(device=device, dtype=torch.bfloat16, num_hidden_layers=1, tie_word_embeddings=tied).train()
    stock.get_input_embeddings().padding_idx = 2 - VOCAB  # counted from the end
    batch = make_batch(device, 4, 32)
    batch["input_ids"] = batch["input_ids"] % 5  # includes padding_idx, whose row has no gradient
    model = patched(stock)
    result = compiled_step(torch.compile(model, fullgraph=True, backend=backend), batch)
    assert_as_good(result, step(stock, batch), step(exact(stock), batch))
    forward, backward = ([node.target for node in graph.graph.nodes] for graph in graphs)
    assert torch.ops.liger_ext_models.embedding_backward.default in backward
    assert not {torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default} & {*forward, *backward}
    if not tied:
        torch.testing.assert_close(
            result["model.embed_tokens.weight"], step(model, batch)["model.embed_tokens.weight"], rtol=0.02, atol=1e-4
        )


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]] * 3)
PADDED = torch.tensor([[1] * 11, [0] * 4 + [1] * 7, [1] * 11])
SQUARE = torch.ones(11, 11, dtype=torch.bool).tril().logical_and(torch.arange(11) != 3).fill_diagonal_(True)
# Arguments of a model, and whether the graph's attention must receive a mask.
CALLS = {
    "nothing more": ({}, False),
    "packed": (dict(position_ids=PACKED, use_cache=False), hasattr(modeling_llama, "create_causal_mask")),
    "mask of ones": (dict(attention_mask=torch.ones(3, 11, dtype=torch.long)), True),
    "padded": (dict(attention_mask=PADDED), True),
    "mask of squares": (dict(attention_mask=SQUARE.expand(3, 1, 11, 11)), True),
    "hidden states": (dict(output_hidden_states=True), False),
    "with a cache": (dict(use_cache=True), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "embeddings"])
def test_attention_gets_a_mask_only_if_it_needs_one(name, embedded):
    """As without torch.compile, where transformers inspects the values; without a mask `is_causal` is True."""
    arguments, masked = CALLS[name]
    stock = build().train()
    batch = {**make_batch("cpu"), **arguments}
    if embedded:
        batch["inputs_embeds"] = stock.model.embed_tokens(batch.pop("input_ids")).detach()
    graphs, model = [], patched(stock)
    model(**batch)  # the first call with hidden states registers hooks on layers, which a graph cannot do
    compiled = torch.compile(model, fullgraph=True, backend=keep_graphs_in(graphs))
    result = compiled_step(compiled, batch)
    assert_as_good(result, step(stock, batch), step(exact(stock), batch))
    calls = attention_calls(graphs)
    assert [call["attn_mask"] is not None for call in calls] == [masked] * 2
    assert [call["is_causal"] for call in calls] == [not masked] * 2
    expected, output = stock(**batch), compiled(**batch)
    assert len(graphs) == 1
    assert (expected.hidden_states is None) == (output.hidden_states is None)
    for ours, theirs in zip(output.hidden_states or (), expected.hidden_states or (), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class UsersModel(LlamaModel):
    """The patch builds a subclass of this class."""


@pytest.mark.slow
@pytest.mark.parametrize("cls", [LlamaModel, UsersModel])
def test_hidden_states_are_recorded(cls):
    """transformers looks up the outputs to record by the name of the model's class."""
    stock = build(cls).train()
    model = patched(stock)
    expected = stock(tokens(2, 5), output_hidden_states=True).hidden_states
    results = model(tokens(2, 5), output_hidden_states=True).hidden_states
    assert len(results) == len(expected) == 3
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not hasattr(modeling_llama, "create_causal_mask"), reason="masks are made by a method")
def test_without_a_graph_no_mask_is_made_either(monkeypatch):
    """transformers would read position_ids to find that no mask is needed, which synchronises with a GPU."""
    batch, calls = make_batch("cpu"), []
    utilities = sys.modules[modeling_llama.create_causal_mask.__module__]
    model = patched(build().train())  # before the replacement, because changed code is not known
    monkeypatch.setattr(utilities, "find_packed_sequence_indices", calls.append)
    model(**batch).loss.backward()
    assert not calls
    model(**batch, position_ids=PACKED, use_cache=False)
    assert calls


@pytest.mark.slow
def test_a_cache_that_is_passed_is_attended_to():
    stock = build().eval()
    model = torch.compile(patched(stock), fullgraph=True, backend="aot_eager")
    ids = tokens(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :6], use_cache=True).past_key_values
        result = model(ids[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(result, stock(ids).logits[:, 6:], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("implementation, is_causal", [("eager", None), ("sdpa", False)])
def test_other_attention(implementation, is_causal):
    """Attention that always needs a mask, and attention that is not causal, as is_causal=False states beside the
    mask."""
    stock = build(LlamaModel, attn_implementation=implementation).eval()
    if is_causal is not None:
        stock.config.is_causal = is_causal
    compiled = torch.compile(patched(stock), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = torch.compile(stock, fullgraph=True, backend="aot_eager")(tokens(2, 5)).last_hidden_state
        result = compiled(tokens(2, 5)).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(modeling_llama, "create_causal_mask"), reason="masks are made by a method")
@pytest.mark.parametrize("registered", [False, True], ids=["replaced", "registered"])
def test_a_mask_of_other_code_is_used(monkeypatch, registered):
    everything = torch.zeros(1, 1, 5, 5)
    if registered:
        masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
        monkeypatch.setitem(masks._global_mapping, "sdpa", lambda *args, **kwargs: everything)
    else:
        monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda *args, **kwargs: everything)
    model = patched(build(LlamaModel).eval())
    with torch.no_grad():
        expected = model(tokens(2, 5)).last_hidden_state
        result = torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(2, 5)).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_the_graph_holds_our_ops(device):
    stock = build(device=device, num_hidden_layers=1).eval()
    graphs = []

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(patched(stock), fullgraph=True, backend=keep_graph)
    batch = make_batch(device)
    with torch.no_grad():
        expected, output = stock(**batch), compiled(**batch)
        torch.testing.assert_close(output.logits, expected.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.loss, expected.loss)
        output = compiled(**batch, skip_logits=True)
        assert "logits" not in output
        torch.testing.assert_close(output.loss, expected.loss)
    assert len(graphs) == 2
    for graph, loss in zip(graphs, (set(), {"fused_linear_cross_entropy"}), strict=True):
        names = {str(node.target) for node in graph.graph.nodes if str(node.target).startswith("liger_ext.")}
        assert {name.split(".")[1] for name in names} == {"rms_norm", "add_rms_norm", "glu", "rope"} | loss
