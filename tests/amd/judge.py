"""Runs cases on an emulated device and keeps what they measured."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from amd.device import Device, Emulation
from amd.shapes import DTYPES, Case, cases, wants_gradient
from liger_ext import functional
from liger_ext.testing import Measurement, compare


class Report:
    """``wrong``: a sentence for each case that failed; measurements by op and dtype, and by kernel."""

    def __init__(self, device: Device) -> None:
        self.device, self.wrong, self.cases = device, [], 0
        device.execute = self.emulation = Emulation(device)
        self._by_op: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._by_kernel: dict[str, list[float]] = defaultdict(list)

    def add(self, case: Case, measured: list[Measurement], launched: set[str]) -> None:
        self.cases += 1
        worst = max(measured, key=lambda m: m.ratio)
        if not worst.ratio <= 1:
            self.wrong.append(f"{case}, waves {self.emulation.order}: {worst}")
        self._by_op[case.op, str(case.dtype).removeprefix("torch.")].append(worst.ratio)
        for name in {kernel.partition("<")[0] for kernel in launched}:
            self._by_kernel[name].append(worst.ratio)

    def records(self) -> list[dict]:
        """One for each op and dtype, and one for each kernel."""
        ops = [({"op": op, "dtype": dtype}, ratios) for (op, dtype), ratios in sorted(self._by_op.items())]
        kernels = [({"kernel": kernel}, ratios) for kernel, ratios in sorted(self._by_kernel.items())]
        common = {"platform": self.device.arch}
        return [k | common | {"error_over_bound": max(ratios), "cases": len(ratios)} for k, ratios in (*ops, *kernels)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaNs included."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def placed_inputs(device: Device, op: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs on the device; a gradient is wanted of every parameter."""
    placed = {name: device.place(v) if isinstance(v, Tensor) else v for name, v in inputs.items()}
    for name, value in placed.items():
        if isinstance(value, Tensor):
            value.requires_grad_(wants_gradient(op, name, value))
    return placed


def run_case(device: Device, case: Case) -> list[Measurement]:
    inputs = case.inputs()
    placed = placed_inputs(device, case.op, inputs)
    measured = compare(case.op, placed)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and not same_bits(value, placed[name].detach()):
            raise AssertionError(f"{name} was written")
    return measured


def run_cases(device: Device, report: Report, order: str, only: str, quick: bool) -> None:
    """``order`` "alternating": every other case has the last wave first."""
    for number, case in enumerate(cases(only, quick)):
        report.emulation.order = order if order != "alternating" else ("forward", "reverse")[number % 2]
        before = device.launched.copy()
        try:
            measured = run_case(device, case)
        except Exception as error:
            report.wrong.append(f"{case}, waves {report.emulation.order}: {type(error).__name__}: {error}")
            continue
        report.add(case, measured, set(device.launched - before))


def run_checks(device: Device, report: Report) -> None:
    """What the rule does not measure."""
    for check in (check_stream_copy, check_bad_targets):
        try:
            check(device)
        except Exception as error:
            report.wrong.append(f"{check.__name__}, waves {report.emulation.order}: {type(error).__name__}: {error}")


def check_stream_copy(device: Device) -> None:
    """The copy that benchmarks compare with."""
    x = device.place(torch.randn(2100))
    for per_thread in (1, 2, 4, 8):
        assert same_bits(torch.ops.liger_ext.stream_copy(x, per_thread), x), f"{per_thread} vectors a thread"


def check_bad_targets(device: Device) -> None:
    """The row's loss is NaN, and the next call raises the error."""
    for dtype in DTYPES:
        logits, target = device.place(torch.randn(4, 33).to(dtype)), device.place(torch.tensor([1, 2, 99, -100]))
        loss = functional.cross_entropy(logits, target, reduction="none")
        try:
            functional.softmax(logits)
            raise AssertionError(f"{dtype}: no error")
        except IndexError as error:
            assert "target[2] is 99" in str(error), str(error)
        assert loss.isnan().tolist() == [False, False, True, False], f"{dtype}: {loss.tolist()}"
