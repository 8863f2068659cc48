"""Patched Llamas in several processes, under FSDP2, FSDP1 and DDP. The cases are those of distributed_cases.py; all run
in one start."""

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from distributed_cases import CASES
from processes import errors_of


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    return errors_of(request, "distributed_cases", tmp_path_factory)


def kind(case):
    return case.partition(",")[0]


# Of each kind the first, but of what is compiled.
QUICK = {kind(case): case for case in reversed(CASES) if kind(case) != "compiled"}.values()


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES])
def test_distributed(errors, case):
    assert not errors[case], errors[case]
