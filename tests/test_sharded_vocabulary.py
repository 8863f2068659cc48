"""The fused loss with its vocabulary sharded over two and over three processes: under the rule of the op without
shards, and the same bits in every process. The cases are those of sharded_cases.py; all run in one start."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROCESSES = 3

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)

from cases import LOW, environment  # noqa: E402
from sharded_cases import CASES  # noqa: E402
from test_fused_linear_cross_entropy import CHUNKS, ONE_CHUNK, head, judge_fused  # noqa: E402

from liger_ext import functional as F  # noqa: E402


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """What a case raised in the first process where it did."""
    folder = tmp_path_factory.mktemp("processes")
    script = Path(__file__).with_name("sharded_processes.py")
    commands = [[sys.executable, script, str(rank), str(PROCESSES), folder] for rank in range(PROCESSES)]
    logs = [folder / f"{rank}.txt" for rank in range(PROCESSES)]
    running = [
        subprocess.Popen(command, env=environment(), stdout=log.open("w"), stderr=subprocess.STDOUT)
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        failed = [process.wait(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(failed), "\n".join(log.read_text() for log in logs)
    found = {}
    for rank in range(PROCESSES):
        for name, text in json.loads((folder / f"{rank}.json").read_text()).items():
            found[name] = found.get(name) or (text and f"in process {rank}:\n{text}")
    return found


@pytest.mark.parametrize("size", range(2, PROCESSES + 1))
@pytest.mark.parametrize("case", CASES)
def test_sharded_vocabulary(errors, case, size):
    assert not errors[f"{case} {size}"], errors[f"{case} {size}"]


@pytest.mark.cuda
def test_one_gpu():
    """With NCCL; and once the sizes of the shards are known nothing waits for the device."""
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
    finally:
        dist.destroy_process_group()
