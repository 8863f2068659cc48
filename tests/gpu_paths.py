"""Calls of ops that together take the launch paths of a GPU. test_gpu_paths runs them on a GPU; test_sanitizer runs
those in WATCHED, for compute-sanitizer.

The number of rows of many calls follows from the device's profile or plans. So the calls include persistent blocks that
fill each pipeline stage several times, clusters where the device has them, few rows and many rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from op_plans import OPS, plans

from liger_ext import _C, _devices
from liger_ext.records import RECORDS, InputFactory, Size

# Ops whose backward sums columns in persistent blocks.
NORMS = [
    name.removesuffix("_backward")
    for name in OPS
    if any(launch.kernel == "NormBackwardRegisters" for launch in plans(name, _C.profile("H200"), 8192, 64))
]
# Ops that read every row of a matrix; of these, the ops that run in clusters of blocks.
ROW_OPS = [
    op for op, record in RECORDS.items() if record.kernels == op and record.llama.hidden == max(record.llama.heads) == 0
]
CLUSTERED = [
    op
    for op in ROW_OPS
    if any(launch.plan.cluster > 1 for launch in RECORDS[op].plans(_C.profile("H200"), Size(8, 32_768), torch.float32))
]
HIDDEN = 16  # of the fused loss


def call_size(op: str, rows: int, cols: int) -> Size:
    """Returns the sizes of a call. For RoPE rows are positions and cols is the head dimension, with few heads; the
    fused loss has a small hidden size."""
    size = RECORDS[op].llama.at(rows, cols)
    return replace(size, heads=(10, 3, cols) if any(size.heads) else size.heads, hidden=HIDDEN if size.hidden else 0)


def arguments(op: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, Any]:
    """Returns an op's arguments by name; those that may have a gradient require one."""
    return RECORDS[op].inputs(InputFactory(dtype, device), call_size(op, rows, cols))


def machine_profile() -> _C.DeviceProfile:
    """Returns the profile of this machine's GPU, or of an H200 without one."""
    return _devices.running_profile(0) if torch.cuda.is_available() else _C.profile("H200")


def rounds(plan: _C.LaunchPlan, rows: int) -> float:
    """Returns how many iterations a persistent block or cluster takes over its rows."""
    return rows / (plan.grid // plan.cluster * max(1, plan.block // plan.threads_per_row))


def wraps(plan: _C.LaunchPlan, rows: int) -> bool:
    """Returns whether a block fills each of its pipeline stages at least three times."""
    return plan.stages > 0 and rounds(plan, rows) >= 3 * plan.stages


@dataclass(frozen=True)
class Path:
    """A call of an op. ``kind``: the number of rows; "all" means 40,000, "wraps" as many as refill all pipeline stages.
    ``frozen``: parameters require no gradient."""

    op: str
    cols: int
    dtype: torch.dtype
    kind: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    frozen: bool = False

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options.items())
        options += " frozen" * self.frozen
        return f"{self.op} {self.kind}x{self.cols} {str(self.dtype).removeprefix('torch.')}{options}"

    def launches(self, profile: _C.DeviceProfile, rows: int, knobs: dict | None = None) -> list[_C.NamedLaunch]:
        """Returns the planned launches of forward and backward."""
        record, size = RECORDS[self.op], call_size(self.op, rows, self.cols)
        frozen = record.parameters if self.frozen else ()
        return record.plans(profile, size, self.dtype, "", _C.Knobs(**(knobs or {})), self.options, frozen)

    def rows(self, profile: _C.DeviceProfile) -> int:
        rows = {"few": 3, "many": 2 * profile.multiprocessors, "all": 40_000}.get(self.kind, 40)
        if self.kind == "wraps":
            at_most = max(launch.plan.stages for launch in self.launches(profile, 2**18))
            most = min(2, at_most)  # one row may fill all stages
            while at_most and not self._fills_rings(profile, rows, most):
                rows += 1 + rows // 8
        return rows

    def _fills_rings(self, profile: _C.DeviceProfile, rows: int, stages: int) -> bool:
        """Returns whether kernels with at least ``stages`` pipeline stages run, and refill them, with this number of
        rows. (Fewer rows may run in a kernel without stages.)"""
        plans = [launch.plan for launch in self.launches(profile, rows) if launch.plan.stages]
        return bool(plans) and all(plan.stages >= stages and wraps(plan, rows) for plan in plans)

    def arguments(self, rows: int, device: torch.device | str) -> dict[str, Any]:
        made = arguments(self.op, rows, self.cols, self.dtype, device) | self.options
        for name in RECORDS[self.op].parameters if self.frozen else ():
            made[name].requires_grad_(False)
        return made


DTYPES = (torch.bfloat16, torch.float32)

# The calls for compute-sanitizer: each kernel with clusters, with persistent blocks, or that writes in place. Clusters
# have long rows; persistent blocks have enough rows to refill all pipeline stages.
WATCHED = [
    *(
        Path(op, cols, dtype, "wraps")
        for op in NORMS
        for dtype in DTYPES
        for cols in (64, 576, 2048, 3072, 4096, 8192, 16_384, 65_536)
    ),
    *(
        Path(op, cols, dtype, "many")
        for op in CLUSTERED
        if op != "group_norm"
        for dtype in DTYPES
        for cols in (32_768, 131_072)
    ),
    # Four, or two, vectors of each thread in registers.
    *(Path("group_norm", size // dtype.itemsize, dtype, "many") for dtype in DTYPES for size in (65_536, 81_920)),
    *(Path("softmax", cols, dtype, "many") for dtype in DTYPES for cols in (16_384, 65_536, 151_937)),
    *(
        Path("fused_linear_cross_entropy", cols, dtype, "many", options)
        for dtype in DTYPES
        for cols, options in (
            (1024, {}),
            (32_000, {}),
            (65_536, {}),
            (128_256, {}),
            (151_936, {}),
            (128_256, {"softcap": 20.0}),
            (1003, {"softcap": 20.0}),
            (1024, {"reduction": "none"}),
        )
    ),
    Path("fused_linear_cross_entropy", 262_144, torch.bfloat16, "many"),
    Path("fused_linear_cross_entropy", 75_000, torch.float32, "many"),
]

# Rows that no cluster holds.
LONG = [
    *(Path(op, 300_000, dtype, "few") for op in ROW_OPS for dtype in DTYPES),
    *(Path("fused_linear_cross_entropy", 600_000, dtype, "few") for dtype in DTYPES),
    *(Path("softmax", 1_000_000, dtype, "few") for dtype in DTYPES),
]

# The other paths: few and many rows of common lengths, with and without a remainder after the last whole vector.
COMMON = [
    *(
        Path(op, cols, dtype, kind)
        for op in (*ROW_OPS, "fused_linear_cross_entropy")
        for dtype in DTYPES
        for kind in ("few", "many")
        for cols in (100, 1001, 5120, 40_001)
    ),
    *(
        Path(op, cols, dtype, kind, frozen=True)
        for op in ROW_OPS
        if RECORDS[op].parameters
        for dtype in DTYPES
        for kind in ("few", "many")
        for cols in (576, 4096, 8192, 16_384, 65_536)
    ),
    *(Path("rope", 64, dtype, "many") for dtype in DTYPES),
    Path("cross_entropy", 128, torch.bfloat16, "all"),
    Path("cross_entropy", 1003, torch.bfloat16, "many", {"reduction": "none"}),
]

PATHS = [*WATCHED, *LONG, *COMMON]
