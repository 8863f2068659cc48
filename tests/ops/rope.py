"""Calls of rotary position embedding for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from typing import Any

import torch
from calls import Call, Draw
from cases import example, normal
from kernel_cases import kernel_cases
from plan_model import ceil_div
from torch import Tensor

from liger_ext.records import InputFactory, Size


def tables(device: Any, dtype: torch.dtype, batch: int = 1, seq: int = 5, rotary: int = 8) -> dict[str, Tensor]:
    angle = normal(batch, seq, rotary, device=device, seed=9, scale=3)
    return {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}


EXAMPLES = [
    example("rope", q=(2, 3, 5, 8), k=(2, 1, 5, 8), constants=tables),
    example("rope", "partial", q=(2, 3, 5, 12), k=(2, 2, 5, 12), constants=lambda d, t: tables(d, t, batch=2)),
    example("rope", "interleaved", q=(2, 3, 5, 8), k=(2, 1, 5, 8), constants=tables, layout="interleaved"),
    example("rope", "of_one", q=(2, 3, 5, 8), k=None, constants=tables, layout="interleaved_to_halves"),
    example("rope", "half", q=(2, 3, 5, 20), k=(2, 1, 5, 20), constants=tables, layout="interleaved", half_tables=True),
]
LAYOUTS = ("halves", "interleaved", "interleaved_to_halves")


def _separate_tables(inputs: dict[str, Any]) -> None:
    batch, _, seq, _ = inputs["q"].shape
    rotary, dtype = inputs["cos"].shape[-1], inputs["cos"].dtype
    inputs |= InputFactory(dtype).rope_tables(seq, rotary, batch)


def _cases(batch: int, heads: tuple[int, int, int], seq: int, dim: int, *, projected=False, tables=False, **more: Any):
    """Returns a case. heads: of q and k, and the columns of the tables. projected: q and k have the strides of a
    projection's output. tables: they have another dtype."""
    more = {"layout": "" if projected else "contiguous", "other_dtype": ("cos", "sin") if tables else ()} | more
    return kernel_cases("rope", Size(seq, dim, heads, batch=batch), **more)


KERNEL_CASES = [
    *_cases(2, (8, 2, 64), 5, 64, projected=True, quick=True),
    *_cases(1, (32, 8, 128), 3, 128, tables=True, quick=True),
    *_cases(2, (4, 4, 32), 3, 64, note="tables of each sequence", change=_separate_tables),
    *_cases(2, (3, 1, 6), 7, 20, tables=True),
    *_cases(1, (5, 2, 64), 3, 64, layout="offset", quick=True),
    *_cases(1, (5, 2, 48), 3, 64, layout="offset", tables=True),
    *_cases(1, (90, 90, 256), 2, 256),
    *_cases(1, (3, 1, 16), 1, 16),
    *_cases(2, (3, 1, 16), 3, 64, options={"half_tables": True}),
    *_cases(2, (3, 0, 64), 3, 64, projected=True, options={"k": None}),
]
for _layout in LAYOUTS[1:]:
    for _half in (False, True):
        _options = {"layout": _layout, "half_tables": _half}
        KERNEL_CASES += _cases(2, (3, 1, 64 >> _half), 5, 128, options=_options, quick=_half)
        _all = {"projected": True, "tables": True, "options": _options, "quick": not _half}
        KERNEL_CASES += _cases(2, (3, 2, 64 >> _half), 3, 64, **_all)
        KERNEL_CASES += _cases(1, (3, 1, 12 >> _half), 3, 20, layout="offset", options=_options)


EXACT = _cases(2, (8, 2, 64), 256, 64)


