"""Other Llama models: classifiers, question answering and the bare model keep their heads and get patched layers."""

import pytest
import torch
from llama_models import assert_as_good, build, exact, one_thread, ops, patched, step, tokens  # noqa: F401
from transformers import (
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
)

from liger_ext import apply_liger_kernel_to_llama

HEADS = {
    "sequence": (LlamaForSequenceClassification, lambda d: dict(labels=torch.tensor([0, 2, 1], device=d))),
    "token": (LlamaForTokenClassification, lambda d: dict(labels=tokens(3, 8, device=d) % 3)),
    "question": (
        LlamaForQuestionAnswering,
        lambda d: dict(
            start_positions=torch.tensor([0, 2, 1], device=d), end_positions=torch.tensor([3, 2, 7], device=d)
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("how", ["instance", "built later"])
def test_heads(device, dtype, head, how):
    cls, labels = HEADS[head]
    options = dict(num_labels=3, classifier_dropout=0.0) if head != "question" else {}
    stock = build(cls, device=device, dtype=dtype, **options).train()
    if how == "instance":
        model = patched(stock)
    else:
        with apply_liger_kernel_to_llama():
            model = build(cls, device=device, dtype=dtype, **options).train()
    assert type(model) is cls
    batch = dict(input_ids=tokens(3, 8, device=device), **labels(device))
    assert_as_good(step(model, batch), step(stock, batch), step(exact(stock), batch))
    assert ops(model, **batch) == {"rms_norm", "add_rms_norm", "glu", "rope"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bare_model(device, dtype):
    def forward(model, **batch):
        hidden_states = model(**batch).last_hidden_state
        weight = torch.linspace(-1, 1, hidden_states.numel(), device=device).view_as(hidden_states)
        return {"loss": (hidden_states.double() * weight).sum(), "logits": hidden_states}

    stock = build(LlamaModel, device=device, dtype=dtype).train()
    model = patched(stock)
    batch = dict(input_ids=tokens(2, 7, device=device))
    assert_as_good(step(model, batch, forward), step(stock, batch, forward), step(exact(stock), batch, forward))
