"""Tests of patched Llamas in several processes, under FSDP2, FSDP1 and DDP. The selected cases of distributed_cases.py
run in one start of the processes."""

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from cases import slow_if
from distributed_cases import CASES
from processes import run_errors


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    return run_errors(request, "distributed_cases", tmp_path_factory)


def kind(case):
    return case.partition(",")[0]


# `make test` runs the first case of each kind. Compiled cases are all slow.
QUICK = {kind(case): case for case in reversed(CASES) if kind(case) != "compiled"}.values()


@pytest.mark.parametrize("case", [slow_if(case not in QUICK, case) for case in CASES])
def test_distributed(errors, case):
    assert not errors[case], errors[case]
