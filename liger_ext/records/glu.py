"""The records of SwiGLU and GeGLU, each as an op of two tensors and as an op of one packed tensor, whose halves are
gate and up: formulas, baselines, magnitudes of intermediate values (the scales of rounding errors), and shapes to
time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors


def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    a = gate * gate_multiplier
    return a * torch.sigmoid(a) * up * down_multiplier


def torch_swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    h = F.silu(gate if gate_multiplier == 1 else gate * gate_multiplier) * up
    return h if down_multiplier == 1 else h * down_multiplier


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    if approximate == "tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + torch.tanh(inner)) * up
    return 0.5 * gate * torch.erfc(-gate / 2**0.5) * up


def torch_geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def swiglu_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    gate, up = inputs["gate"], inputs["up"]
    factor = abs(inputs.get("gate_multiplier", 1.0)), abs(inputs.get("down_multiplier", 1.0))
    scales = {"out": (gate * up).abs() * (factor[0] * factor[1])}
    if "out" in grads:
        dh = grads["out"].abs() * factor[1]
        scales["dgate"] = dh * up.abs() * factor[0] * (1 + gate.abs() * factor[0])
        scales["dup"] = dh * gate.abs() * factor[0]
    return scales


geglu_scales = swiglu_scales


def swiglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return swiglu(*gate_up.chunk(2, -1), **options)


def torch_swiglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return torch_swiglu(*gate_up.chunk(2, -1), **options)


def geglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return geglu(*gate_up.chunk(2, -1), **options)


def torch_geglu_packed(gate_up: Tensor, **options: Any) -> Tensor:
    return torch_geglu(*gate_up.chunk(2, -1), **options)


def swiglu_packed_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    gate, up = inputs["gate_up"].chunk(2, -1)
    scales = swiglu_scales({**inputs, "gate": gate, "up": up}, outputs, grads)
    if "dgate" in scales:
        scales["dgate_up"] = torch.cat((scales.pop("dgate"), scales.pop("dup")), -1)
    return scales


geglu_packed_scales = swiglu_packed_scales


# Sigmoid: exponential 4, sum 1, reciprocal 2; then the products and the two multipliers. The derivative has twice as
# many.
_SWIGLU = {"out": Roundings(12), "dgate": Roundings(24), "dup": Roundings(12), "dgate_up": Roundings(24)}
# Four more for the inner polynomial, eight where its derivative enters too.
_GEGLU = {"out": Roundings(16), "dgate": Roundings(32), "dup": Roundings(16), "dgate_up": Roundings(32)}


def _record(
    name: str, scales: Callable, roundings: Mapping[str, Roundings], *timed: Timed, kernels: str = ""
) -> Record:
    packed = bool(kernels)  # a packed op runs the kernels of the op of two tensors

    def inputs(make: InputFactory, size: Size) -> dict[str, Any]:
        if packed:
            return {"gate_up": make.leaf(size.rows, 2 * size.cols, scale=2)}
        return {name: make.leaf(size.rows, size.cols, scale=2) for name in ("gate", "up")}

    wanted = ("out", "dgate_up") if packed else ("out", "dgate", "dup")
    return Record(
        name=name,
        reference=globals()[name],
        baseline=globals()[f"torch_{name}"],
        scales=scales,
        roundings={what: roundings[what] for what in wanted},
        inputs=inputs,
        example=lambda tokens, hidden, vocab: Size(tokens, hidden),
        llama=Size(8192, 14_336),
        moved=matrices(3, 5),
        timed=timed,
        same_kernels_as=kernels,
    )


_SIZES, _SMALL = sizes((8192, 11008), (8192, 14336), (8192, 8192)), sizes((2048, 1536), (1024, 11008))
_EXACT = Timed(_SIZES[:1], _SMALL, {"approximate": "none"}, "exact", peers=False)

SWIGLU = _record("swiglu", swiglu_scales, _SWIGLU, Timed(_SIZES, _SMALL))
GEGLU = _record("geglu", geglu_scales, _GEGLU, Timed(_SIZES, _SMALL), _EXACT)
SWIGLU_PACKED = _record("swiglu_packed", swiglu_packed_scales, _SWIGLU, Timed(_SIZES[:1], _SMALL), kernels="swiglu")
GEGLU_PACKED = _record("geglu_packed", geglu_packed_scales, _GEGLU, kernels="geglu")
