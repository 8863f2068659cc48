"""Rows of logits that a GPU's blocks keep in registers and shared memory, with values and options that the other tests'
rows do not have. The results are compared with PyTorch's float64 results for the stored logits. Each row is one token
with one hidden value, so its logits are exact."""

import pytest
import torch
import torch.nn.functional as F
from cases import normal

from liger_ext import functional

NAN, INF = float("nan"), float("inf")
# Longer than a block holds; not a multiple of the vector width; longer than the registers of even a cluster hold.
LENGTHS = [3_001, 40_003, 140_000]
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


def loss_and_gradient(logits, target, **options):
    """Results of the fused loss, whose weight is the row of logits."""
    x, weight = logits.new_ones(1, 1), logits.clone()[:, None].requires_grad_()
    target = torch.tensor([target], device=logits.device)
    out = functional.fused_linear_cross_entropy(
        x, weight, target, memory="fast", return_predicted_tokens=True, return_token_accuracy=True, **options
    )
    out.loss.backward()
    return out.loss.detach(), weight.grad[:, 0], int(out.predicted_tokens), float(out.token_accuracy)


def reference(logits, target, label_smoothing=0.0, softcap=None, use_token_scaling=False, lse_square_scale=0.0):
    x = logits.double().requires_grad_()
    capped = softcap * torch.tanh(x / softcap) if softcap else x
    loss = (
        F.cross_entropy(capped[None], torch.tensor([target], device=x.device), label_smoothing=label_smoothing)
        + lse_square_scale * torch.logsumexp(capped, 0).square()
    )
    if use_token_scaling:
        loss = loss * torch.softmax(capped, 0)[target].detach()
    loss.backward()
    return loss.detach(), x.grad, int(logits.argmax())


OPTIONS = [
    {},
    dict(label_smoothing=0.1),
    dict(softcap=3.0),
    dict(use_token_scaling=True),
    dict(label_smoothing=0.1, softcap=3.0, use_token_scaling=True, lse_square_scale=1e-3),
]


@dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("cols", LENGTHS)
def test_options(device, cols, options, dtype):
    """Logits on both sides of the softcap, logits shifted by 60, and the target in the first, a middle and the last
    vector."""
    for seed, target, shift in (
        (0, 1, 0.0),
        (1, cols // 2, 60.0 if "softcap" not in options else 0.0),
        (2, cols - 1, 0.0),
    ):
        logits = (3 * normal(cols, device=device, seed=seed) + shift).to(dtype)
        loss, gradient, predicted, accuracy = loss_and_gradient(logits, target, **options)
        wanted, of_wanted, best = reference(logits, target, **options)
        torch.testing.assert_close(loss.double(), wanted, rtol=3e-6, atol=1e-6)
        rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
        smallest = 1e-7 if dtype == torch.float16 else 1e-9
        torch.testing.assert_close(gradient.double(), of_wanted, rtol=rounding, atol=smallest)
        assert predicted == best and accuracy == (best == target)


@dtypes
@pytest.mark.parametrize("cols", LENGTHS)
def test_predictions_are_the_first_of_the_largest(device, cols, dtype):
    for places in ([cols - 1], [7, 8, cols - 2], [cols // 3, cols // 2], list(range(cols))):
        logits = torch.zeros(cols, dtype=dtype, device=device)
        logits[places] = 5.0
        assert loss_and_gradient(logits, 3)[2] == places[0]
        assert loss_and_gradient(logits, 3, softcap=0.5)[2] == places[0]


@dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "none")
@pytest.mark.parametrize("cols", LENGTHS[1:])
def test_values_that_are_no_numbers(device, cols, options, dtype):
    """The first NaN is the prediction, as in torch.argmax; a loss is finite, infinite or NaN where PyTorch's is."""
    far = cols - 5
    for values, target in (
        ({far: NAN}, 5),
        ({9: INF, far: NAN, far - 9: NAN}, 5),
        ({far: INF}, 5),
        ({far: -INF}, 5),
        ({5: -INF}, 5),
        ({5: INF}, 5),
    ):
        logits = normal(cols, device=device).to(dtype)
        for column, value in values.items():
            logits[column] = value
        loss, gradient, predicted, _ = loss_and_gradient(logits, target, **options)
        wanted, of_wanted, best = reference(logits, target, **options)
        assert predicted == best
        torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
        if wanted.isfinite():
            assert torch.equal(gradient.isnan(), of_wanted.isnan())
