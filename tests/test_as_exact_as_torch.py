"""Tests that fp32 results are as near to float64 as PyTorch's: the largest and the root-mean-square error are at most
1.5 times PyTorch's.

Unlike liger_ext.rule, the bound here has no rounding and no floor. The largest error of a gradient of 512 numbers
varies by chance, so up to three draws of a small case are judged together. tests/test_host_target.py tests the sums of
exponentials of the GPU kernels, with the host's exponential function.
"""

import ops
import pytest
import torch
from cases import normal, random_targets

from liger_ext.testing import OPS, _leaves, named_outputs

FACTOR = 1.5
ENOUGH, DRAWS = 1500, 3  # errors per result that suffice; draws at most


def rows(seed: int, *shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    return normal(*shape, seed=seed, scale=scale, mean=mean).requires_grad_()


def _cases():
    for tokens, hidden in ((256, 512), (4096, 1024), (8192, 256)):
        weight, bias = rows(2, hidden, scale=0.3, mean=1), rows(3, hidden)
        x, residual = rows(0, tokens, hidden), rows(1, tokens, hidden)
        size = f"{tokens}x{hidden}"
        yield f"rms_norm {size}", "rms_norm", {"x": x, "weight": weight}
        yield f"add_rms_norm {size}", "add_rms_norm", {"x": x, "residual": residual, "weight": weight}
        yield f"layer_norm {size}", "layer_norm", {"x": x, "weight": weight, "bias": bias}
    gate, up = rows(0, 2048, 512, scale=2), rows(1, 2048, 512)
    yield "swiglu", "swiglu", {"gate": gate, "up": up}
    yield "geglu", "geglu", {"gate": gate, "up": up}
    yield "geglu, exact", "geglu", {"gate": gate, "up": up, "approximate": "none"}
    angle = normal(1, 256, 64, seed=4, scale=6)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    yield "rope", "rope", {"q": rows(0, 2, 8, 256, 64), "k": rows(1, 2, 2, 256, 64), **tables}
    for vocab in (1000, 16_000):
        logits, target = rows(0, 512, vocab, scale=3), random_targets(512, vocab, ignored=0)
        yield f"softmax {vocab}", "softmax", {"x": logits}
        yield f"cross_entropy {vocab}", "cross_entropy", {"logits": logits, "target": target}
        smooth = {"label_smoothing": 0.1}
        yield f"cross_entropy {vocab}, smoothed", "cross_entropy", {"logits": logits, "target": target, **smooth}
    head = {"x": rows(0, 512, 128), "weight": rows(1, 4000, 128, scale=0.2), "target": random_targets(512, 4000)}
    for reduction in ("mean", "none"):
        yield f"fused loss, {reduction}", "fused_linear_cross_entropy", {**head, "reduction": reduction}
    yield from ops.exact_cases()


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


def placed(value, device):
    tensor = isinstance(value, torch.Tensor)
    return value.detach().to(device).requires_grad_(value.requires_grad) if tensor else value


def redrawn(inputs, draw):
    """Rolls the rows of each tensor by another number, so that products and sums combine other rows. Draw 0 changes
    nothing."""
    leaves = [name for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad and t.dim() > 1]
    steps = {name: draw * (2 * i + 1) for i, name in enumerate(leaves)}
    return inputs | {name: inputs[name].detach().roll(step, -2).requires_grad_() for name, step in steps.items()}


CASES = list(_cases())


@pytest.mark.parametrize("op, inputs", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_fp32(op, inputs, device):
    inputs = {name: placed(value, device) for name, value in inputs.items()}
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
