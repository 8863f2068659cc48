"""The compact selection for compute-sanitizer: every kernel, forward and backward, at small odd and at
vector-aligned shapes, without compilation. ``compute-sanitizer --tool memcheck python -m pytest -m "sanitizer and
cuda"``, then ``--tool racecheck``."""

import pytest
import torch
from cases import EXAMPLES, IDS, gradients, normal, random_targets

from liger_ext import functional as F

pytestmark = pytest.mark.sanitizer


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small(device, example, dtype):
    assert all(g.isfinite().all() for g in gradients(example, example.arguments(device, dtype)))


@pytest.mark.parametrize("cols", [64, 1000, 5003, 33_000])
def test_rows(device, cols):
    """Paths that small rows do not take: several warps a row, and rows that are read again."""
    dtype = torch.bfloat16
    x, other = (normal(5, cols, dtype=dtype, device=device, seed=i).requires_grad_() for i in range(2))
    weight, bias = (normal(cols, dtype=dtype, device=device, seed=i).requires_grad_() for i in range(2, 4))
    y, total = F.add_rms_norm(x, other, weight)
    results = [
        F.rms_norm(x, weight),
        y,
        total,
        F.layer_norm(x, weight, bias),
        F.swiglu(x, other),
        F.geglu(x, other),
        F.softmax(x),
    ]
    results.append(
        F.cross_entropy(
            x, random_targets(5, cols, device=device), label_smoothing=0.1, softcap=20.0, lse_square_scale=1e-3
        )
    )
    found = torch.autograd.grad([t.float().sum() for t in results], (x, other, weight, bias))
    assert all(g.isfinite().all() for g in found)


@pytest.mark.parametrize("memory", [1, 1 << 30])
def test_fused_loss(device, memory):
    x, weight = normal(200, 24, device=device).requires_grad_(), normal(1003, 24, device=device).requires_grad_()
    loss = F.fused_linear_cross_entropy(x, weight, random_targets(200, 1003, device=device), memory=memory)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight)))
