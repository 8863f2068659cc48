"""Python threads that call ops at the same time. ``make test-tsan`` runs this under ThreadSanitizer, which finds
unsynchronised state that calls share."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import gradients, host_target
from ops import EXAMPLES, IDS

from liger_ext.testing import named_outputs

pytestmark = pytest.mark.skipif(host_target(), reason="the host target checks one call at a time")


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_at_once(device, example, dtype):
    """One op, forward and backward, on the same tensors: each thread's results have the bits of a call without
    threads."""
    arguments = example.arguments(device, dtype)
    threads = 4
    start = threading.Barrier(threads)

    def call():
        return [*named_outputs(example(arguments)).values(), *gradients(example, arguments)]

    def call_often(_):
        start.wait()
        return [call() for _ in range(5)]

    with ThreadPoolExecutor(threads) as pool:
        found = [tensors for often in pool.map(call_often, range(threads)) for tensors in often]
    alone = call()
    for tensors in found:
        assert all(torch.equal(a, b) for a, b in zip(alone, tensors, strict=True))