def rope(draw: Draw) -> Call:
    rng, dtype, tables = draw.rng, draw.dtype(), draw.dtype()
    batch, seq = rng.choice([0, 1, 1, 2, 3]), rng.choice([0, 1, 2, 5, 9])
    dim = rng.choice([0, 2, 4, 6, 8, 16, 20, 32, 64])
    rotary = rng.choice([dim, dim, dim // 4 * 2, min(dim, 2), 0])
    unsqueeze_dim, made = rng.choice([1, 1, 2]), {}
    for name, most in (("q", 5), ("k", 3)):
        heads = rng.randint(0 if rng.randrange(10) < 1 else 1, most)
        inner = (heads, seq) if unsqueeze_dim == 1 else (seq, heads)
        made[name] = draw.normal(batch, *inner, dim, dtype=dtype)
    made["k"] = draw.maybe(made["k"], 8)
    lead, half = rng.choice([(), (1,), (batch,)]), rng.choice([False, False, True])
    angle = draw.normal(*lead, seq, rotary // 2 if half else rotary, dtype=torch.float32, scale=3)
    made |= {"cos": angle.cos().to(tables), "sin": angle.sin().to(tables)}
    options = {"unsqueeze_dim": unsqueeze_dim, "layout": rng.choice(LAYOUTS), "half_tables": half}
    return Call("rope", made | options, ("cos", "sin"))


DRAWS = {"rope": rope}
PROMISED = {
    "rope": lambda arguments: {
        f"out{i}": (tuple(arguments[n].shape), arguments[n].dtype)
        for i, n in enumerate(("q", "k"))
        if arguments[n] is not None
    }
}


_Q, _K = normal(2, 3, 5, 8), normal(2, 1, 5, 8)
_TABLES = {"cos": (1, 5, 8), "sin": (1, 5, 8)}
BAD = [
    ("rope", "q_dim", {"q": (3, 5, 8), "k": _K, **_TABLES}, ["q", "(3, 5, 8)"]),
    ("rope", "k_seq", {"q": _Q, "k": (2, 1, 4, 8), **_TABLES}, ["k", "(2, 1, 4, 8)"]),
    ("rope", "k_dtype", {"q": _Q, "k": _K.bfloat16(), **_TABLES}, ["k", "torch.bfloat16"]),
    ("rope", "table_seq", {"q": _Q, "k": _K, "cos": (1, 6, 8), "sin": (1, 6, 8)}, ["cos", "(1, 6, 8)"]),
    ("rope", "table_batch", {"q": _Q, "k": _K, "cos": (3, 5, 8), "sin": (3, 5, 8)}, ["cos", "(3, 5, 8)"]),
    ("rope", "rotary_odd", {"q": _Q, "k": _K, "cos": (1, 5, 7), "sin": (1, 5, 7)}, ["cos", "7", "even"]),
    ("rope", "rotary_wide", {"q": _Q, "k": _K, "cos": (1, 5, 10), "sin": (1, 5, 10)}, ["cos", "10", "8"]),
    ("rope", "cos_sin", {"q": _Q, "k": _K, "cos": (1, 5, 8), "sin": (1, 5, 6)}, ["sin", "6", "cos", "8"]),
    ("rope", "flat_sin", {"q": _Q, "k": _K, "cos": (5, 8), "sin": (5,)}, ["sin has shape (5)", "(1 or batch, 5, "]),
    ("rope", "short_sin", {"q": _Q, "k": _K, "cos": (5, 8), "sin": (2,)}, ["sin has shape (2)", "(1 or batch, 5, "]),
    ("rope", "sin_batch", {"q": _Q, "k": _K, "cos": (5, 8), "sin": (3, 5, 8)}, ["sin has shape (3, 5, 8)", "batch 2"]),
    ("rope", "narrow_sin", {"q": _Q, "k": _K, "cos": (5, 8), "sin": (1, 5, 6)}, ["sin", "6", "cos", "8"]),
    ("rope", "sin_dtype", {"q": _Q, "k": _K, "cos": (5, 8), "sin": _Q[0, 0].half()}, ["sin", "torch.float16"]),
    ("rope", "table_dtype", {"q": _Q, "k": _K, "cos": _Q[:1, 0].int(), "sin": _Q[:1, 0].int()}, ["cos", "torch.int32"]),
    ("rope", "no_heads", {"q": _Q[:, :0], "k": _K[:, :0], "cos": _Q[:1, 0].int(), "sin": _Q[:1, 0].int()}, ["cos"]),
    ("rope", "half_wide", {"q": _Q, "k": _K, **_TABLES, "half_tables": True}, ["cos", "8", "half of head_dim 8"]),
    ("rope", "half_seq", {"q": _Q, "k": None, "cos": (6, 4), "sin": (6, 4), "half_tables": True}, ["(1, 6, 4)"]),
    ("rope", "layout", {"q": _Q, "k": _K, **_TABLES, "layout": "pairs"}, ["layout", "'pairs'", "'interleaved'"]),
    ("rope", "unsqueeze", {"q": _Q, "k": _K, **_TABLES, "unsqueeze_dim": 3}, ["unsqueeze_dim", "3"]),
    ("rope", "unsqueeze_of", {"q": _Q, "k": _K, **_TABLES, "unsqueeze_dim": [1]}, [TypeError, "unsqueeze_dim", "[1]"]),
]  # fmt: skip


LARGE = {"rope": lambda rows, cols: Size(rows, cols, (1, 1, cols))}


# Which elements a launch processes ----------------------------------------------------------------------------------


def rope_heads(launch, call) -> None:
    vec, rotary = launch.instance[0], call.get("rotary_dim") or launch.cols
    plan = launch.plan
    assert launch.plan.grid * launch.plan.block <= 2**31 and launch.rows <= call["rows"]
    threads = launch.rows * plan.lanes * (plan.q_slots + plan.k_slots)
    assert (launch.plan.grid - 1) * launch.plan.block < threads <= launch.plan.grid * launch.plan.block
    for heads, slots in ((call["q_heads"], plan.q_slots), (call["k_heads"], plan.k_slots)):
        taken = sorted(h for first in range(slots) for h in (first, first + slots) if h < heads)
        assert taken == list(range(heads))
    half, rotating, passing = rotary // 2, rotary // 2 // vec, (launch.cols - rotary) // vec
    pairs, taken = ceil_div(passing, 2), []
    assert plan.lanes == max(1, rotating + pairs)
    for place in range(rotating + pairs):
        passed = place - rotating
        low = place * vec if place < rotating else 2 * half + passed * vec
        pair = half if place < rotating else pairs * vec if passed + pairs < passing else 0
        taken += [low, low + pair] if pair else [low]
    assert sorted(taken) == list(range(0, launch.cols, vec)), "head"


def rope_interleaved_heads(launch, call) -> None:
    assert call["interleaved"] and launch.instance[0] > 1
    rope_heads(launch, call)


PLAN_MODELS = {"RopeKernel": rope_heads, "RopeInterleavedKernel": rope_interleaved_heads}
