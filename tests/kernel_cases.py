"""Calls of every op, small, odd and large enough for every kernel to run at least once: on the host target
(host_kernels.py) and on an emulated device (tests/amd)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import class_weights, laid_out, normal, random_targets
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call of an op of ``liger_ext.testing.OPS``; ``inputs()`` makes its arguments, of which no gradient of
    ``frozen`` ones is wanted."""

    op: str
    name: str
    dtype: torch.dtype
    inputs: Callable[[], dict[str, Any]]
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op} {self.name} {str(self.dtype).removeprefix('torch.')}"


def _norms(dtype: torch.dtype) -> Iterator[tuple]:
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32

    def inputs(
        names: str, rows: int, cols: int, weights: torch.dtype | None = dtype, layout: str = "contiguous", **more
    ):
        made: dict[str, Any] = {}
        centered = more.pop("centered", False)
        for seed, name in enumerate(names.split()):
            made[name] = laid_out(normal(rows, cols, dtype=dtype, seed=seed, mean=3.0 if centered else 0.0), layout)
        for name in ("weight", "bias") if centered else ("weight",):
            made[name] = None if weights is None else normal(cols, dtype=weights, seed=9, scale=0.3, mean=1)
        return made | more

    rows_and_cols = [
        (5, 64),
        (37, 512),
        (3, 33),
        (7, 4096),
        (3, 8192),
        (13, 8192),
        (3, 16384),
        (2, 40000),
        (3, 5001),
        (70, 8),
        (200, 1),
    ]
    for rows, cols in [*rows_and_cols, (2, 70016), (13, 1003), (13, 301), (21, 1024), (7, 2048), (2, 20000)]:
        quick = (rows, cols) in ((37, 512), (3, 33))
        yield "rms_norm", f"{rows}x{cols}", quick, lambda r=rows, c=cols: inputs("x", r, c)
        yield "layer_norm", f"{rows}x{cols}", quick, lambda r=rows, c=cols: inputs("x", r, c, centered=True)
    for rows, cols in ((21, 1024), (3, 8192), (3, 1003), (2, 40000), (3, 5001), (3, 9000), (2, 20000), (2, 70016)):
        quick = cols in (1024, 1003)
        yield "add_rms_norm", f"{rows}x{cols}", quick, lambda r=rows, c=cols: inputs("x residual", r, c)
    gemma = {"offset": 1.0, "casting_mode": "gemma"}
    for rows, cols in ((9, 512), (9, 4096), (2, 20000), (5, 77)):
        yield "rms_norm", f"gemma {rows}x{cols}", False, lambda r=rows, c=cols: inputs("x", r, c, **gemma)
    mixed = ((9, 1200), (9, 1600), (2, 2400), (9, 77), (2, 6000), (2, 9000), (9, 9000), (2, 40000), (2, 70016))
    for rows, cols in mixed:
        for weights in (other, None):
            name = f"{rows}x{cols} weights {weights}"
            yield "rms_norm", name, False, lambda r=rows, c=cols, w=weights: inputs("x", r, c, w)
            yield "layer_norm", name, False, lambda r=rows, c=cols, w=weights: inputs("x", r, c, w, centered=True)
    yield "layer_norm", "no bias", False, lambda: inputs("x", 9, 1024, centered=True) | {"bias": None}
    for cols in (1024, 9000, 77):  # the backward makes dx alone, or sums alone
        for frozen in ("x", "weight", "bias"):
            name = f"9x{cols} frozen {frozen}"
            yield "layer_norm", name, False, lambda c=cols: inputs("x", 9, c, centered=True), frozen
            if frozen != "bias":
                yield "rms_norm", name, False, lambda c=cols: inputs("x", 9, c), frozen
    for cols in (1024, 5000):  # no sums at all
        name = f"9x{cols} frozen parameters"
        yield "layer_norm", name, False, lambda c=cols: inputs("x", 9, c, centered=True), "weight", "bias"
        yield "add_rms_norm", name, cols == 1024, lambda c=cols: inputs("x residual", 9, c), "weight"
        yield "rms_norm", f"gemma {name}", False, lambda c=cols: inputs("x", 9, c, **gemma), "weight"
    for layout in ("offset", "padded", "columns"):
        yield "rms_norm", layout, False, lambda how=layout: inputs("x", 4, 1032, layout=how)
        yield "layer_norm", layout, False, lambda how=layout: inputs("x", 4, 1032, layout=how, centered=True)
        yield "add_rms_norm", layout, False, lambda how=layout: inputs("x residual", 4, 1032, layout=how)
    if dtype != torch.float32:  # a residual stream in fp32
        for cols in (1024, 20000, 333):
            yield (
                "add_rms_norm",
                f"fp32 stream {cols}",
                False,
                lambda c=cols: inputs("x", 5, c) | {"residual": normal(5, c, seed=5)},
            )


