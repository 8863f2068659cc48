"""The code paths of the GPU launches, judged by the rule of liger_ext/rule.py: the calls of gpu_paths.py, rows that
are too long to hold and so are read twice, and backwards that compute only some of the gradients."""

import itertools

import pytest
import torch
from cases import host_target
from gpu_paths import DTYPES, NORMS, PATHS, ROW_OPS, arguments, machine_profile
from op_plans import plans

from liger_ext import _C
from liger_ext.records import RECORDS, InputFactory, Size
from liger_ext.testing import judge

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])


@pytest.mark.cuda
@pytest.mark.parametrize("path", PATHS, ids=str)
def test_path(path):
    judge(path.op, path.arguments(path.rows(machine_profile()), "cuda"))


# More columns than the registers of a cluster hold; the fused loss holds the most columns, because it works in place.
LONG = {
    **dict.fromkeys(ROW_OPS, 262_160),
    "fused_linear_cross_entropy": 524_400,
}


# On the host target, kernel_cases.py has rows that exceed the smaller capacity of its blocks.
@pytest.mark.cuda
@dtypes
@pytest.mark.parametrize("op", LONG)
def test_rows_that_are_read_again(op, dtype):
    judge(op, arguments(op, 3, LONG[op], dtype, "cuda"))
    judge(op, arguments(op, 2, LONG[op] + 1, dtype, "cuda"))  # unaligned


def test_these_rows_are_read_again():
    """According to the plans for an H200."""
    for op, cols in LONG.items():
        launches = [x for name in (op, f"{op}_backward") for x in plans(name, _C.profile("H200"), 3, cols)]
        names = [launch.kernel for launch in launches if "Registers" in launch.kernel]
        assert not names, (op, names)


TENSORS = {op: tuple(RECORDS[op].inputs(InputFactory(torch.float32), Size(1, 8))) for op in NORMS}


def subsets(names):
    """All subsets but the empty one and the full one."""
    return [some for n in range(1, len(names)) for some in itertools.combinations(names, n)]


def lengths(device):
    """Row lengths: several rows per block, one or several warps per row, a cluster per row on Hopper, and two-pass
    rows; in vectors and in single elements."""
    if device.type == "cuda":
        return (512, 3072, 8192, 16_384, 65_536, 300_000, 1001, 40_001)
    return (64, 9000) if host_target() else (64, 1001)


@dtypes
@pytest.mark.parametrize("mixed", [False, True], ids=["", "weights of another dtype"])
@pytest.mark.parametrize(("op", "wanted"), [(op, some) for op, names in TENSORS.items() for some in subsets(names)])
def test_some_gradients(device, op, wanted, dtype, mixed):
    """Only dx, only dweight, ...: every path of the backward skips the gradients that are not requested."""
    for cols in lengths(device):
        made = arguments(op, 40 if device.type == "cuda" else 9, cols, dtype, device)
        for name in ("weight", "bias"):
            if mixed and name in made:
                other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
                made[name] = made[name].detach().to(other)
        for name, value in made.items():
            if isinstance(value, torch.Tensor):
                value.requires_grad_(name in wanted)
        judge(op, made)
