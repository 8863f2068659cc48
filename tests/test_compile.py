"""Tests of torch.compile(fullgraph=True) with dynamic shapes: forward and backward equal eager mode, with one
compilation for many shapes."""

import pytest
import torch
from cases import differentiable_outputs, grads_for, normal, tensor_leaves
from ops import BY_NAME, DEFAULT_EXAMPLES
from torch._dynamo.testing import CompileCounterWithBackend

from liger_ext import functional as F


def resized(arguments, rows):
    """Returns the arguments with another number of rows (or positions)."""
    made = {}
    for key, value in arguments.items():
        if not isinstance(value, torch.Tensor) or key in ("weight", "bias"):
            made[key] = value
            continue
        dim = {"q": 2, "k": 2, "cos": 1, "sin": 1}.get(key, 0)
        index = torch.arange(rows, device=value.device) % value.shape[dim]
        made[key] = value.detach().index_select(dim, index).requires_grad_(value.requires_grad)
    return made


CASES = [*((e, (7, 12, 19)) for e in DEFAULT_EXAMPLES), (BY_NAME["fused_linear_cross_entropy_chunks"], (261, 300, 410))]


@pytest.mark.parametrize("example, sizes", CASES, ids=[e.name for e, _ in CASES])
def test_compiled_equals_eager(device, example, sizes):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda arguments: example(arguments), fullgraph=True, dynamic=True, backend=counter)
    frames = 0
    for rows in sizes:
        arguments = resized(example.arguments(device, torch.float32), rows)
        runs = []
        for function in (example, compiled):
            outputs = differentiable_outputs(function(arguments))
            runs.append([*outputs, *torch.autograd.grad(outputs, tensor_leaves(arguments), grads_for(outputs))])
        for eager, ours in zip(*runs, strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-6, atol=1e-6)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames  # no compilation after the first shape


def test_a_block_of_ops_in_one_graph(device):
    """Norm, MLP and fused loss compile together with aten ops; a second backward through the compiled graph returns the
    same gradients."""
    torch._dynamo.reset()
    shapes = {"x": (40, 32), "norm": (32,), "gate": (48, 32), "down": (32, 48), "head": (101, 32)}
    made = {
        k: (normal(*shape, device=device, seed=i) * 0.3).requires_grad_() for i, (k, shape) in enumerate(shapes.items())
    }
    target = torch.arange(40, device=device) % 101

    def block(x, norm, gate, down, head):
        h, residual = F.add_rms_norm(x.sin(), x, norm)
        h = residual + F.swiglu(h @ gate.T, h @ (gate * 2).T) @ down.T
        return F.fused_linear_cross_entropy(h, head, target, softcap=30.0)

    eager = block(**made)
    expected = torch.autograd.grad(eager, list(made.values()))
    loss = torch.compile(block, fullgraph=True)(**made)
    torch.testing.assert_close(loss, eager)
    for retain in (True, False):
        for ours, theirs in zip(
            torch.autograd.grad(loss, list(made.values()), retain_graph=retain), expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_stays_frozen_when_compiled(device):
    torch._dynamo.reset()
    x, weight = normal(20, 16, device=device).requires_grad_(), normal(30, 16, device=device)
    target = torch.arange(20, device=device)
    run = torch.compile(lambda x: F.fused_linear_cross_entropy(x, weight, target), fullgraph=True)
    (dx,) = torch.autograd.grad(run(x), x)
    (expected,) = torch.autograd.grad(F.fused_linear_cross_entropy(x, weight, target), x)
    torch.testing.assert_close(dx, expected)
