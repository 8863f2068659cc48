"""The fused loss and log-probabilities with a vocabulary sharded over two and over three processes: results keep the
rule that holds for the op without shards, and those of whole rows are bit-identical in all processes. The cases of
sharded_cases.py and sharded_log_probs.py run after one start of the processes."""

import functools
import itertools

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from cases import LOW, slow_if
from processes import run_errors
from sharded_cases import CASES
from test_fused_linear_cross_entropy import CHUNKS, ONE_CHUNK, head, judge_fused
from test_linear_log_probs import arguments
from test_linear_log_probs import judge as judge_log_probs

from liger_ext import functional as F


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    return run_errors(request, "sharded_cases", tmp_path_factory)


@pytest.mark.parametrize("case", [slow_if(processes > 2, case) for case, (processes, _) in CASES.items()])
def test_sharded_vocabulary(errors, case):
    assert not errors[case], errors[case]


@pytest.mark.cuda
def test_one_gpu():
    """Loss and log-probabilities with NCCL; nothing synchronises with the device once the sizes of the shards are
    known."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        op = functools.partial(F.fused_linear_cross_entropy, process_group=dist.group.WORLD)
        for dtype, reduction, memory in itertools.product(LOW, ("mean", "none"), (ONE_CHUNK, CHUNKS)):
            made = {**head(dtype=dtype, device="cuda", bias=True), "reduction": reduction, "memory": memory}
            judge_fused(made, run=op)
            op(**made)
            given = torch.ones(() if reduction == "mean" else len(made["x"]), device="cuda")
            torch.cuda.set_sync_debug_mode("error")
            try:
                op(**made).backward(given)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        log_probs = functools.partial(F.linear_log_probs, process_group=dist.group.WORLD)
        for dtype, memory in itertools.product(LOW, (ONE_CHUNK, CHUNKS)):
            judge_log_probs(arguments(300, 24, 301, dtype, "cuda"), dtype, run=log_probs, memory=memory)
    finally:
        dist.destroy_process_group()
