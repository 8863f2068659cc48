"""The command ``python -m liger_ext doctor --loss ROWS HIDDEN VOCAB``: prints, for a call of the fused loss with these
sizes, the plan, peak memory and estimated time at each level of memory. It also prints the plans from which ``memory``
as a number of bytes selects: all plans that no other plan beats in both memory and time."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from . import _C
from .ops._loss_arguments import FusedLossCall
from .ops._loss_devices import profile_index
from .ops._loss_plan import LEVELS, Choice, choose, device, front
from .tune import DTYPES

REDUCTIONS = ("mean", "sum", "none")  # a sum takes as much time and memory as a mean
_MOST = 10**9  # of rows, columns or classes


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    group = doctor.add_argument_group("the fused loss's memory and time, without a self-test")
    sizes = ("ROWS", "HIDDEN", "VOCAB")
    group.add_argument("--loss", type=int, nargs=3, metavar=sizes, help="tokens, hidden size and vocabulary size")
    group.add_argument("--dtype", choices=DTYPES, help="of x and weight (default: bf16)")
    group.add_argument("--reduction", choices=REDUCTIONS, help="default: mean")


def run(chosen: argparse.Namespace, profile: _C.DeviceProfile | None) -> int:
    """Runs the command and returns its exit status. ``profile``: a GPU's, None for the CPU.

    Raises:
        ValueError: a size outside 1 to 10^9.
    """
    for name, size in zip(("ROWS", "HIDDEN", "VOCAB"), chosen.loss, strict=True):
        if not 1 <= size <= _MOST:
            raise ValueError(f"argument --loss: {name} is {size}, expected 1 to {_MOST:,}")
    dtype, reduction = chosen.dtype or "bf16", chosen.reduction or "mean"
    call = FusedLossCall.uniform(*chosen.loss, DTYPES[dtype], profile_index(profile), reduction=reduction)
    found = {
        **dict(zip(("rows", "hidden", "vocab"), chosen.loss, strict=True)),
        "dtype": dtype,
        "reduction": reduction,
        "device": "CPU" if profile is None else profile.name,
        "rates_measured": device(call).rates.measured,
        "matmuls_ms": matmul_seconds(call) * 1e3,
        "levels": {level: _facts(call, choose(call, level)) for level in LEVELS},
        "front": [_facts(call, choice) for choice in front(call)],
    }
    print(json.dumps(found)) if chosen.json else _print(found)
    return 0


def matmul_seconds(call: FusedLossCall) -> float:
    """Estimates the time of the matmuls that every plan runs: of the logits, dx and dweight."""
    rows, hidden, vocab = call.rows, call.hidden, call.vocab
    matmuls = [(rows, vocab, hidden)]
    matmuls += [(rows, hidden, vocab)] * call.arguments.need_dx + [(vocab, hidden, rows)] * call.arguments.need_dweight
    size = call.compute.itemsize
    return sum(_C.matmul_seconds(device(call).rates, *sizes, size, size, False) for sizes in matmuls)


def describe(call: FusedLossCall, choice: Choice) -> str:
    """Describes a plan in words, for a call that computes all gradients."""
    strategy, rows, classes = _C.Gradients(choice.plan.gradients), choice.plan.rows, choice.plan.classes
    if strategy == _C.Gradients.deferred:
        return "all gradients of logits stored"
    if strategy == _C.Gradients.overlaid:
        room = _C.overlaid_room(call.hidden, call.arguments.weight.dtype, call.compute)
        inside = _C.overlaid_classes(call.rows, room, call.vocab)
        place = "in the memory that becomes dweight"
        if classes < call.vocab:
            where = f" {place}" if classes == inside else ""
            return f"{_percent(classes, call.vocab)} of the gradients of logits stored{where}, the rest recomputed"
        share = "" if inside == call.vocab else f", {_percent(inside, call.vocab)} of them"
        return f"all gradients of logits stored{share} {place}"
    text = f"chunks of {_C.equal_chunks(call.rows, rows):,} rows"
    if classes < call.vocab:
        text += f" and {classes:,} classes"
    text = f"sums over {text}" if strategy == _C.Gradients.accumulated else text
    return f"{text}; logits are computed twice" if choice.recomputes else text


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}".replace("%", " %")


def _facts(call: FusedLossCall, choice: Choice) -> dict[str, Any]:
    share = matmul_seconds(call) / choice.seconds
    return {"bytes": choice.bytes, "ms": choice.seconds * 1e3, "share": share, "plan": describe(call, choice)}


def _print(found: dict[str, Any]) -> None:
    sizes = f"{found['rows']:,} rows, hidden size {found['hidden']:,}, vocabulary {found['vocab']:,}"
    options = f"{found['dtype']}, reduction {found['reduction']!r}"
    print(f"Fused loss, forward and backward, on {found['device']}: {sizes}, {options}")
    print("MiB: beside the arguments, at most, gradients included; --json prints bytes.")
    matmuls = f"{found['matmuls_ms']:,.2f} ms"
    print(f"share: the time of the three matmuls that no plan saves, {matmuls}, over that of the plan\n")
    header = f"{'MiB':>10} {'ms':>11}{'share':>7}  plan"
    print(f"  {'':16}{header}")
    for level, facts in found["levels"].items():
        print(f"  {'memory=' + repr(level):16}{_line(facts)}")
    print("\nWhat a number of bytes buys: each plan that no other beats in memory and time")
    print(f"  {'':16}{header}")
    for facts in found["front"]:
        print(f"  {'':16}{_line(facts)}")
    rates = "come from a data sheet"
    if found["device"] == "CPU":
        rates = "are those of two server cores"
    elif found["rates_measured"]:
        rates = "were measured on a GPU of this kind"
    print(f"\nTimes are estimates; the device's rates {rates}.")


def _line(facts: dict[str, Any]) -> str:
    mib = math.ceil(facts["bytes"] / 2**20)  # rounded up, so that memory=<MiB> bytes suffices
    return f"{mib:>10,} {facts['ms']:>11,.2f}{facts['share']:>7.2f}  {facts['plan']}"
