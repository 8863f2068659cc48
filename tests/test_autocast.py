"""Tests of the ops under autocast: row ops keep the dtypes of their inputs; the fused loss runs its matmuls in the
autocast dtype and returns fp32 gradients for fp32 weights."""

import pytest
import torch
from cases import RecordCalls, differentiable_outputs, gradients, normal, random_targets
from ops import DEFAULT_EXAMPLES

from liger_ext import functional as F
from liger_ext.ops._checks import REDUCTIONS
from liger_ext.ops._loss_arguments import LossArguments
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.testing import judge, named_outputs

FLCE = "fused_linear_cross_entropy"
ROW_OPS = [e for e in DEFAULT_EXAMPLES if e.op != FLCE]


@pytest.mark.parametrize("example", ROW_OPS, ids=[e.op for e in ROW_OPS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_ops_are_as_without(device, example, dtype):
    arguments = example.arguments(device, dtype)
    expected = [*named_outputs(example(arguments)).values(), *gradients(example, arguments)]
    with torch.autocast(device.type, torch.bfloat16):
        found = [*named_outputs(example(arguments)).values(), *gradients(example, arguments)]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("memory", [SMALLEST, 1 << 30])
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_fused_loss(device, memory, compute, x_dtype):
    """The error is as small as that of PyTorch's linear and loss under autocast; dweight has fp32 precision."""
    x = normal(300, 32, dtype=x_dtype, device=device).requires_grad_()
    weight = normal(50, 32, device=device, seed=1, scale=0.5).requires_grad_()
    target = random_targets(300, 50, device=device)

    def run(**kwargs):
        with torch.autocast(device.type, compute):
            return F.fused_linear_cross_entropy(**kwargs)

    judge_inputs = {"x": x, "weight": weight, "target": target, "memory": memory}
    judge(FLCE, judge_inputs, run=run, compute_dtype=compute, base_autocast=True)
    dx, dweight = torch.autograd.grad(run(**judge_inputs), (x, weight))
    assert dx.dtype == x_dtype and dweight.dtype == torch.float32
    assert not torch.equal(dweight, dweight.to(compute).float())


def test_fused_loss_computes_in_the_autocast_dtype(device):
    x, weight = normal(8, 16, device=device).requires_grad_(), normal(9, 16, device=device).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16), RecordCalls() as mode:
        loss = F.fused_linear_cross_entropy(x, weight, torch.arange(8, device=device))
    assert loss.dtype == torch.float32
    assert torch.bfloat16 in mode.calls[0][1]


def test_float64_is_left_alone():
    x, weight = normal(8, 16, dtype=torch.float64), normal(9, 16, dtype=torch.float64)
    target = torch.arange(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.fused_linear_cross_entropy(x, weight, target)
    assert torch.equal(loss, F.fused_linear_cross_entropy(x, weight, target))


def test_a_backward_under_autocast_is_the_same(device):
    """backward() inside the autocast region must not cast."""
    x, weight = normal(300, 16, device=device).requires_grad_(), normal(9, 16, device=device).requires_grad_()
    loss = F.fused_linear_cross_entropy(x, weight, torch.arange(300, device=device) % 9)
    expected = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    with torch.autocast(device.type, torch.bfloat16):
        found = torch.autograd.grad(loss, (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_losses_without_autocast_arguments(device):
    """The autocast rule of the registered op, without the public function, selects the dtype."""
    x, weight = normal(8, 16, device=device), normal(9, 16, device=device)
    target = torch.arange(8, device=device)

    def call():
        of = LossArguments(x, weight, target, reduction=REDUCTIONS["mean"], chunk_rows=8, chunk_classes=9)
        return torch.ops.liger_ext.fused_linear_cross_entropy(*of)[0]

    with torch.autocast(device.type, torch.bfloat16):
        public, own = F.fused_linear_cross_entropy(x, weight, target), call()
    assert torch.equal(public, own) and not torch.equal(own, call())
    assert not differentiable_outputs(own)
