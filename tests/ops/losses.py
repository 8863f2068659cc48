"""Calls of cross_entropy and fused_linear_cross_entropy for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from calls import COLUMNS, LEADING, Call, Draw
from cases import class_weights, example, normal, random_targets
from kernel_cases import kernel_cases, parameter
from plan_model import ceil_div, check_held, check_ranges, check_rows, check_singles, check_tiles, reduction_bytes
from torch import Tensor

import liger_ext
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.records import Size

_FUSED_LOSS = "fused_linear_cross_entropy"
_ALL_RESULTS = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
_ALL_OPTIONS = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0, "reduction": "sum"}


def _targets(rows: int, vocab: int, **options: Any) -> Callable:
    def constants(device: Any, dtype: torch.dtype) -> dict[str, Any]:
        made = {"target": random_targets(rows, vocab, device=device, seed=4)}
        return made | {k: (v(device, dtype) if callable(v) else v) for k, v in options.items()}

    return constants


EXAMPLES = [
    example("cross_entropy", logits=(7, 33), constants=_targets(7, 33)),
    example(
        "cross_entropy",
        "options",
        logits=(7, 33),
        constants=_targets(7, 33, weight=class_weights(33), **_ALL_OPTIONS, **_ALL_RESULTS),
    ),
    example("cross_entropy", "none", logits=(7, 33), constants=_targets(7, 33, reduction="none")),
    example(_FUSED_LOSS, x=(9, 16), weight=(33, 16), constants=_targets(9, 33)),
    example(
        _FUSED_LOSS, "chunks", x=(261, 4), weight=(11, 4), bias=(11,), constants=_targets(261, 11, memory=SMALLEST)
    ),
    example(
        _FUSED_LOSS, "none", x=(261, 4), weight=(11, 4), constants=_targets(261, 11, reduction="none", memory=SMALLEST)
    ),
    example(
        _FUSED_LOSS,
        "options",
        x=(9, 16),
        weight=(33, 16),
        bias=(33,),
        constants=_targets(9, 33, ce_weight=class_weights(33), **_ALL_OPTIONS, **_ALL_RESULTS),
    ),
]


def _without_classes(inputs: dict[str, Any]) -> None:
    inputs["logits"][:, ::5] = -torch.inf
    inputs["target"].copy_(torch.tensor([1, -100, 7, 1002]))


def _equal_logits(inputs: dict[str, Any]) -> None:
    inputs["logits"].fill_(1.0).triu_(-1)
    inputs["target"].copy_(torch.arange(5))


def _ignored(inputs: dict[str, Any]) -> None:
    inputs["target"].fill_(-100)


def _one_ignored(inputs: dict[str, Any]) -> None:
    inputs["target"].copy_(torch.arange(40).masked_fill(torch.arange(40) == 7, -100))


_COSTLY = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0}
_EVERY = _COSTLY | _ALL_RESULTS
KERNEL_CASES = [
    *kernel_cases("cross_entropy", (2, 32000), (20, 4500)),
    *kernel_cases("cross_entropy", (4, 1000), layout="offset"),
    *kernel_cases("cross_entropy", (4, 1000), (9, 20001), layout="offset", options=_EVERY, note="all"),
    *kernel_cases(
        "cross_entropy", (9, 20001), layout="offset", options=_EVERY | {"weight": class_weights(20001)}, note="weighted"
    ),
    # Rows at any alignment, with equal logits from their first columns on.
    *kernel_cases("cross_entropy", (5, 1003), options=_ALL_RESULTS, change=_equal_logits, note="equal", quick=True),
    *kernel_cases("cross_entropy", (4, 1003), change=_without_classes, note="without classes"),
    *kernel_cases("cross_entropy", (4, 100), change=_ignored, note="ignored"),
]
for _vocab in (1, 7, 100, 1003, 5000, 8192):
    _weight = {"weight": class_weights(_vocab)}
    for _note, _given in (
        ("plain", {}),
        ("z loss", {"lse_square_scale": 1e-2, "return_z_loss": True, **_weight}),
        ("softcap", {"softcap": 20.0, "reduction": "sum"}),
        ("all", _EVERY | _weight),
        ("per token", _ALL_RESULTS | {"reduction": "none", "label_smoothing": 0.1}),
    ):
        _quick = (_vocab, _note) in ((100, "plain"), (1003, "all"), (5000, "plain"))
        KERNEL_CASES += kernel_cases("cross_entropy", (5, _vocab), options=_given, note=_note, quick=_quick)


def _fused(note: str, rows: int, hidden: int, vocab: int, *vectors: str, **more: Any) -> None:
    """Adds a case. vectors: bias and ce_weight, or one of them. quick, frozen, change, layout: as in ``Case``; other
    arguments are options."""
    fields = {name: more.pop(name) for name in ("quick", "frozen", "change", "layout") if name in more}
    draws = {"bias": parameter(vocab), "ce_weight": class_weights(vocab)}
    options = {name: draws[name] for name in vectors} | more
    moved = vectors if "layout" in fields else ()
    size = Size(rows, vocab, hidden=hidden)
    KERNEL_CASES.extend(kernel_cases(_FUSED_LOSS, size, note=note, options=options, moved=moved, **fields))


_CHUNKS, _BOTH = {"memory": SMALLEST}, ("bias", "ce_weight")
_fused("one chunk", 9, 16, 1003, quick=True)
_fused("one chunk, all", 9, 16, 1003, *_BOTH, **_EVERY)
_fused("one odd chunk", 9, 8, 35, "bias")
_fused("held in registers", 9, 16, 1051, quick=True)
_fused("held in registers, per token", 150, 8, 1051, memory=1 << 21, reduction="none", lse_square_scale=1e-4)
_fused("held in registers, one ignored", 40, 8, 1051, change=_one_ignored)
# Split: chunks of the vocabulary, too.
_fused("split", 9, 8, 1051, "bias", **_CHUNKS, quick=True)
_fused("split, all", 130, 8, 2500, *_BOTH, **_EVERY, **_CHUNKS, quick=True)
_fused("split, tokens scaled", 5, 8, 2048, **_CHUNKS, use_token_scaling=True, lse_square_scale=1e-2)
_fused("split per token", 130, 7, 1100, "bias", **_CHUNKS, reduction="none", label_smoothing=0.1)
_fused("split", 9, 8, 1100, *_BOTH, **_COSTLY, **_CHUNKS, layout="offset", quick=True)
_fused("split, odd vocabulary, options", 9, 8, 2051, **_COSTLY, **_CHUNKS)
_fused("split, odd vocabulary", 3, 8, 2051, "ce_weight", **_CHUNKS)
_fused("ignored", 9, 16, 100, change=_ignored)
_fused("chunks", 261, 8, 75, "bias", **_CHUNKS, quick=True)
_fused("chunks, all", 261, 8, 75, *_BOTH, **_EVERY, **_CHUNKS)
_fused("chunks per token", 261, 8, 64, "bias", **_CHUNKS, reduction="none")
_fused("chunks, sum, tokens scaled", 150, 8, 64, **_CHUNKS, reduction="sum", use_token_scaling=True)
# Shared memory holds a part of a row; the kernel reads the other part twice.
_fused("large vocabulary", 3, 8, 20001, "bias", softcap=10.0)
_fused("larger vocabulary", 2, 8, 84001, softcap=10.0)
_fused("in the compute dtype", 261, 8, 75, "bias", **_CHUNKS, accum_dtype=lambda device, dtype: dtype)
_fused("odd hidden size", 140, 7, 33, "bias", **_CHUNKS)
_fused("odd hidden size per token", 140, 7, 33, reduction="none")
_fused("one chunk", 9, 16, 100, *_BOTH, layout="offset")
for _frozen in ("x", "weight", "bias"):
    _fused("one chunk", 261, 8, 75, "bias", frozen=(_frozen,))
    _fused("chunks", 261, 8, 75, "bias", **_CHUNKS, frozen=(_frozen,))
    _fused("per token", 261, 8, 75, "bias", **_CHUNKS, reduction="none", frozen=(_frozen,))


_SMOOTHED = {"label_smoothing": 0.1}
EXACT = [
    *kernel_cases("cross_entropy", (512, 1000), (512, 16_000)),
    *kernel_cases("cross_entropy", (512, 1000), (512, 16_000), options=_SMOOTHED),
    *kernel_cases(_FUSED_LOSS, Size(512, 4000, hidden=128)),
    *kernel_cases(_FUSED_LOSS, Size(512, 4000, hidden=128), options={"reduction": "none"}),
]


def _options(draw: Draw) -> dict[str, Any]:
    rng = draw.rng
    return {
        "reduction": rng.choice(["mean", "sum", "none"]),
        "label_smoothing": rng.choice([0.0, 0.0, 0.1, 1.0]),
        "lse_square_scale": rng.choice([0.0, 0.0, 1e-2]),
        "softcap": rng.choice([None, None, 5.0]),
        "return_z_loss": rng.randrange(10) < 3,
        "return_token_accuracy": rng.randrange(10) < 3,
        "return_predicted_tokens": rng.randrange(10) < 3,
    }


def _class_weight(draw: Draw, classes: int, dtype: torch.dtype) -> Tensor | None:
    made = torch.rand(classes, generator=draw._values) + 0.5
    return draw.maybe(made.to(draw.device, dtype), 3)


def cross_entropy(draw: Draw) -> Call:
    (lead, _), dtype, ignore_index = draw.rows(), draw.dtype(), draw.rng.choice([-100, 0, 2])
    classes = draw.rng.choice([n for n in COLUMNS[1:] if {*lead[1:]} != {n}])  # not two readings
    arguments = {
        "logits": draw.normal(*lead, classes, dtype=dtype, scale=3),
        "target": draw.targets(lead, classes, ignore_index),
        "weight": _class_weight(draw, classes, draw.dtype()),
        "ignore_index": ignore_index,
    }
    return Call("cross_entropy", arguments | _options(draw), ("weight",))


def fused_linear_cross_entropy(draw: Draw) -> Call:
    rng, dtype, ignore_index = draw.rng, draw.dtype(), draw.rng.choice([-100, 0, 2])
    several = (rng.choice([129, 261]),), SMALLEST  # rows for several chunks
    lead, memory = rng.choice([(rng.choice(LEADING), rng.choice(["auto", SMALLEST])), several])
    hidden, classes = rng.choice([0, 1, 3, 4, 8, 16, 33]), rng.choice([1, 2, 7, 16, 33, 64, 75, 1100])
    weight_dtype = draw.other_dtype(dtype)
    arguments = {
        "x": draw.normal(*lead, hidden, dtype=dtype),
        "weight": draw.normal(classes, hidden, dtype=weight_dtype, scale=0.3),
        "target": draw.targets(lead, classes, ignore_index),
        "bias": draw.maybe(draw.normal(classes, dtype=draw.other_dtype(dtype)), 4),
        "ce_weight": _class_weight(draw, classes, draw.dtype()),
        "ignore_index": ignore_index,
        "memory": memory,
        "use_token_scaling": rng.randrange(10) < 2,
        "accum_dtype": rng.choice([None, None, torch.promote_types(dtype, weight_dtype)]),
        "normalizer": rng.choice([None, None, 17.0, draw.normal(dtype=torch.float32).abs() + 1]),
    }
    arguments |= _options(draw)
    if arguments["reduction"] == "none":
        arguments["normalizer"] = None
    return Call("fused_linear_cross_entropy", arguments, ("ce_weight", "normalizer"))


DRAWS = {"cross_entropy": cross_entropy, "fused_linear_cross_entropy": fused_linear_cross_entropy}


def _results(arguments: dict[str, Any]) -> dict[str, Any]:
    each = tuple(arguments["target"].shape)
    loss = each if arguments["reduction"] == "none" else ()
    made = {"z_loss": (loss, None), "token_accuracy": (loss, torch.float32), "predicted_tokens": (each, torch.int64)}
    return {"loss": (loss, None)} | {name: told for name, told in made.items() if arguments[f"return_{name}"]}


PROMISED = dict.fromkeys(DRAWS, _results)


_TARGET = torch.tensor([1, 2, 3])
_BOTH_WAYS = {"logits": (2, 5, 5), "target": torch.zeros(2, 5, dtype=torch.int64)}
_LOSS = {"logits": (3, 8), "target": _TARGET}
_FUSED = {"x": (3, 8), "weight": (9, 8), "target": _TARGET}
_LEARNED = normal(1).requires_grad_()

BAD = [
    ("cross_entropy", "target_rows", {"logits": (4, 8), "target": _TARGET}, ["target", "(3", "(4"]),
    ("cross_entropy", "target_dtype", {**_LOSS, "target": _TARGET.int()}, ["target", "torch.int32", "torch.int64"]),
    ("cross_entropy", "probabilities", {"logits": (3, 8), "target": (3, 8)}, ["target", "(3, 8)"]),
    ("cross_entropy", "both_ways", _BOTH_WAYS, ["logits", "(2, 5, 5)", "last", "dimension 1"]),
    ("cross_entropy", "no_classes", {"logits": (3, 0), "target": _TARGET}, ["logits", "(3, 0)"]),
    ("cross_entropy", "none_of_many", {"logits": (1, 3, 0), "target": _TARGET[None]}, ["logits", "(1, 3, 0)"]),
    ("cross_entropy", "ignore_type", {**_LOSS, "ignore_index": torch.half}, [TypeError, "ignore_index", "torch.float"]),
    ("cross_entropy", "ignore_bool", {**_LOSS, "ignore_index": True}, [TypeError, "ignore_index", "True", "integer"]),
    ("cross_entropy", "reduction_list", {**_LOSS, "reduction": [1]}, ["reduction", "[1]", "mean"]),
    ("cross_entropy", "class_weight", {**_LOSS, "weight": (7,)}, ["weight", "(7)", "(8)"]),
    ("cross_entropy", "reduction", {**_LOSS, "reduction": "avg"}, ["reduction", "avg", "mean"]),
    ("cross_entropy", "smoothing", {**_LOSS, "label_smoothing": 1.5}, ["label_smoothing", "1.5"]),
    ("cross_entropy", "smoothing_negative", {**_LOSS, "label_smoothing": -0.5}, ["label_smoothing", "-0.5"]),
    ("cross_entropy", "softcap", {**_LOSS, "softcap": 0.0}, ["softcap", "0"]),
    ("cross_entropy", "logits_dtype", {"logits": normal(3, 8).int(), "target": _TARGET}, ["logits", "torch.int32"]),
    (_FUSED_LOSS, "hidden", {"x": (3, 8), "weight": (9, 7), "target": _TARGET}, ["weight", "(9, 7)", "8"]),
    (_FUSED_LOSS, "weight_dim", {"x": (3, 8), "weight": (8,), "target": _TARGET}, ["weight", "(8)"]),
    (_FUSED_LOSS, "bias", {**_FUSED, "bias": (8,)}, ["bias", "(8)", "(9)"]),
    (_FUSED_LOSS, "ce_weight", {**_FUSED, "ce_weight": (8,)}, ["ce_weight", "(8)", "(9)"]),
    (_FUSED_LOSS, "target_rows", {"x": (4, 8), "weight": (9, 8), "target": _TARGET}, ["target", "(3", "(4"]),
    (_FUSED_LOSS, "target_dtype", {**_FUSED, "target": _TARGET.int()}, ["target", "torch.int32"]),
    (_FUSED_LOSS, "memory", {**_FUSED, "memory": "tiny"}, ["memory", "tiny", "auto"]),
    (_FUSED_LOSS, "memory_zero", {**_FUSED, "memory": 0}, ["memory", "0"]),
    (_FUSED_LOSS, "accum", {**_FUSED, "accum_dtype": torch.float16}, ["accum_dtype", "torch.float16"]),
    (_FUSED_LOSS, "accum_number", {**_FUSED, "accum_dtype": -1}, [TypeError, "accum_dtype", "-1", "torch.dtype"]),
    (_FUSED_LOSS, "ignore_bool", {**_FUSED, "ignore_index": False}, [TypeError, "ignore_index", "False", "integer"]),
    (_FUSED_LOSS, "softcap", {**_FUSED, "softcap": -1.0}, ["softcap", "-1"]),
    (_FUSED_LOSS, "infinite_softcap", {**_FUSED, "softcap": float("inf")}, ["softcap", "inf"]),
    ("cross_entropy", "tiny_softcap", {**_LOSS, "softcap": 1e-300}, ["softcap", "1e-300"]),
    (_FUSED_LOSS, "normalizer_of_none", {**_FUSED, "normalizer": 3, "reduction": "none"}, ["normalizer", "3", "none"]),
    (_FUSED_LOSS, "normalizer_learned", {**_FUSED, "normalizer": _LEARNED}, ["normalizer", "gradient", "detach"]),
    (_FUSED_LOSS, "reduction", {**_FUSED, "reduction": "max"}, ["reduction", "max"]),
]  # fmt: skip


LARGE = {_FUSED_LOSS: lambda rows, cols: Size(rows, 3, hidden=cols)}


# Which elements a launch processes ----------------------------------------------------------------------------------


def logit_tiles(launch, call, k: int = 0) -> None:
    plan, vec = launch.plan, launch.instance[0]
    width = plan.threads_per_row * vec * (k or (2 if vec == 1 else 4))
    tiles, lines = ceil_div(launch.cols, width), plan.block // plan.threads_per_row
    assert plan.grid % tiles == 0
    assert (plan.grid // tiles - 1) * lines < launch.rows <= plan.grid // tiles * lines
    check_singles(plan.threads_per_row, vec, launch.cols)


def matrix_tiles(launch, call) -> None:
    logit_tiles(launch, call, k=4)


def logit_row_held(launch, call) -> None:
    plan, (vec, k) = launch.plan, launch.instance
    check_rows(plan, launch.rows)
    in_shared_memory = plan.slots * plan.block * vec * call["element_bytes"]
    assert plan.k == k and plan.smem >= reduction_bytes(2, plan.cluster) + in_shared_memory
    check_held(plan.threads_per_row, plan.k + plan.slots, vec, launch.cols // vec * vec)
    assert launch.cols % vec <= plan.threads_per_row


def logit_row(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    check_rows(plan, launch.rows)
    check_singles(plan.threads_per_row, vec, launch.cols)
    if launch.kernel == "InPlace":
        assert plan.smem >= reduction_bytes(2) + plan.slots * plan.block * vec * call["element_bytes"]
        assert 0 <= plan.slots <= ceil_div(ceil_div(launch.cols, vec), plan.threads_per_row)
    else:
        (threads,) = launch.instance[1:] or (0,)  # the number of threads of row and block as a compile-time constant
        assert threads == 0 or threads == plan.block == plan.threads_per_row == launch.max_threads
        assert plan.k == 0 and plan.smem >= reduction_bytes(2)


def block_sum(launch, call) -> None:
    assert launch.plan.grid == 1 and launch.plan.block // launch.plan.warp <= min(32, launch.plan.warp)
    assert launch.plan.smem >= 3 * 8 * 32


def one_each(launch, call) -> None:
    check_tiles(launch.plan.grid, launch.plan.block, launch.rows)


def partial_columns(launch, call) -> None:
    plan, vec = launch.plan, launch.instance[0]
    check_ranges(launch.rows, plan.partial_rows)
    assert plan.grid % plan.partial_rows == 0
    vectors = launch.cols // vec
    check_tiles(plan.grid // plan.partial_rows, plan.block, vectors + launch.cols - vectors * vec)


def scalar(launch, call) -> None:
    assert launch.plan.grid == 1 and launch.plan.block // launch.plan.warp <= min(32, launch.plan.warp)


PLAN_MODELS = {
    "CountTargets": block_sum,
    "Forward": logit_row,
    "Backward": logit_tiles,
    "InPlace": logit_row,
    "InPlaceHeld": logit_row_held,
    "InPlaceLogProbs": logit_row_held,
    "Statistics": logit_row,
    "Merge": one_each,
    "SumLosses": block_sum,
    "AddLosses": one_each,
    "Fill": matrix_tiles,
    "Scale": matrix_tiles,
    "PartialColumns": partial_columns,
    "Product": scalar,
}
STREAMS = {"Statistics": {"load"}, "Merge": set()}

_OPTIONS = {"ignore_index": 3, "label_smoothing": 0.1, "reduction": "sum", "softcap": 5.0, "return_z_loss": True}
MODULES = [
    liger_ext.LigerCrossEntropyLoss(normal(24, seed=3).abs(), **_OPTIONS),
    liger_ext.LigerFusedLinearCrossEntropyLoss(normal(24, seed=3).abs(), **_OPTIONS, use_token_scaling=True),
]
