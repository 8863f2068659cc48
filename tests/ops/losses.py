"""Calls of cross_entropy and fused_linear_cross_entropy for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from calls import COLUMNS, LEADING, Call, Draw
from cases import class_weights, example, laid_out, normal, random_targets
from plan_model import ceil_div, check_held, check_ranges, check_rows, check_singles, check_tiles, reduction_bytes
from torch import Tensor

import liger_ext
from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST

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


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple]:
    options = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 5.0}
    results = _ALL_RESULTS
    variants: list[tuple[str, dict]] = [
        ("plain", {}),
        ("z loss", {"lse_square_scale": 1e-2, "return_z_loss": True}),
        ("softcap", {"softcap": 20.0, "reduction": "sum"}),
        ("all", options | results),
        ("per token", results | {"reduction": "none", "label_smoothing": 0.1}),
    ]

    def logits(rows: int, vocab: int, layout: str = "contiguous", weighted: bool = False, masked: bool = False, **more):
        made = {"logits": laid_out(normal(rows, vocab, dtype=dtype, scale=3), layout)}
        if masked:  # impossible classes
            made["logits"][:, ::5] = -torch.inf
        made |= {"target": random_targets(rows, vocab, seed=4), **more}
        return made | ({"weight": class_weights(vocab)("cpu", dtype)} if weighted else {})

    for vocab in (1, 7, 100, 1003, 5000, 8192):
        for name, more in variants:
            weighted = name in ("all", "z loss")
            quick = (vocab, name) in ((100, "plain"), (1003, "all"), (5000, "plain"))
            made = functools.partial(logits, 5, vocab, weighted=weighted, **more)
            yield "cross_entropy", f"{vocab} {name}", quick, made
    yield "cross_entropy", "32000", False, lambda: logits(2, 32000)
    yield "cross_entropy", "20x4500", False, lambda: logits(20, 4500)
    yield "cross_entropy", "offset", False, lambda: logits(4, 1000, "offset")
    for rows, vocab, weighted in ((4, 1000, False), (9, 20001, False), (9, 20001, True)):
        more = {"weighted": weighted, **options, **results}
        made = functools.partial(logits, rows, vocab, "offset", **more)
        yield "cross_entropy", f"offset {vocab} all" + " weighted" * weighted, False, made
    # Rows at any alignment, with equal logits from their first columns on.
    equal = {"target": torch.arange(5), **results}
    yield "cross_entropy", "equal logits", True, lambda: equal | {"logits": torch.ones(5, 1003, dtype=dtype).triu(-1)}
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

    chunks = {"memory": SMALLEST}
    fused: list[tuple[str, bool, tuple, dict]] = [
        ("one chunk", True, (9, 16, 1003), {}),
        ("one chunk, all", False, (9, 16, 1003, True, True), options | results),
        ("one odd chunk", False, (9, 8, 35, True), {}),
        ("held in registers", True, (9, 16, 1051), {}),
        (
            "held in registers, per token",
            False,
            (150, 8, 1051),
            {"memory": 1 << 21, "reduction": "none", "lse_square_scale": 1e-4},
        ),
        # split: chunks of the vocabulary, too
        ("split", True, (9, 8, 1051, True), chunks),
        ("split, all", True, (130, 8, 2500, True, True), options | results | chunks),
        ("split, tokens scaled", False, (5, 8, 2048), chunks | {"use_token_scaling": True, "lse_square_scale": 1e-2}),
        ("split per token", False, (130, 7, 1100, True), chunks | {"reduction": "none", "label_smoothing": 0.1}),
        ("split, offset class weights", True, (9, 8, 1100, True, True), options | chunks | {"layout": "offset"}),
        ("split, odd vocabulary, options", False, (9, 8, 2051), options | chunks),
        ("split, odd vocabulary", False, (3, 8, 2051), chunks | {"ce_weight": class_weights(2051)("cpu", dtype)}),
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
        # Shared memory holds a part of a row; the kernel reads the other part twice.
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


def _fused_loss(a: Tensor, b: Tensor, _: None) -> Tensor:
    return F.fused_linear_cross_entropy(a, b[:3].contiguous(), torch.arange(len(a), device=a.device) % 3)


LARGE = {
    "cross_entropy": lambda a, b, _: F.cross_entropy(a, a.detach()[:, :8].argmin(-1), reduction="none"),
    "fused_linear_cross_entropy": _fused_loss,
}


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
    "InPlaceTokens": logit_row_held,
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
