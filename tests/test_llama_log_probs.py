"""Log-probabilities and entropies of patched models, and losses computed from them: values and all parameters'
gradients, compared with those computed from the logits of unpatched models."""

import copy
import functools
import types

import family_models
import pytest
import torch
from cases import RecordCalls, slow_if
from llama_models import (  # noqa: F401
    TRANSFORMERS,
    VOCAB,
    assert_as_good,
    build,
    checkpoint_layers,
    frozen,
    lora,
    make_batch,
    one_thread,
    patched,
    step,
)
from test_count_rows import op_rows
from test_zero3 import ZeRO3, zero3_linear
from torch import nn

from liger_ext import apply_liger_kernel_to_instance, compat
from liger_ext.ops._loss_plan import SMALLEST

OPTIONS = dict(return_log_probs=True, return_entropy=True)


def shifted(labels):
    return nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]


def from_logits(model, labels=None, shift_labels=None, num_items_in_batch=None, temperature=1.0, **batch):
    """Loss, log-probabilities and entropies of an unpatched model."""
    targets = shifted(labels) if shift_labels is None else shift_labels
    logits = model(**batch).logits
    log_p = ((logits if logits.dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)
    counts = targets != -100
    log_probs = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    log_probs, entropy = (torch.where(counts, t, 0) for t in (log_probs, -(log_p.exp() * log_p).sum(-1)))
    total = counts.sum() if num_items_in_batch is None else num_items_in_batch
    return -log_probs.sum() / total, log_probs, entropy


def requested_results(model, **batch):
    output = model(**batch, **OPTIONS)
    assert "logits" not in output
    assert output.log_probs.shape == batch.get("shift_labels", batch.get("labels")).shape
    return output.loss, output.log_probs, output.entropy


def objective(run, model, **batch):
    """Returns a scalar that depends on every result, with factors of both signs, and the results in the form of
    `step`."""
    loss, log_probs, entropy = run(model, **batch)
    factors = torch.linspace(-1, 1, log_probs.numel(), device=log_probs.device).view(log_probs.shape)
    total = 3 * loss + (factors * log_probs).sum() + (factors.flip(0) * entropy).sum() / 2
    return {"loss": total, "logits": torch.stack([log_probs, entropy, loss.expand_as(entropy)])}


def judge(stock, batch, model=None, run=requested_results, **options):
    """Compares results and gradients of `stock` and `model`, by default a patched copy of `stock`."""
    model = family_models.patched(stock) if model is None else model
    assert_all_as_good(stock, batch, model, run, from_logits, options)


def assert_all_as_good(stock, batch, model, run, by_logits, options=()):
    models = (model, run, batch | dict(options)), (stock, by_logits, batch)
    models += ((copy.deepcopy(stock).double(), from_logits, batch),)
    judged = [step(of, given, functools.partial(objective, how)) for of, how, given in models]
    for results in judged:
        del results["loss"]  # a sum of terms that cancel: its error is random
    assert_as_good(*judged)


BATCHES = {
    "ignored labels": {},
    "padding": dict(padding=True),
    "shift_labels": dict(is_shifted=True),
    "temperature": dict(temperature=0.7),
    "num_items_in_batch": dict(num_items_in_batch=7),
    "the last positions": dict(logits_to_keep=5),
}


def make_inputs(device, padding=False, is_shifted=False, logits_to_keep=0, **options):
    batch = make_batch(device)
    if padding:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 7:] = 0
        batch["labels"][1, 7:] = -100
    if is_shifted:
        batch["shift_labels"] = shifted(batch.pop("labels"))
    if logits_to_keep:
        batch |= dict(labels=batch["labels"][:, -logits_to_keep:], logits_to_keep=logits_to_keep)
    return batch | options


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("options", BATCHES.values(), ids=BATCHES)
def test_equals_the_logits(device, options, dtype, train):
    judge(build(device=device, dtype=dtype).train(train), make_inputs(device, **options))


