"""The fused loss in chunks of rows and classes, with so little memory that not even the logits of 128 rows exist at a
time: the statistics of each chunk, their merge, and the gradients."""

import random

import pytest
import torch
from cases import device_dtypes, normal
from test_fused_linear_cross_entropy import head

from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.testing import judge


def test_chunks_of_the_vocabulary(device):
    """The loss processes classes chunk by chunk, with any options; among equal largest logits in two chunks, the
    prediction is the first."""
    rng = random.Random(0)
    for dtype in device_dtypes(device):
        for seed, vocab in enumerate((1025, 2048, 3001, 5000)):
            made = head(rows=130, hidden=8, vocab=vocab, dtype=dtype, device=device, bias=seed % 2 == 0)
            options = {
                "reduction": rng.choice(["mean", "sum", "none"]),
                "label_smoothing": rng.choice([0.0, 0.1]),
                "lse_square_scale": rng.choice([0.0, 1e-2]),
                "softcap": rng.choice([None, 5.0]),
                "use_token_scaling": rng.random() < 0.3,
                "ce_weight": None if seed % 2 else normal(vocab, device=device, seed=3).abs().to(dtype) + 0.1,
                "return_token_accuracy": True,
                "return_predicted_tokens": True,
            }
            judge("fused_linear_cross_entropy", {**made, **options, "memory": SMALLEST})
    x, weight = torch.ones(2, 4, device=device), torch.ones(4096, 4, device=device)
    weight[1500:1502] = weight[3000] = 2
    got = F.fused_linear_cross_entropy(
        x, weight, torch.tensor([1500, 3000], device=device), memory=SMALLEST, return_predicted_tokens=True
    )
    assert got.predicted_tokens.tolist() == [1500, 1500]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_chunks_of_values_that_are_no_numbers(device, value):
    """In a chunk without row 0's target: the result equals that of whole rows."""
    x, weight = torch.eye(4, device=device)[:3], normal(2100, 4, device=device)
    weight[1700, 0] = value
    inputs = {"x": x, "weight": weight, "target": torch.tensor([5, 6, -100], device=device), "reduction": "none"}
    results = []
    for memory in (SMALLEST, 1 << 30):
        made = inputs | {"x": x.clone().requires_grad_(), "weight": weight.clone().requires_grad_()}
        out = F.fused_linear_cross_entropy(**made, memory=memory, return_predicted_tokens=True)
        out.loss.nansum().backward()
        results.append((out.loss, out.predicted_tokens, made["x"].grad, made["weight"].grad))
    for chunks, whole in zip(*results, strict=True):
        torch.testing.assert_close(chunks, whole, equal_nan=True, rtol=1e-4, atol=1e-5)
