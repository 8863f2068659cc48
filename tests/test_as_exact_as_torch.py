"""Tests that fp32 results are as near to float64 as PyTorch's: the largest and the root-mean-square error are at most
1.5 times PyTorch's.

Unlike liger_ext.rule, the bound here has no rounding and no floor. The largest error of a gradient of 512 numbers
varies by chance, so up to three draws of a small case are judged together. tests/test_host_target.py tests the sums of
exponentials of the GPU kernels, with the host's exponential function.
"""

import ops
import pytest
import torch
from cases import normal
from kernel_cases import with_gradients

from liger_ext.testing import OPS, _leaves, named_outputs

FACTOR = 1.5
ENOUGH, DRAWS = 1500, 3  # errors per result that suffice; draws at most


def results(function, inputs, dtype=None):
    """Returns outputs and gradients by name, without scalars such as a loss: one error proves little."""
    leaves = _leaves(inputs, dtype)
    outputs = dict(named_outputs(function(**leaves), "loss" if "target" in inputs else "out"))
    wanted = {k: v for k, v in leaves.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    grads = [
        normal(*t.shape, seed=7 + i).to(t) if t.dim() else torch.ones_like(t) for i, t in enumerate(outputs.values())
    ]
    found = torch.autograd.grad(list(outputs.values()), list(wanted.values()), grads)
    made = outputs | {f"d{name}": g for name, g in zip(wanted, found, strict=True)}
    return {name: t.detach().double() for name, t in made.items() if t.dim()}


def redrawn(inputs, draw):
    """Rolls the rows of each tensor by another number, so that products and sums combine other rows. Draw 0 changes
    nothing."""
    leaves = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad and t.dim() > 1]
    steps = {name: draw * (2 * i + 1) for i, name in enumerate(leaves)}
    return inputs | {name: inputs[name].detach().roll(step, -2).requires_grad_() for name, step in steps.items()}


@pytest.mark.parametrize("case", ops.EXACT, ids=str)
def test_fp32(case, device):
    op = case.op
    drawn = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.inputs().items()}
    inputs = with_gradients(case, drawn)
    ours, theirs = {}, {}  # errors of all draws by name
    for draw in range(DRAWS):
        if ours and min(sum(map(len, errors)) for errors in ours.values()) >= ENOUGH:
            break
        drawn = redrawn(inputs, draw)
        exact = results(OPS[op].reference, drawn, torch.float64)
        for errors, function in ((ours, OPS[op].run), (theirs, OPS[op].baseline)):
            for name, value in results(function, drawn).items():
                errors.setdefault(name, []).append((value - exact[name]).abs().flatten())
    for name in ours:
        error, limit = torch.cat(ours[name]), torch.cat(theirs[name])
        assert error.max() <= FACTOR * limit.max(), name
        assert error.square().mean().sqrt() <= FACTOR * limit.square().mean().sqrt(), name
