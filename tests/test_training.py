"""Thirty training steps of a patched and an unpatched Llama, and an evaluation without logits (test_trainer.py uses
Hugging Face's Trainer)."""

import copy

import pytest
import torch
from llama_models import FACTOR, build, exact, one_thread, patched, rounding, tokens  # noqa: F401

STEPS = 30


def train(model, device):
    """Thirty steps on four batches in turn; returns the losses, and all parameters at the end."""
    # With Adam's default eps, 1e-8, a parameter with almost no gradient moves by the sign of a rounding error. With
    # this eps, the distance from a more precise run varies little between seeds (docs/measurements.md).
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        ids = tokens(4, 24, device=device, seed=step % 4)
        loss = model(input_ids=ids, labels=ids.where(ids % 7 != 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64), parameters(model)


def parameters(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_thirty_steps(device, dtype):
    """The bound is the unpatched run's distance from the same run in higher precision."""
    stock = build(device=device, dtype=dtype, initializer_range=0.05).train()
    reference = exact(stock) if dtype == torch.float32 else copy.deepcopy(stock).float()
    model = patched(stock)
    start = parameters(stock)
    exact_losses, exact_end = train(reference, device)
    losses, end = train(stock, device)
    our_losses, our_end = train(model, device)
    assert exact_losses[-4:].mean() < 0.75 * exact_losses[:4].mean(), "the reference run does not learn"

    # At each step, relative to the largest deviation of the unpatched run so far.
    bound = FACTOR * (losses - exact_losses).abs().cummax(0).values + rounding(dtype) * exact_losses
    assert ((our_losses - exact_losses).abs() <= bound).all()
    assert ((our_losses - losses).abs() <= bound).all()

    bound = FACTOR * (end - exact_end).norm() + rounding(dtype) * (exact_end - start).norm()
    assert (our_end - exact_end).norm() <= bound
    assert (our_end - end).norm() <= bound


def test_evaluation_without_logits(device):
    """Trainer makes this call in evaluation if it needs only the loss."""
    model = patched(build(device=device).eval())
    ids = tokens(2, 9, device=device)
    with torch.no_grad():
        output = model(input_ids=ids, labels=ids, skip_logits=True, num_items_in_batch=torch.tensor(16, device=device))
        expected = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(16, device=device))
    assert "logits" not in output and expected.logits is not None
    torch.testing.assert_close(output.loss, expected.loss)
