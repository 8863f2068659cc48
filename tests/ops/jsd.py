"""Calls of the generalised Jensen-Shannon divergence for the tests; tests/ops/__init__.py describes the tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from calls import COLUMNS, Call, Draw
from cases import Example, normal, random_targets
from kernel_cases import kernel_cases
from plan_model import check_rows, reduction_bytes
from torch import Tensor

import liger_ext
from ops.losses import check_singles, logit_tiles

BETAS = (0.5, 0.1, 0.9, 0.0, 1.0)


def log_probabilities(
    *shape: int, dtype: torch.dtype, seed: int, device: Any = "cpu", scale: float = 2.0, masked: int = 0
) -> Tensor:
    """Returns log-probabilities of logits with this scale. ``masked``: every n-th class has the probability 0, but
    never the first."""
    logits = normal(*shape, dtype=torch.float64, seed=seed, scale=scale)
    if masked:
        logits[..., 1::masked] = -torch.inf
    return torch.log_softmax(logits, -1).to(dtype).to(device)


def _example(name: str = "", labels: bool = False, **options: Any) -> Example:
    def arguments(device: Any, dtype: torch.dtype) -> dict[str, Any]:
        made = {
            "log_q": log_probabilities(7, 33, dtype=dtype, seed=0, device=device).requires_grad_(),
            "log_p": log_probabilities(7, 33, dtype=dtype, seed=1, device=device),
        }
        return made | ({"shift_labels": random_targets(7, 33, device=device, seed=4)} if labels else {}) | options

    return Example("jsd", arguments, f"jsd_{name}" if name else "jsd")


EXAMPLES = [
    _example(),
    _example("labels", labels=True, beta=0.1),
    _example("forward_kl", beta=0.0),
    _example("reverse_kl", beta=1.0),
]


def _masked(student: int, teacher: int) -> Callable:
    """Returns a change after which every n-th class of student or teacher has the probability 0, never the first."""

    def change(inputs: dict[str, Any]) -> None:
        for name, nth in (("log_q", student), ("log_p", teacher)):
            if nth:
                inputs[name][:, 1::nth] = -torch.inf
                inputs[name].copy_(torch.log_softmax(inputs[name].double(), -1))

    return change


_UNLABELLED = {"shift_labels": None}
KERNEL_CASES = [
    *kernel_cases("jsd", *((5, n) for n in (1, 7, 100, 1003, 5000)), quick=[(5, 1003)], options=_UNLABELLED),
    *kernel_cases("jsd", (2, 32_001), options=_UNLABELLED),
    *kernel_cases("jsd", (40, 300), (3, 1003)),
    *kernel_cases("jsd", (3, 1003), options={"beta": 0.1}, quick=True),
    *kernel_cases("jsd", (3, 1003), options={"beta": 0.0}),
    *kernel_cases("jsd", (3, 1003), options={"beta": 1.0}),
    *kernel_cases("jsd", (3, 100), note="masked by both", options=_UNLABELLED, change=_masked(3, 3)),
]
for _by, _change in (("student", _masked(3, 0)), ("teacher", _masked(0, 3))):
    _options = _UNLABELLED | {"beta": 0.9}
    KERNEL_CASES += kernel_cases("jsd", (3, 100), note=f"masked by the {_by}", options=_options, change=_change)
for _layout in ("offset", "padded"):
    KERNEL_CASES += kernel_cases("jsd", (3, 1000), layout=_layout, options=_UNLABELLED)
    KERNEL_CASES += kernel_cases("jsd", (3, 40), layout=_layout, moved=("log_p",))
EXACT = []
for _beta in BETAS:
    EXACT += kernel_cases("jsd", (512, 1000), (512, 16_000), options=_UNLABELLED | {"beta": _beta})


def jsd(draw: Draw) -> Call:
    (lead, _), dtype, ignore_index = draw.rows(), draw.dtype(), draw.rng.choice([-100, 0, 2])
    classes = draw.rng.choice(COLUMNS[1:])

    def log_probability() -> Tensor:
        return torch.log_softmax(draw.normal(*lead, classes, dtype=torch.float32, scale=2), -1).to(dtype)

    arguments = {
        "log_q": log_probability(),
        "log_p": log_probability(),
        "shift_labels": draw.maybe(draw.targets(lead, classes, ignore_index), 7),
        "beta": draw.rng.choice(BETAS),
        "ignore_index": ignore_index,
    }
    return Call("jsd", arguments, ("log_p",))


DRAWS = {"jsd": jsd}
PROMISED = {"jsd": lambda arguments: {"loss": ((), None)}}


_PAIR, _LABELS = {"log_q": (3, 8), "log_p": (3, 8)}, torch.tensor([1, 2, 3])
BAD = [
    ("jsd", "shapes", {"log_q": (3, 8), "log_p": (3, 7)}, ["log_p", "(3, 7)", "(3, 8)"]),
    ("jsd", "rows", {"log_q": (3, 8), "log_p": (2, 8)}, ["log_p", "(2, 8)", "(3, 8)"]),
    ("jsd", "dtypes", {**_PAIR, "log_p": normal(3, 8).bfloat16()}, ["log_p", "torch.bfloat16", "torch.float32"]),
    ("jsd", "integers", {"log_q": normal(3, 8).int(), "log_p": normal(3, 8).int()}, ["log_q", "torch.int32"]),
    ("jsd", "no_dimensions", {"log_q": (), "log_p": ()}, ["log_q", "vocab_size"]),
    ("jsd", "labels", {**_PAIR, "shift_labels": normal(3)}, ["shift_labels", "torch.float"]),
    ("jsd", "labels_int32", {**_PAIR, "shift_labels": _LABELS.int()}, ["shift_labels", "torch.int32"]),
    ("jsd", "labels_shape", {**_PAIR, "shift_labels": _LABELS[:2]}, ["shift_labels", "(2)", "(3, 8)"]),
    ("jsd", "beta", {**_PAIR, "beta": 1.5}, ["beta", "1.5", "[0, 1]"]),
    ("jsd", "negative_beta", {**_PAIR, "beta": -0.5}, ["beta", "-0.5"]),
    ("jsd", "beta_nan", {**_PAIR, "beta": float("nan")}, ["beta", "nan"]),
    ("jsd", "no_classes", {"log_q": (2, 3, 0), "log_p": (2, 3, 0)}, ["log_q", "(2, 3, 0)", "vocab_size"]),
    ("jsd", "no_student", {"log_q": None, "log_p": (3, 8)}, [TypeError, "log_q", "NoneType"]),
    ("jsd", "list", {"log_q": [1.0], "log_p": (3, 8)}, [TypeError, "log_q", "list"]),
    ("jsd", "ignore_dtype", {**_PAIR, "ignore_index": torch.half}, [TypeError, "ignore_index"]),
]  # fmt: skip


def _rows(launch, call) -> None:
    plan = launch.plan
    check_rows(plan, launch.rows)
    check_singles(plan.threads_per_row, launch.instance[0], launch.cols)
    assert plan.k == 0 and plan.smem >= reduction_bytes(1)


PLAN_MODELS = {"JsdForwardKernel": _rows, "JsdBackwardKernel": lambda launch, call: logit_tiles(launch, call, k=2)}
STREAMS = {"JsdForwardKernel": {"load"}, "JsdBackwardKernel": {"load", "store"}}

MODULES = [liger_ext.LigerJSD(0.25)]