@pytest.mark.parametrize("change", ["untied", "frozen head", "frozen model", "bias"])
def test_heads(device, change):
    stock = build(device=device, tie_word_embeddings=False).train()
    if change == "bias":
        stock.lm_head.bias = nn.Parameter(torch.linspace(-1, 2, VOCAB, device=device))
    elif change != "untied":
        frozen(stock, "lm_head" if change == "frozen head" else "model.")
    judge(stock, make_inputs(device))


@pytest.mark.parametrize("chunk", [False, True], ids=["at once", "in chunks"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_a_head_with_lora(device, train, chunk):
    stock = lora(build(device=device, tie_word_embeddings=False), target_modules=["lm_head", "q_proj"]).train(train)
    model = copy.deepcopy(stock)
    apply_liger_kernel_to_instance(model)
    batch, sizes = make_batch(device, rows=6, seq=50), []
    head = type(model.base_model.model.lm_head)
    forward = head.forward

    def counted(self, x):
        if self.out_features == VOCAB:
            sizes.append(x.shape[:-1].numel())
        return forward(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "forward", counted)
        judge(stock, batch | dict(temperature=0.8), model, memory=SMALLEST if chunk else "fast")
    # The head runs again in the backward, and then once for each of the two reference models.
    assert sizes == ([128, 128, 44, 44, 128, 128, 300, 300] if chunk else [300, 300, 300])


def test_hooks_on_the_head_run(device):
    stock = build(device=device).train()
    model, seen = patched(stock), []
    for of in (stock, model):
        of.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape) or output * 2)
    judge(stock, make_inputs(device), model)
    assert (3, 11, VOCAB) in seen


