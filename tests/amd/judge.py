"""Runs cases on an emulated device and keeps what they measured."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from amd.device import Device
from amd.shapes import DTYPES, Case, cases, wants_gradient
from liger_ext import functional
from liger_ext.testing import Measurement, compare


class Report:
    """``wrong``: a sentence for each case that failed; measurements by op and dtype, and by kernel."""

    def __init__(self, device: Device) -> None:
        self.device, self.wrong, self.cases = device, [], 0
        self._by_op: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._by_kernel: dict[str, list[float]] = defaultdict(list)

    def add(self, case: Case, measured: list[Measurement], launched: set[str]) -> None:
        self.cases += 1
        worst = max(measured, key=lambda m: m.ratio)
        if not worst.ratio <= 1:
            self.wrong.append(f"{case}, waves {self.device.order}: {worst}")
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


def run_case(device: Device, case: Case) -> list[Measurement]:
    inputs = case.inputs()
    placed = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value = device.place(value).requires_grad_(wants_gradient(case.op, name, value))
        placed[name] = value
    measured = compare(case.op, placed)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and not same_bits(value, placed[name].detach()):
            raise AssertionError(f"{name} was written")
    return measured


def run_cases(device: Device, report: Report, order: str, only: str, quick: bool) -> None:
    """``order`` "alternating": every other case has the last wave first."""
    for number, case in enumerate(cases(only, quick)):
        device.order = order if order != "alternating" else ("forward", "reverse")[number % 2]
        before = device.launched.copy()
        try:
            measured = run_case(device, case)
        except Exception as error:
            report.wrong.append(f"{case}, waves {device.order}: {type(error).__name__}: {error}")
            continue
        report.add(case, measured, set(device.launched - before))


def run_checks(device: Device, report: Report) -> None:
    """What the rule does not measure: the copy that benchmarks compare with, and targets out of range."""
    x = device.place(torch.randn(2100))
    for per_thread in (1, 2, 4, 8):
        if not same_bits(torch.ops.liger_ext.stream_copy(x, per_thread), x):
            report.wrong.append(f"stream_copy with {per_thread} vectors a thread differs")
    for dtype in DTYPES:
        logits, target = device.place(torch.randn(4, 33).to(dtype)), device.place(torch.tensor([1, 2, 99, -100]))
        loss = functional.cross_entropy(logits, target, reduction="none")
        if loss.isnan().tolist() != [False, False, True, False]:
            report.wrong.append(f"cross_entropy {dtype}: a target out of range gives {loss.tolist()}")
        try:
            functional.softmax(logits)
            report.wrong.append(f"cross_entropy {dtype}: a target out of range was not reported")
        except IndexError as error:
            if "target[2] is 99" not in str(error):
                report.wrong.append(f"cross_entropy {dtype}: {error}")
