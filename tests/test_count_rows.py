"""Tests of `count_rows`: the fused loss excludes most rows with an ignored target from its matmuls, and its results
keep liger_ext.rule."""

import contextlib
import copy
import functools

import pytest
import torch
from cases import RecordCalls, random_targets
from hypothesis import given
from hypothesis import strategies as st
from llama_models import assert_as_good, build, compare, make_batch, patched, step
from test_cross_entropy import loss_options
from test_fused_linear_cross_entropy import head

from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.testing import judge


def with_counted_rows(**arguments):
    counted = F.count_rows(arguments["target"], arguments.get("ignore_index", -100))
    return F.fused_linear_cross_entropy(**arguments, rows=counted)


def op_rows(run):
    with RecordCalls() as record:
        run()
    return [a[0].shape[0] for op, a in record.calls if op._schema.name == "liger_ext::fused_linear_cross_entropy"]


@pytest.mark.parametrize("ignored", [0.0, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("memory", ["auto", SMALLEST])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_counted_rows(device, ignored, memory, reduction):
    made = {**head(device=device, bias=True, ignored=ignored), "memory": memory, "reduction": reduction}
    judge("fused_linear_cross_entropy", made, run=with_counted_rows)
    made |= {"target": made["target"].masked_fill(made["target"] == -100, 7), "ignore_index": 7}
    judge("fused_linear_cross_entropy", made, run=with_counted_rows)


@given(data=st.data(), options=loss_options)
def test_options_of_counted_rows(device, data, options):
    made = head(data.draw(st.sampled_from([0, 1, 5, 64, 300])), device=device, bias=True, ignored=0.6)
    options["use_token_scaling"] = data.draw(st.booleans())
    judge("fused_linear_cross_entropy", made | options, run=with_counted_rows)


def test_the_matmuls_have_as_many_rows_as_count(device):
    """The number of rows in the matmuls is that of the counting rows, rounded up to a sixteenth of all; ignored rows
    fill it up."""
    made = head(1600, device=device, ignored=0)
    for kept, expected in ((0, 100), (1, 100), (100, 100), (101, 200), (850, 900), (1501, 1600), (1600, 1600)):
        target = made["target"].clone()
        target[torch.randperm(1600)[kept:]] = -100
        assert op_rows(functools.partial(with_counted_rows, **{**made, "target": target})) == [expected]
        index = F.count_rows(target).index()
        assert (index is None) == (expected == 1600)
        if index is not None:
            assert index.unique().numel() == expected and (target[index] != -100).sum() == kept


def test_an_index(device):
    """`rows` may be an index of the caller; rows outside of it are ignored."""
    made = head(device=device, ignored=0.2)
    index = torch.randperm(300, device=device)[:77]
    masked = torch.full_like(made["target"], -100)
    masked[index] = made["target"][index]
    options = {"return_predicted_tokens": True, "reduction": "none"}
    expected = F.fused_linear_cross_entropy(**{**made, "target": masked}, **options)
    found = F.fused_linear_cross_entropy(**made, **options, rows=index)
    compiled = torch.compile(F.fused_linear_cross_entropy, fullgraph=True, backend="aot_eager")
    again = compiled(**made, **options, rows=index)
    for output in (found, again):
        torch.testing.assert_close(output.loss, expected.loss)
        assert torch.equal(output.predicted_tokens, expected.predicted_tokens)
    leaves, weights = (made["x"], made["weight"]), torch.randn(300, device=device)
    gradients = [torch.autograd.grad(output.loss, leaves, weights) for output in (expected, found, again)]
    for a, b, c in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_rows(device, reduction):
    """Without rows the results keep their shapes."""
    made = {**head(8, device=device), "reduction": reduction}
    none = torch.zeros(0, dtype=torch.int64, device=device)
    options = {"return_predicted_tokens": True, "return_token_accuracy": True, "return_z_loss": True}
    expected = F.fused_linear_cross_entropy(**made | {"target": torch.full_like(made["target"], -100)}, **options)
    found = F.fused_linear_cross_entropy(**made, **options, rows=none)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    gradients = torch.autograd.grad(found.loss.sum(), (made["x"], made["weight"]))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_and_autocast(device, dtype):
    """`rows` works under autocast, also to the other 16-bit dtype, with the backward inside of the region."""
    made = head(64, dtype=dtype, device=device, ignored=0.5)
    for other in (torch.bfloat16, torch.float16):
        with torch.autocast(device.type, other):
            gradients = []
            for rows in (None, F.count_rows(made["target"])):
                loss = F.fused_linear_cross_entropy(**made, rows=rows)
                gradients.append(torch.autograd.grad(loss, (made["x"], made["weight"])))
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


def test_a_bad_target_is_named_where_it_is(device):
    target = torch.full((32,), -100, device=device)
    target[20] = 50
    made = head(32, device=device) | {"target": target}
    if device.type == "cpu":
        for rows in (F.count_rows(target), torch.tensor([3, 20])):
            with pytest.raises(IndexError, match=r"target\[20\] is 50, expected a class in \[0, 50\)"):
                F.fused_linear_cross_entropy(**made, rows=rows)
    F.fused_linear_cross_entropy(**made, rows=torch.tensor([3], device=device))  # row 20 is not listed


def test_transforms_are_refused_in_words(device):
    made = head(8, device=device)
    with pytest.raises(RuntimeError, match=r"liger_ext::.* does not work under torch.func"):
        torch.func.grad(lambda x: F.fused_linear_cross_entropy(**made | {"x": x}, rows=F.count_rows(made["target"])))(
            made["x"].detach()
        )


def test_rows_that_do_not_fit(device):
    made = head(8, device=device, ignored=0)
    loss = functools.partial(F.fused_linear_cross_entropy, **made)
    for bad, error, words in (
        (F.count_rows(torch.zeros(9, dtype=torch.long, device=device)), ValueError, "9 rows"),
        (torch.zeros(2, device=device), ValueError, "rows has shape"),
        (torch.zeros(2, 2, dtype=torch.long, device=device), ValueError, "rows has shape"),
        ([1, 2], TypeError, "rows"),
    ):
        with pytest.raises(error, match=words):
            loss(rows=bad)
    for wrong in (8, -1):
        index = torch.tensor([0, wrong], device=device)
        if device.type == "cpu":
            with pytest.raises(IndexError, match=f"rows has {wrong}, expected at least 0 and less than 8"):
                loss(rows=index)
        else:
            assert loss(rows=index).isnan()
            torch.cuda.synchronize()
            with pytest.raises(IndexError):
                loss()
    with pytest.raises(ValueError, match="count_rows: target has dtype"):
        F.count_rows(torch.zeros(3, device=device))


# Rows of other targets -----------------------------------------------------------------------------------------------


def assert_refused(device, leaves, loss):
    """Asserts that the CPU raises immediately. The GPU does not wait: loss and gradients are NaN, and the error comes
    later."""
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"rows leaves out row \d+, whose target is \d+ and not ignore_index"):
            loss()
        return
    found = loss()
    with pytest.raises(ValueError, match="rows leaves out a row"):
        F.check_errors()
    gradients = torch.autograd.grad(found.sum(), leaves)
    assert all(t.isnan().any() for t in (found, *gradients))
    with contextlib.suppress(ValueError):  # a backward that reads targets reports them, too
        F.check_errors()


@pytest.mark.parametrize(
    "options",
    [{}, {"memory": "fast"}, {"memory": SMALLEST}, {"memory": SMALLEST, "reduction": "none"}, {"reduction": "sum"}],
    ids=str,
)
def test_rows_of_other_targets(device, options):
    made = head(300, device=device, ignored=0.7)
    counted = F.count_rows(random_targets(300, 50, device=device, seed=9, ignored=0.7))
    leaves = made["x"], made["weight"]
    assert_refused(device, leaves, lambda: F.fused_linear_cross_entropy(**made, **options, rows=counted))
    judge("fused_linear_cross_entropy", made | options, run=with_counted_rows)


def test_targets_that_change_after_the_count(device):
    """The loss is right as long as every counting target is at a listed row."""
    made = head(160, device=device, ignored=0)
    made["target"][32:] = -100
    counted = F.count_rows(made["target"])
    loss = functools.partial(F.fused_linear_cross_entropy, rows=counted, **made)
    made["target"][:16] = -100
    listed = counted.index().tolist()
    made["target"][listed[-1]] = 5  # an ignored row among the listed ones
    torch.testing.assert_close(loss(), F.fused_linear_cross_entropy(**made))
    made["target"][min(set(range(160)) - set(listed))] = 5
    assert_refused(device, (made["x"],), loss)


def test_rows_of_another_ignore_index(device):
    made = head(300, device=device, ignored=0)
    made["target"][100:] = 7
    counted = F.count_rows(made["target"], ignore_index=7)
    assert_refused(device, (made["x"],), lambda: F.fused_linear_cross_entropy(**made, rows=counted))


@pytest.mark.cuda
def test_rows_of_other_targets_are_found_without_waiting():
    made = head(300, device="cuda", ignored=0.7)
    others = F.count_rows(random_targets(300, 50, device="cuda", seed=9, ignored=0.7), max_rows=150)
    with_max_rows(150, **made)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = F.fused_linear_cross_entropy(**made, rows=others)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan()
    with pytest.raises(ValueError, match="rows leaves out"):
        F.check_errors()


# max_rows -----------------------------------------------------------------------------------------------------------


def with_max_rows(max_rows, **arguments):
    counted = F.count_rows(arguments["target"], arguments.get("ignore_index", -100), max_rows)
    return F.fused_linear_cross_entropy(**arguments, rows=counted)


@pytest.mark.parametrize("max_rows", [110, 150, 299, 300, 1000])
def test_max_rows(device, max_rows):
    """The loss processes `max_rows` rows, without waiting for the count."""
    made = head(300, device=device, bias=True, ignored=0.7)
    assert (made["target"] != -100).sum() <= 110
    judge("fused_linear_cross_entropy", made, run=functools.partial(with_max_rows, max_rows))
    assert op_rows(lambda: with_max_rows(max_rows, **made)) == [min(max_rows, 300)]


def test_more_rows_than_max_rows(device):
    made = head(8, device=device, ignored=0)
    for bad, error in ((0, ValueError), (-3, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_rows"):
            with_max_rows(bad, **made)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="max_rows is 5, but 8 rows of target are not ignored"):
            with_max_rows(5, **made)
        return
    assert with_max_rows(5, **made).isnan()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="too few max_rows"):
        F.softmax(torch.zeros(1, device=device))


def rows_in_a_graph(run):
    """Returns the number of rows of the fused loss's calls, from the profiler."""
    with torch.profiler.profile(record_shapes=True) as seen:
        run()
    name = "liger_ext::fused_linear_cross_entropy"
    return [event.input_shapes[0][0] for event in seen.events() if event.name == name]


@pytest.mark.parametrize("dynamic", [False, True])
def test_max_rows_in_a_graph(device, dynamic):
    torch._dynamo.reset()
    loss = torch.compile(functools.partial(with_max_rows, 110), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    made = head(300, device=device, bias=True, ignored=0.7)
    judge("fused_linear_cross_entropy", made, run=loss)
    assert rows_in_a_graph(lambda: loss(**made)) == [110]
    made["target"] = random_targets(300, made["weight"].shape[0], device=device, ignored=0)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="too few max_rows"):
            loss(**made)
        return
    assert loss(**made).isnan()
    with pytest.raises(ValueError, match="too few max_rows"):
        F.check_errors()


@pytest.mark.parametrize("compiled", [False, True])
def test_max_rows_of_a_model(device, compiled):
    torch._dynamo.reset()
    stock = build(device=device).train()
    model, batch = patched(stock), instruction(device)
    forward = None
    if compiled:
        forward = torch.compile(lambda m, **b: m(**b), backend="aot_eager", fullgraph=True)
    found = step(model, batch | {"max_rows": 120}, forward)
    assert_as_good(found, step(stock, batch), step(copy.deepcopy(stock).double(), batch))
    ran = rows_in_a_graph(lambda: step(model, batch | {"max_rows": 120}, forward))
    assert ran == [120]
    with torch.no_grad():  # max_rows has no effect with logits
        options = {"max_rows": 120, "skip_logits": False}
        assert torch.equal(model(**batch, **options).loss, model(**batch, skip_logits=False).loss)


# Models ---------------------------------------------------------------------------------------------------------------


def instruction(device, batch=4, seq=64, share=0.6, **options):
    """Returns a batch with labels only at the end of each sequence."""
    made = make_batch(device, batch, seq)
    made["labels"] = made["input_ids"].clone()
    made["labels"][:, : int(share * seq)] = -100
    return made | options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_counts_its_labels(device, dtype):
    compare(build(device=device, dtype=dtype).train(), instruction(device))
    model = patched(build(device=device, dtype=dtype).train())
    ran = op_rows(lambda: step(model, instruction(device)))
    assert ran == [112]  # of 256 rows, 104 of which count


def test_labels_that_count_nothing(device):
    model = patched(build(device=device).train())
    found = step(model, instruction(device, share=1))
    assert not any(gradient.any() for gradient in found.values())


def test_shifted_labels_and_others(device):
    made = instruction(device)
    shifted = torch.nn.functional.pad(made["labels"], (0, 1), value=-100)[:, 1:]
    model = patched(build(device=device).train())
    expected = step(model, made)
    labels = made.pop("labels")
    found = step(model, made | {"shift_labels": shifted})
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    found = step(model, made | {"labels": labels.masked_fill(labels == -100, 3), "ignore_index": 3})
    assert op_rows(lambda: model(**made, labels=labels, return_predicted_tokens=True)) == [112]
    output = model(**made, labels=labels, return_predicted_tokens=True)
    assert output.predicted_tokens.shape == (256,) and (output.predicted_tokens >= 0).sum() == 104


@pytest.mark.cuda
def test_counting_does_not_wait():
    """count_rows does not synchronise; only the loss does."""
    target = random_targets(4096, 50, device="cuda")
    F.count_rows(target)
    torch.cuda.set_sync_debug_mode("error")
    try:
        counted = F.count_rows(target)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (target[counted.index()] != -100).sum() == (target != -100).sum()


@pytest.mark.cuda
def test_labels_that_are_still_on_their_way():
    """count_rows reads labels that the current stream writes after much other work."""
    a = torch.randn(4096, 4096, device="cuda")
    for seed in range(5):
        target = torch.full((4096,), -100, device="cuda")
        for _ in range(20):
            a = torch.tanh(a @ a)
        torch.manual_seed(seed)
        target.copy_(random_targets(4096, 50, device="cuda", seed=seed, ignored=0.5))
        counted = F.count_rows(target)
        kept = counted.index()
        assert (target[kept] != -100).sum() == (target != -100).sum() > 0