def _row_ops(dtype: torch.dtype) -> Iterator[tuple]:
    def pair(rows: int, cols: int, layout: str = "contiguous", scale: float = 2.0, **more):
        tensors = [laid_out(normal(rows, cols, dtype=dtype, seed=s, scale=scale), layout) for s in (1, 2)]
        return dict(zip(("gate", "up"), tensors, strict=True)) | more

    for op, more in (("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "none"})):
        for rows, cols in ((3, 1024), (3, 33), (130, 16), (2, 5000)):
            yield op, f"{rows}x{cols} {more}", cols == 33, lambda r=rows, c=cols, m=more: pair(r, c, **m)
        yield op, f"offset {more}", False, lambda m=more: pair(3, 40, "offset", **m)
        packed = f"{op}_packed"
        for rows, cols in ((3, 400), (3, 34), (2, 5000)):
            yield (
                packed,
                f"{rows}x{cols} {more}",
                cols == 400,
                lambda r=rows, c=cols, m=more: {"gate_up": normal(r, c, dtype=dtype, scale=3), **m},
            )
    multipliers = {"gate_multiplier": 1.5, "down_multiplier": 0.25}
    yield "swiglu", "multipliers", False, lambda: pair(3, 200, scale=20.0, **multipliers)

    def softmax(rows: int, cols: int, layout: str = "contiguous", special: bool = False):
        x = normal(rows, cols, dtype=dtype, scale=3)
        if special:
            x[0, : cols // 2], x[1, cols // 2], x[2, : cols - 1] = -torch.inf, torch.nan, -torch.inf
        return {"x": laid_out(x, layout)}

    sizes = [
        (5, 64),
        (7, 1024),
        (3, 5001),
        (3, 8192),
        (2, 40000),
        (200, 1),
        (9, 16384),
        (9, 512),
        (9, 128),
        (9, 32),
        (9, 4096),
    ]
    for rows, cols in [*sizes, (13, 3), (2, 70016), (9, 2048), (3, 16384)]:
        yield "softmax", f"{rows}x{cols}", (rows, cols) in (sizes[0], sizes[1]), lambda r=rows, c=cols: softmax(r, c)
    for cols in (100, 5001, 40000):
        yield "softmax", f"special {cols}", False, lambda c=cols: softmax(5, c, special=True)
    yield "softmax", "offset", False, lambda: softmax(4, 1032, "offset")


def _rope(dtype: torch.dtype) -> Iterator[tuple]:
    def inputs(batch, heads, seq, dim, rotary, tables=dtype, shared=True, layout="contiguous", heads_inside=False):
        made: dict[str, Any] = {}
        for seed, (name, count) in enumerate(zip("qk", heads, strict=True)):
            if heads_inside:  # [batch, seq, heads, dim], as a projection gives them
                t = normal(batch, seq, count, dim, dtype=dtype, seed=seed).transpose(1, 2)
            else:
                t = laid_out(normal(batch, count, seq, dim, dtype=dtype, seed=seed), layout)
            made[name] = t
        angle = normal(1 if shared else batch, seq, rotary, seed=9, scale=3)
        return made | {"cos": angle.cos().to(tables), "sin": angle.sin().to(tables)}

    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    cases: list[tuple[str, bool, tuple, dict]] = [
        ("llama", True, (2, (8, 2), 5, 64, 64), {"heads_inside": True}),
        ("other tables", True, (1, (32, 8), 3, 128, 128, other), {}),
        ("partial", False, (2, (4, 4), 3, 64, 32), {"shared": False}),
        ("partial, other tables", False, (2, (3, 1), 7, 20, 6, other), {}),
        ("offset", True, (1, (5, 2), 3, 64, 64), {"layout": "offset"}),
        ("offset, other tables", False, (1, (5, 2), 3, 64, 48, other), {"layout": "offset"}),
        ("many heads", False, (1, (90, 90), 2, 256, 256), {}),
        ("one position", False, (1, (3, 1), 1, 16, 16), {}),
    ]
    for name, quick, positional, named in cases:
        yield "rope", name, quick, lambda p=positional, n=named: inputs(*p, **n)


def _losses(dtype: torch.dtype) -> Iterator[tuple]:
    options = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0}
    results = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    variants: list[tuple[str, dict]] = [
        ("plain", {}),
        ("z loss", {"lse_square_scale": 1e-2, "return_z_loss": True}),
        ("softcap", {"softcap": 20.0, "reduction": "sum"}),
        ("all", options | results),
        ("per token", results | {"reduction": "none", "label_smoothing": 0.1}),
    ]

    def logits(rows: int, vocab: int, layout: str = "contiguous", weighted: bool = False, masked: bool = False, **more):
        made = {"logits": laid_out(normal(rows, vocab, dtype=dtype, scale=3), layout)}
        if masked:  # classes that cannot be
            made["logits"][:, ::5] = -torch.inf
        made |= {"target": random_targets(rows, vocab, seed=4), **more}
        return made | ({"weight": class_weights(vocab)("cpu", dtype)} if weighted else {})

    for vocab in (1, 7, 100, 1003, 5000, 8192):
        for name, more in variants:
            weighted = name in ("all", "z loss")
            quick = (vocab, name) in ((100, "plain"), (1003, "all"), (5000, "plain"))
            yield (
                "cross_entropy",
                f"{vocab} {name}",
                quick,
                lambda v=vocab, w=weighted, m=more: logits(5, v, weighted=w, **m),
            )
    yield "cross_entropy", "32000", False, lambda: logits(2, 32000)
    yield "cross_entropy", "20x4500", False, lambda: logits(20, 4500)
    yield "cross_entropy", "offset", False, lambda: logits(4, 1000, "offset")
    reachable = {"target": torch.tensor([1, -100, 7, 1002])}
    yield "cross_entropy", "masked classes", False, lambda: logits(4, 1003, masked=True) | reachable
    yield "cross_entropy", "ignored", False, lambda: logits(4, 100) | {"target": torch.full((4,), -100)}

    def head(rows, hidden, vocab, bias=False, weighted=False, layout="contiguous", **more):
        made = {
            "x": normal(rows, hidden, dtype=dtype, seed=1),
            "weight": normal(vocab, hidden, dtype=dtype, seed=2, scale=0.3),
        }
        made |= {"target": random_targets(rows, vocab, seed=4), **more}
        if bias:
            made["bias"] = laid_out(normal(vocab, dtype=dtype, seed=3), layout)
        if weighted:
            made["ce_weight"] = laid_out(class_weights(vocab)("cpu", dtype), layout)
        return made

    chunks = {"memory": 1}  # of 128 rows
    fused: list[tuple[str, bool, tuple, dict]] = [
        ("one chunk", True, (9, 16, 1003), {}),
        ("one chunk, all", False, (9, 16, 1003, True, True), options | results),
        ("one odd chunk", False, (9, 8, 35, True), {}),
        ("held in registers", True, (9, 16, 1051), {}),
        (
            "held in registers, per token",
            False,
            (150, 8, 1051),
            chunks | {"reduction": "none", "lse_square_scale": 1e-4},
        ),
        (
            "held in registers, few ignored",
            False,
            (40, 8, 1051),
            {"target": torch.arange(40).masked_fill(torch.arange(40) == 7, -100)},
        ),
        ("ignored", False, (9, 16, 100), {"target": torch.full((9,), -100)}),
        ("chunks", True, (261, 8, 75, True), chunks),
        ("chunks, all", False, (261, 8, 75, True, True), options | results | chunks),
        ("chunks per token", False, (261, 8, 64, True), chunks | {"reduction": "none"}),
        ("chunks, sum, tokens scaled", False, (150, 8, 64), chunks | {"reduction": "sum", "use_token_scaling": True}),
        # As much of a row in shared memory as there is room for, the rest of it read again.
        ("large vocabulary", False, (3, 8, 20001, True), {"softcap": 10.0}),
        ("larger vocabulary", False, (2, 8, 84001), {"softcap": 10.0}),
        ("in the compute dtype", False, (261, 8, 75, True), chunks | {"accum_dtype": dtype}),
        ("odd hidden size", False, (140, 7, 33, True), chunks),
        ("odd hidden size per token", False, (140, 7, 33), {"reduction": "none"}),
        ("offset bias and class weights", False, (9, 16, 100, True, True), {"layout": "offset"}),
    ]
    for name, quick, positional, named in fused:
        yield "fused_linear_cross_entropy", name, quick, lambda p=positional, n=named: head(*p, **n)
    for frozen in ("x", "weight", "bias"):
        for name, options in (("one chunk", {}), ("chunks", chunks), ("per token", {"reduction": "none", **chunks})):
            made = functools.partial(head, 261, 8, 75, True, **options)
            yield "fused_linear_cross_entropy", f"{name} frozen {frozen}", False, made, frozen


def cases(only: str = "", quick: bool = False) -> Iterator[Case]:
    """All cases, or those in whose text ("rope partial float16") the expression ``only`` is found; ``quick``: a few of
    each op."""
    for dtype in DTYPES:
        for family in (_norms, _row_ops, _rope, _losses):
            for op, name, is_quick, inputs, *frozen in family(dtype):
                case = Case(op, name, dtype, inputs, tuple(frozen))
                if (is_quick or not quick) and re.search(only, str(case)):
                    yield case


def with_gradients(case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """A case's inputs, leaves of which a gradient is wanted of every parameter that is not frozen: class weights and
    rope's tables are no parameters."""
    constants = {"rope": ("cos", "sin"), "cross_entropy": ("weight",), "fused_linear_cross_entropy": ("ce_weight",)}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            wanted = name not in (*constants.get(case.op, ()), *case.frozen)
            value.requires_grad_(value.is_floating_point() and wanted)
    return inputs
