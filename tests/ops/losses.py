"""Calls of cross entropy, of logits and fused with the head."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from calls import COLUMNS, LEADING, Call, Draw
from cases import class_weights, example, laid_out, normal, random_targets
from torch import Tensor

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
    # memory=1: the smallest chunks, of 128 rows.
    example("fused_linear_cross_entropy", x=(9, 16), weight=(33, 16), constants=_targets(9, 33)),
    example(
        "fused_linear_cross_entropy",
        "chunks",
        x=(261, 4),
        weight=(11, 4),
        bias=(11,),
        constants=_targets(261, 11, memory=1),
    ),
    example(
        "fused_linear_cross_entropy",
        "none",
        x=(261, 4),
        weight=(11, 4),
        constants=_targets(261, 11, reduction="none", memory=1),
    ),
    example(
        "fused_linear_cross_entropy",
        "options",
        x=(9, 16),
        weight=(33, 16),
        bias=(33,),
        constants=_targets(9, 33, ce_weight=class_weights(33), **_ALL_OPTIONS, **_ALL_RESULTS),
    ),
]


def kernel_cases(dtype: torch.dtype) -> Iterator[tuple]:
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
            {"memory": 1 << 20, "reduction": "none", "lse_square_scale": 1e-4},
        ),
        ("pieces", True, (9, 8, 1051, True), chunks),
        ("pieces, all", True, (130, 8, 2500, True, True), options | results | chunks),
        ("pieces, tokens scaled", False, (5, 8, 2048), chunks | {"use_token_scaling": True, "lse_square_scale": 1e-2}),
        ("pieces per token", False, (130, 7, 1100, True), chunks | {"reduction": "none", "label_smoothing": 0.1}),
        ("pieces, odd vocabulary", False, (3, 8, 2051), chunks | {"ce_weight": class_weights(2051)("cpu", dtype)}),
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
    classes = draw.rng.choice(COLUMNS[1:])
    arguments = {
        "logits": draw.normal(*lead, classes, dtype=dtype, scale=3),
        "target": draw.targets(lead, classes, ignore_index),
        "weight": _class_weight(draw, classes, draw.dtype()),
        "ignore_index": ignore_index,
    }
    return Call("cross_entropy", arguments | _options(draw), ("weight",))


def fused_linear_cross_entropy(draw: Draw) -> Call:
    rng, dtype, ignore_index = draw.rng, draw.dtype(), draw.rng.choice([-100, 0, 2])
    # More than 128 rows are several chunks where memory=1.
    lead, memory = rng.choice([(rng.choice(LEADING), rng.choice(["auto", 1])), ((rng.choice([129, 261]),), 1)])
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


def _statistics(launch, call) -> None:
    from plan_model import check_rows, check_singles, reduction_bytes  # which takes its models from here

    check_rows(launch.plan, launch.rows)
    check_singles(launch.plan.threads_per_row, launch.instance[0], launch.cols)
    assert launch.plan.cluster == 1 and launch.plan.k == 0 and launch.plan.smem >= reduction_bytes(2)


def _merge(launch, call) -> None:
    from plan_model import one_each

    one_each(launch, call)


PLAN_MODELS = {"Statistics": _statistics, "Merge": _merge}
STREAMS = {"Statistics": {"load"}, "Merge": set()}