def test_with_logits(device):
    """`skip_logits=False` computes the results from the logits, and returns the logits, too."""
    stock = build(device=device).train()

    def run(model, **batch):
        output = model(**batch, **OPTIONS, skip_logits=False)
        torch.testing.assert_close(output.logits, stock(batch["input_ids"]).logits, rtol=1e-4, atol=1e-5)
        return output.loss, output.log_probs, output.entropy

    judge(stock, make_inputs(device, temperature=0.7), patched(stock), run)
    judge(stock.eval(), make_inputs(device), patched(stock), run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(device, use_reentrant):
    stock = build(device=device).train()
    model = patched(stock)
    checkpoint_layers(model, use_reentrant)
    judge(stock, make_inputs(device), model)


@pytest.mark.parametrize("temperatures", [(0.7,), slow_if(True, (1.0, 0.7, 0.6))], ids=str)
def test_compiled(device, temperatures):
    torch._dynamo.reset()
    stock = build(device=device, num_hidden_layers=1).train()
    compiled = torch.compile(lambda m, **b: requested_results(m, **b), backend="aot_eager", fullgraph=True)
    for temperature in temperatures:
        judge(stock, make_inputs(device, temperature=temperature), patched(stock), compiled)


def test_autocast(device):
    """fp32 weights and bf16 matmuls."""
    stock = build(device=device).train()

    def under(run, model, **batch):
        with torch.autocast(device.type, torch.bfloat16):
            return run(model, **batch)

    ours, theirs = (functools.partial(under, run) for run in (requested_results, from_logits))
    assert_all_as_good(stock, make_inputs(device), patched(stock), ours, theirs)


def test_logits_dtype(device):
    """It sets the dtype of the head's matmul, and is refused where the head's module computes the logits, and where no
    log-probabilities are requested."""
    model, batch = patched(build(device=device).train().to(torch.bfloat16)), make_inputs(device)
    narrow, wide = (model(**batch, return_log_probs=True, logits_dtype=of) for of in (None, torch.float32))
    with torch.no_grad():
        hidden = model.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"))[0]
        exact = (hidden.double() @ model.lm_head.weight.double().T).log_softmax(-1)
        targets = shifted(batch["labels"])
        exact = torch.where(targets == -100, 0, exact.gather(-1, targets.clamp(min=0)[..., None])[..., 0])
    errors = [(output.log_probs - exact).abs().max() for output in (narrow, wide)]
    assert errors[1] < 1e-5 and errors[0] > 20 * errors[1]
    with pytest.raises(ValueError, match=r"logits_dtype is torch.float32, but here the head itself"):
        model(**batch, return_log_probs=True, logits_dtype=torch.float32, skip_logits=False)
    with pytest.raises(ValueError, match=r"logits_dtype=torch.float32 is given without return_log_probs=True"):
        model(**batch, logits_dtype=torch.float32)
    with pytest.raises(TypeError, match="logits_dtype"):
        model(**batch, return_log_probs=True, logits_dtype="nonsense")


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_the_head_runs_once_on_rows_that_count(device, train):
    model = patched(build(device=device).train(train))
    batch = make_batch(device, 4, 64)
    batch["labels"][:, :40] = -100  # 96 of 256 targets remain; the last positions have none
    batch["labels"][:, -1] = -100
    assert op_rows(lambda: model(**batch, **OPTIONS)) == [96]
    with RecordCalls() as record:
        output = model(**batch, **OPTIONS)
        (output.loss + output.entropy.sum()).backward()
    assert record.names.count("fused_linear_cross_entropy") == 1 and "cross_entropy" not in record.names
    assert (output.log_probs != 0).sum() == (output.entropy != 0).sum() == 4 * 23
    assert not output.log_probs[:, :39].any() and not output.entropy[:, -2:].any()


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_zero_stage_3(monkeypatch, tied):
    """The backward, for the gradient of the entropy, gathers the head again instead of holding it until then."""
    monkeypatch.setattr(nn.functional, "linear", zero3_linear())
    stock = build(num_hidden_layers=1, tie_word_embeddings=tied).train()
    model, batch = patched(stock), make_inputs("cpu", use_cache=False)
    expected = step(stock, batch, functools.partial(objective, from_logits))
    zero = ZeRO3(model)
    zero.model = lambda **batch: types.SimpleNamespace(**objective(requested_results, model, **batch))
    for _ in range(2):
        found, *alive = zero.step(**batch)
        family_models.assert_same(found, expected)
        assert alive == [set(), set()]


def test_what_is_returned(device):
    """The output has the requested results, and in eval mode a cache of keys and values."""
    model, batch = patched(build(device=device).eval()), make_inputs(device)
    output = model(**batch, return_log_probs=True)
    cache = "cache" if TRANSFORMERS >= (5, 24) else "past_key_values"
    assert list(output) == ["loss", cache, "log_probs"] and output.entropy is None
    with pytest.raises(AttributeError, match=r"no logits: .*skip_logits=False"):
        output.logits  # noqa: B018
    with torch.no_grad():
        as_tuple = model(**batch, **OPTIONS, use_cache=False, return_dict=False)
    assert len(as_tuple) == 3 and not as_tuple[1].requires_grad
    torch.testing.assert_close(as_tuple[1], output.log_probs.detach(), rtol=0, atol=1e-5)  # a GPU runs another kernel
    assert list(model.train()(**batch, **OPTIONS)) == ["loss", "log_probs", "entropy"]
    nothing = model(**batch | {"labels": torch.full_like(batch["labels"], -100)}, **OPTIONS)
    assert nothing.loss == 0 and not nothing.log_probs.any() and not nothing.entropy.any()
    (nothing.loss + nothing.log_probs.sum()).backward()
    # False and None are the defaults.
    for value in (False, None):
        found = model.eval()(**batch, return_log_probs=value, return_entropy=value)
        assert list(found) == ["loss", "logits", cache]


@pytest.mark.parametrize("skip_logits", [None, False])
def test_accuracy(device, skip_logits):
    model, batch = patched(build(device=device).train()), make_inputs(device)
    likely = model(batch["input_ids"]).logits.argmax(-1)
    batch["labels"][1:, 1:7] = likely[1:, :6]  # the most likely token of 12 of 26 positions
    options = dict(return_token_accuracy=True, skip_logits=skip_logits)
    expected, found = model(**batch, **options), model(**batch, **options, return_log_probs=True)
    assert 0.4 < expected.token_accuracy < 0.6
    torch.testing.assert_close(found.token_accuracy, expected.token_accuracy)
    torch.testing.assert_close(found.loss, expected.loss)


def test_neutral_options_of_the_loss(device):
    model, batch = patched(build(device=device).train()), make_inputs(device)
    neutral = dict(label_smoothing=0.0, lse_square_scale=0.0, ce_weight=None, return_predicted_tokens=False)
    expected = model(**batch, return_log_probs=True)
    assert torch.equal(model(**batch, **neutral, return_log_probs=True).log_probs, expected.log_probs)


WRONG = [
    (dict(label_smoothing=0.1), ValueError, "label_smoothing.*leave out"),
    (dict(lse_square_scale=1e-4), ValueError, "lse_square_scale"),
    (dict(ce_weight=torch.ones(VOCAB)), ValueError, "ce_weight"),
    (dict(use_token_scaling=True, return_predicted_tokens=True), ValueError, "use_token_scaling, return_predicted"),
    (dict(accum_dtype=torch.float32), ValueError, "accum_dtype"),
    (dict(labels=None), ValueError, "pass labels or shift_labels"),
    (dict(return_log_probs=False), ValueError, "return_entropy=True is given without return_log_probs=True"),
    (dict(return_log_probs=1), TypeError, "return_log_probs is 1, expected True, False or None"),
    (dict(return_entropy="yes"), TypeError, "return_entropy is 'yes', expected True, False or None"),
    (dict(temperature=0), ValueError, "temperature is 0, expected a number from 1e-9 to 1e9"),
    (dict(temperature=torch.tensor(0.5)), ValueError, "expected a number from 1e-9"),
    (dict(logits_to_keep=3), ValueError, "labels for 33 positions, but 9 are kept"),
]


@pytest.mark.parametrize("skip_logits", [None, False])
@pytest.mark.parametrize("options, error, message", WRONG, ids=lambda value: str(value)[:40])
def test_errors(options, error, message, skip_logits):
    with pytest.raises(error, match=message):
        patched(build())(**make_inputs("cpu") | OPTIONS | options, skip_logits=skip_logits)


def test_a_loss_of_the_users_own(device):
    """A user's loss function receives the temperature as in an unpatched model; a request of log-probabilities raises
    an error."""
    model, given = patched(build(device=device).train()), {}
    model.loss_function = lambda logits, labels, **options: given.update(options) or logits.mean()
    model(**make_inputs(device), temperature=2.0)
    assert given["temperature"] == 2.0
    with pytest.raises(ValueError, match="loss_function is the user's own"):
        model(**make_inputs(device), return_log_probs=True)


def test_under_the_name_liger_kernel(device):
    """Reading logits returns None, and a warning names a replaced loss function."""
    with compat.install():
        from liger_kernel.transformers import apply_liger_kernel_to_llama, functional

        model, batch = build(device=device).train(), make_inputs(device)
        expected = from_logits(model, **batch)
        apply_liger_kernel_to_llama(model=model)
        found = model(**batch, **OPTIONS)
        assert found.logits is None
        torch.testing.assert_close(found.log_probs, expected[1], rtol=1e-4, atol=1e-5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(functional, "liger_fused_linear_cross_entropy", lambda *_, **__: None)
            with pytest.warns(UserWarning, match="is not called: return_log_probs=True"):
                model(**batch, **OPTIONS)


def test_generates_the_same(device):
    stock, ids = build(device=device).eval(), make_batch(device)["input_ids"]
    options = dict(max_new_tokens=5, do_sample=True, temperature=0.7, top_k=0)
    found = []
    for model in (stock, patched(stock)):
        torch.manual_seed(0)
        found.append(model.generate(ids, **options))
    assert torch.equal(*found)
