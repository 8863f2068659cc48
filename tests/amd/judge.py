"""Runs kernel cases on an emulated device and collects their errors against float64 for the report of
tests/amd/run.py."""

from __future__ import annotations

import itertools
from typing import Any

import dropout_mask
import four_bit
import test_linear_log_probs
import torch
from kernel_cases import DTYPES, Case, cases, with_gradients
from ops.glu import check_h, h_cases
from torch import Tensor

from amd.device import Device, Emulation
from liger_ext import functional, numerics
from liger_ext.ops._loss_plan import SMALLEST
from liger_ext.testing import Measurement, compare

NO_CASES = {"what": "", "share": 0.0, "results": 0, "cases": 0, "wrong": 0}


class Report:
    """The results of a run. ``wrong`` has a sentence for each failed case. For each op and dtype, and for each kernel,
    it counts the cases and the wrong ones, and stores the result that came closest to its bound (``bounds.py``)."""

    def __init__(self, device: Device) -> None:
        self.device, self.wrong, self.cases = device, [], 0
        device.execute = self.emulation = Emulation(device)
        self._ops: dict[tuple[str, str], dict] = {}
        self._kernels: dict[str, dict] = {}

    def add(self, case: Case, launched: set[str], measured: list[Measurement], raised: Exception | None = None) -> None:
        self.cases += 1
        problem = f"{type(raised).__name__}: {raised}" if raised else None
        if measured and not (worst := max(measured, key=lambda m: m.ratio)).ratio <= 1:
            problem = str(worst)
        if problem:
            self.wrong.append(f"{case}, waves {self.emulation.order}: {problem}")
        lines = [self._line(case, case.dtype)]
        for result in measured:
            # 16-bit gradients of parameters count for their own dtype: in the line of fp32 they would hide its
            # exactness.
            narrow = result.dtype.itemsize < case.dtype.itemsize
            numerics.keep_closest(self._line(case, result.dtype) if narrow else lines[0], [result])
        for name in {kernel.partition("<")[0] for kernel in launched}:
            lines.append(self._kernels.setdefault(name, {"platform": self.device.arch, "kernel": name, **NO_CASES}))
            numerics.keep_closest(lines[-1], measured)
        for line in lines:
            line["cases"] += 1
            line["wrong"] += bool(problem)

    def _line(self, case: Case, dtype: torch.dtype) -> dict:
        line = numerics.ensure_line(self._ops, self.device.arch, case.op, dtype)
        for key, nothing in NO_CASES.items():
            line.setdefault(key, nothing)
        return line

    def records(self) -> list[dict]:
        """Returns one record for each op and dtype, in the format of ``liger_ext.numerics``, and one for each
        kernel."""
        return [*self._ops.values(), *(self._kernels[name] for name in sorted(self._kernels))]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Returns whether shape, dtype and bits are equal, NaNs included."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def placed_inputs(device: Device, case: Case, inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies a case's inputs to the device; they require gradients as in ``with_gradients``."""
    return with_gradients(case, {name: device.place(v) if isinstance(v, Tensor) else v for name, v in inputs.items()})


def run_case(device: Device, case: Case) -> list[Measurement]:
    inputs = case.inputs()
    placed = placed_inputs(device, case, inputs)
    measured = compare(case.op, placed)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and not same_bits(value, placed[name].detach()):
            raise AssertionError(f"{name} was written")
    return measured


def run_cases(device: Device, report: Report, order: str, only: str, quick: bool) -> None:
    """Runs and judges the cases. ``order`` "alternating": every other case runs the last wave first."""
    for number, case in enumerate(cases(only, quick)):
        report.emulation.order = order if order != "alternating" else ("forward", "reverse")[number % 2]
        before = device.launched.copy()
        measured, raised = [], None
        try:
            measured = run_case(device, case)
        except Exception as error:
            raised = error
        report.add(case, set(device.launched - before), measured, raised)


def run_checks(device: Device, report: Report) -> None:
    """Runs the checks that do not compare a record's op with its reference."""
    checks = (
        check_stream_copy,
        check_dequantize_4bit,
        check_seeded_dropout,
        check_bad_targets,
        check_saved_without_gaps,
        check_glu_backward_h,
        check_log_probs,
    )
    for check in checks:
        try:
            check(device)
        except Exception as error:
            report.wrong.append(f"{check.__name__}, waves {report.emulation.order}: {type(error).__name__}: {error}")


def check_stream_copy(device: Device) -> None:
    """Checks the copy kernel with which benchmarks compare."""
    x = device.place(torch.randn(2100))
    for per_thread in (1, 2, 4, 8):
        assert same_bits(torch.ops.liger_ext.stream_copy(x, per_thread), x), f"{per_thread} vectors a thread"


def check_dequantize_4bit(device: Device) -> None:
    for name, found, expected in four_bit.cases(device.place):
        assert same_bits(found, expected), name


def check_seeded_dropout(device: Device) -> None:
    for name, found, expected in dropout_mask.cases(device.place):
        assert same_bits(found, expected), name


def check_bad_targets(device: Device) -> None:
    """Checks that the loss of a row with a bad target is NaN, and that the next call raises the error."""
    for dtype in DTYPES:
        logits, target = device.place(torch.randn(4, 33).to(dtype)), device.place(torch.tensor([1, 2, 99, -100]))
        loss = functional.cross_entropy(logits, target, reduction="none")
        try:
            functional.softmax(logits)
            raise AssertionError(f"{dtype}: no error")
        except IndexError as error:
            assert "target[2] is 99" in str(error), str(error)
        assert loss.isnan().tolist() == [False, False, True, False], f"{dtype}: {loss.tolist()}"


def check_saved_without_gaps(device: Device) -> None:
    """Checks a saved gradient of the logits that comes back contiguous: its rows then have unaligned addresses."""
    for dtype in DTYPES:
        (case,) = (c for c in cases("one odd chunk") if c.dtype == dtype)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: device.place(t.contiguous()), lambda t: t):
            worst = max(run_case(device, case), key=lambda m: m.ratio)
        assert worst.ratio <= 1, str(worst)


def check_glu_backward_h(device: Device) -> None:
    for dtype in DTYPES:
        for *tensors, activation, gate_multiplier, down_multiplier in h_cases(dtype):
            check_h(*map(device.place, tensors), activation, gate_multiplier, down_multiplier)


def check_log_probs(device: Device) -> None:
    """Checks log-probabilities and entropies of tokens, which have no record."""
    for dtype, memory, softcap in itertools.product(DTYPES, ("auto", SMALLEST), (None, 3.0)):
        made = test_linear_log_probs.arguments(3, 8, 1048, dtype)
        made = {name: device.place(t.detach()).requires_grad_(t.requires_grad) for name, t in made.items()}
        test_linear_log_probs.judge(made, dtype, memory=memory, softcap=softcap)
