"""Calls of SwiGLU and GeGLU for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases
from layouts import bits
from plan_model import row_tiles
from torch import Tensor

import liger_ext
from liger_ext import _C
from liger_ext.records import Size

EXAMPLES = [
    example("swiglu", gate=(3, 5, 33), up=(3, 5, 33)),
    example("swiglu", "multipliers", gate=(4, 40), up=(4, 40), gate_multiplier=0.7, down_multiplier=1.3),
    example("geglu", gate=(3, 5, 33), up=(3, 5, 33)),
    example("geglu", "exact", gate=(4, 40), up=(4, 40), approximate="none"),
    example("swiglu_packed", gate_up=(3, 5, 34)),
    example("geglu_packed", gate_up=(3, 34)),
]


KERNEL_CASES = [
    case
    for op, options in (("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "none"}))
    for case in (
        *kernel_cases(op, (3, 1024), (3, 33), (130, 16), (2, 5000), quick=[(3, 33)], options=options),
        *kernel_cases(op, (3, 40), layout="offset", options=options),
        *kernel_cases(f"{op}_packed", (3, 200), (3, 17), (2, 2500), quick=[(3, 200)], options=options),
    )
]
_multiplied = {"gate_multiplier": 1.5, "down_multiplier": 0.25}
KERNEL_CASES += kernel_cases("swiglu", (3, 200), options=_multiplied, change=lambda inputs: inputs["gate"].mul_(10))


EXACT = [
    *kernel_cases("swiglu geglu", (2048, 512)),
    *kernel_cases("geglu", (2048, 512), options={"approximate": "none"}),
]


# The backward that also computes h, which no public function calls --------------------------------------------------

ACTIVATIONS = {name: int(code) for name, code in _C.Activation.__members__.items()}


def check_h(dh: Tensor, gate: Tensor, up: Tensor, *options: float) -> None:
    """Checks ``glu_backward_with_h_``: it overwrites a contiguous ``dh`` with h, which has the forward's bits; dgate
    and dup have the bits of ``glu_backward``. ``options``: activation and multipliers."""
    ops = torch.ops.liger_ext
    expected = (*ops.glu_backward(dh, gate, up, *options), ops.glu(gate, up, *options))
    h = dh.contiguous()
    found = (*ops.glu_backward_with_h_(h, gate, up, *options), h)
    for name, a, b in zip(("dgate", "dup", "h"), found, expected, strict=True):
        same = (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(bits(a), bits(b))
        assert same, f"{name} of {gate.dtype} {tuple(gate.shape)}, {options}"


def h_cases(dtype: torch.dtype) -> Iterator[tuple]:
    """Yields arguments of :func:`check_h` that reach every kernel."""
    for activation in ACTIVATIONS.values():
        for rows, cols in ((3, 1024), (3, 33), (2, 5000)):
            tensors = (normal(rows, cols, dtype=dtype, seed=seed, scale=2) for seed in range(3))
            yield (*tensors, activation, 1.7, 0.3)


# Any call -----------------------------------------------------------------------------------------------------------


def _multipliers(draw: Draw) -> dict[str, float]:
    choices = [1.0, 1.0, 0.7, -1.3]
    return {"gate_multiplier": draw.rng.choice(choices), "down_multiplier": draw.rng.choice(choices)}


def _gate_and_up(draw: Draw) -> dict[str, Tensor]:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return {name: draw.normal(*lead, n, dtype=dtype) for name in ("gate", "up")}


def _gate_up(draw: Draw) -> dict[str, Tensor]:
    (lead, n), dtype = draw.rows(), draw.dtype()
    return {"gate_up": draw.normal(*lead, 2 * n, dtype=dtype)}


def swiglu(draw: Draw) -> Call:
    return Call("swiglu", _gate_and_up(draw) | _multipliers(draw))


def swiglu_packed(draw: Draw) -> Call:
    return Call("swiglu_packed", _gate_up(draw) | _multipliers(draw))


def geglu(draw: Draw) -> Call:
    return Call("geglu", _gate_and_up(draw) | {"approximate": draw.rng.choice(["tanh", "none"])})


def geglu_packed(draw: Draw) -> Call:
    return Call("geglu_packed", _gate_up(draw) | {"approximate": draw.rng.choice(["tanh", "none"])})


DRAWS = {"swiglu": swiglu, "swiglu_packed": swiglu_packed, "geglu": geglu, "geglu_packed": geglu_packed}


def _half(arguments: dict[str, Any]) -> dict[str, Any]:
    x = arguments["gate_up"]
    return {"out": ((*x.shape[:-1], x.shape[-1] // 2), x.dtype)}


PROMISED = {"swiglu_packed": _half, "geglu_packed": _half}


BAD = [
    ("swiglu", "shapes", {"gate": (3, 8), "up": (3, 7)}, ["up", "(3, 7)", "(3, 8)"]),
    ("swiglu", "dtypes", {"gate": (3, 8), "up": normal(3, 8, dtype=torch.bfloat16)}, ["up", "torch.bfloat16"]),
    ("geglu", "integers", {"gate": normal(3, 8).int(), "up": normal(3, 8).int()}, ["gate", "torch.int32"]),
    ("geglu", "approximate", {"gate": (3, 8), "up": (3, 8), "approximate": "erf"}, ["approximate", "erf", "tanh"]),
    ("geglu_packed", "approximate_list", {"gate_up": (3, 8), "approximate": [1]}, ["approximate", "[1]", "tanh"]),
    ("swiglu_packed", "odd", {"gate_up": (3, 7)}, ["gate_up", "7", "even"]),
    ("geglu_packed", "odd", {"gate_up": (3, 7)}, ["gate_up", "7", "even"]),
]  # fmt: skip

LARGE = dict.fromkeys(("swiglu_packed", "geglu_packed"), lambda rows, cols: Size(rows, cols // 2))


# Which elements a launch processes ----------------------------------------------------------------------------------


PLAN_MODELS = dict.fromkeys(("GluForwardKernel", "GluBackwardKernel"), lambda launch, call: row_tiles(launch, 2))

_CONFIG = SimpleNamespace(hidden_size=24, intermediate_size=40)
_SILU = SimpleNamespace(**vars(_CONFIG), hidden_act="silu", mlp_bias=True, num_experts=3, mlp_multipliers=(0.5, 2.0))
MODULES = [
    liger_ext.LigerSwiGLUMLP(_SILU),
    liger_ext.LigerBlockSparseTop2MLP(_SILU),
    liger_ext.LigerExperts(_SILU),
    liger_ext.LigerFalconH1SwiGLUMLP(_SILU),
    liger_ext.LigerHunyuanV1SwiGLUMLP(_SILU, layer_idx=1),
    liger_ext.LigerPhi3SwiGLUMLP(_SILU),
    liger_ext.LigerQwen3MoeSwiGLUMLP(_SILU, intermediate_size=16),
    liger_ext.LigerGEGLUMLPForGemma4(_CONFIG),
    liger_ext.LigerGEGLUMLP(SimpleNamespace(**vars(_CONFIG), hidden_act="gelu_new")),
]
