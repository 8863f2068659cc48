"""The record of the rotary position embedding: its formula, which is also the baseline, the magnitudes of intermediate
values (the scales of rounding errors), and the shapes to time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed
from liger_ext.records._sizes import Tensors, peak


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str, half_tables: bool) -> Tensor:
    r = cos.shape[-1] * (2 if half_tables else 1)
    interleaved = layout == "interleaved"  # the layout of the result and of the tables
    first, second = _pairs(x[..., :r], layout != "halves")
    (cos1, cos2), (sin1, sin2) = ((t, t) if half_tables else _pairs(t, interleaved) for t in (cos, sin))
    turned = first * cos1 - second * sin1, second * cos2 + first * sin2
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return rotated if r == x.shape[-1] else torch.cat((rotated, x[..., r:].to(rotated.dtype)), -1)


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    layout: str = "halves",
    half_tables: bool = False,
) -> tuple[Tensor, ...]:
    cos, sin = ((t.unsqueeze(0) if t.dim() == 2 else t).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return tuple(_rotate(x, cos, sin, layout, half_tables) for x in (q, k) if x is not None)


torch_rope = rope


def rope_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    table = max((t.abs().amax().item() for t in (inputs["cos"], inputs["sin"]) if t.numel()), default=1.0)
    named = {"out0": inputs["q"], "out1": inputs.get("k"), "dq": grads.get("out0"), "dk": grads.get("out1")}
    return {name: 2 * max(1.0, table) * peak(t) for name, t in named.items() if t is not None}


def _inputs(make: InputFactory, size: Size) -> dict[str, Any]:
    """Creates q and k with the strides of a projection's output: [batch, positions, heads, head_dim], transposed."""
    q_heads, k_heads, rotary = size.heads
    q, k = (
        make.leaf(size.batch, size.rows, heads, size.cols).detach().transpose(1, 2).requires_grad_()
        for heads in (q_heads, k_heads)
    )
    return {"q": q, "k": k, **make.rope_tables(size.rows, rotary)}


def _size(batch: int, seq: int, q: int, k: int, dim: int, rotary: int) -> Size:
    return Size(seq, dim, (q, k, rotary), batch=batch)


def _moved(size: Size, width: int) -> tuple[int, int]:
    return (2 * size.batch * size.rows * (size.heads[0] + size.heads[1]) * size.cols * width,) * 2


ROPE = Record(
    name="rope",
    reference=rope,
    baseline=torch_rope,
    scales=rope_scales,
    # The roundings of a sum, which is as large as the scale, and of its two products, which are half as large.
    roundings=dict.fromkeys(("out0", "out1", "dq", "dk"), Roundings(2)),
    inputs=_inputs,
    example=lambda tokens, hidden, vocab: Size(tokens // 2, 64, (8, 2, 64), batch=2),
    llama=Size(8192, 128, (32, 8, 128)),
    moved=_moved,
    timed=(
        Timed(
            (_size(4, 2048, 32, 8, 128, 128), _size(4, 2048, 32, 8, 64, 64), _size(4, 2048, 32, 8, 96, 96)),
            (_size(1, 2048, 9, 3, 64, 64), _size(1, 2048, 32, 8, 128, 128)),
        ),
        Timed((_size(4, 2048, 32, 8, 128, 64),), (), label="partial", peers=False),
        Timed((_size(4, 2048, 32, 8, 128, 128),), (), {"layout": "interleaved"}, "interleaved", peers=False),
    ),
    outputs=("out0", "out1"),
    constants=("cos", "sin"),
)
