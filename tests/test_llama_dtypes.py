"""Patched Llamas with more than one dtype: under autocast, and with parts in fp32."""

import pytest
import torch
from llama_models import (  # noqa: F401
    FACTOR,
    build,
    compare,
    config,
    exact,
    make_batch,
    one_thread,
    patched,
    rounding,
    tokens,
)
from test_training import parameters
from transformers import LlamaForSequenceClassification


def under_autocast(model, **batch):
    """Runs the model under autocast, except for the float64 model of `compare`."""
    parameter = next(model.parameters())
    with torch.autocast(parameter.device.type, torch.bfloat16, enabled=parameter.dtype != torch.float64):
        return model(**batch)


def test_autocast(device):
    stock = build(device=device).train()
    model = compare(stock, make_batch(device), under_autocast)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    compare(stock.eval(), make_batch(device), under_autocast)  # compares the logits' dtype, too
    with torch.autocast(device.type, torch.bfloat16):
        assert model.eval()(tokens(1, 4, device=device)).logits.dtype == torch.bfloat16
        assert model.train()(**make_batch(device)).loss.dtype == torch.float32


def rms_norms(model):
    return [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]


def in_parts(model, parts):
    """Converts the model to bf16, and some parts to fp32."""
    model.to(torch.bfloat16)
    for part in parts:
        part.float()


@pytest.mark.parametrize("training", [True, False])
def test_a_head_in_fp32(device, training):
    """The last norm and the head in fp32: the norm returns its weight's dtype, as the head requires."""
    stock = build(device=device, tie_word_embeddings=False).train(training)
    in_parts(stock, [stock.model.norm, stock.lm_head])
    model = compare(stock, make_batch(device))
    assert model.eval()(tokens(1, 4, device=device)).logits.dtype == torch.float32
    generated = model.generate(tokens(1, 4, device=device), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 6)


def test_norms_in_fp32_under_autocast(device):
    """As peft.prepare_model_for_kbit_training leaves them: hidden states have the same dtypes as stock's."""
    stock = build(device=device).train()
    in_parts(stock, rms_norms(stock))
    model = patched(stock)
    with torch.autocast(device.type, torch.bfloat16):
        ours, theirs = (m(**make_batch(device), output_hidden_states=True) for m in (model, stock))
    assert [h.dtype for h in ours.hidden_states] == [h.dtype for h in theirs.hidden_states]

    compare(stock, make_batch(device), under_autocast)


def test_a_classifier_in_fp32(device):
    torch.manual_seed(0)
    stock = LlamaForSequenceClassification(config(num_labels=3, pad_token_id=0)).to(device).train()
    in_parts(stock, [stock.model.norm, stock.score])
    batch = dict(input_ids=tokens(3, 11, device=device), labels=torch.tensor([0, 1, 2], device=device))
    compare(stock, batch)


def test_fp16_with_a_scaled_loss(device):
    """GradScaler's first scales are too large and their steps are skipped; the test runs until three steps succeed."""
    stock = build(device=device).train()
    reference, ends = exact(stock), []
    start = parameters(stock)
    for model in (reference, patched(stock), stock):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**30)
        made = 0
        while made < 3:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.float16, enabled=model is not reference):
                loss = model(**make_batch(device)).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            made += scaler.get_scale() == before
        ends.append(parameters(model))
        assert (scaler.get_scale() < 2.0**30) is (model is not reference)
    expected, ours, theirs = ends
    bound = FACTOR * (theirs - expected).norm() + rounding(torch.float16) * (expected - start).norm()
    assert (ours - expected).norm() <= bound
