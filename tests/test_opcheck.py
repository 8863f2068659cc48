"""The ops that the examples of tests/ops call, forward and backward, pass torch.library.opcheck: schema, fake
implementation, autograd registration, AOT dispatch. The examples call nearly every op."""

import pytest
import torch
from cases import normal, recorded
from ops import EXAMPLES, IDS


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(device, example, dtype):
    for op, args in recorded(example, device, dtype):
        copies = []
        for a in args:
            if isinstance(a, torch.Tensor):
                leaf = a.detach().clone()
                a = leaf.requires_grad_(a.requires_grad and "backward" not in op._schema.name)
            copies.append(a)
        torch.library.opcheck(op, tuple(copies))


def test_the_examples_call_every_op():
    called = {op._schema.name for example in EXAMPLES for op, _ in recorded(example, "cpu")}
    registered = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("liger_ext::")}
    tested_apart = (
        "stream_copy",
        "dequantize_4bit",
        "dequantize_4bit_to_",
        "glu_backward_with_h_",
        "seeded_dropout",
        "seeded_dropout_add_",
    )
    of_no_function = {f"liger_ext::{name}" for name in tested_apart}
    of_shards = {name for name in registered if "::vocabulary_shard_" in name}  # test_sharded_vocabulary.py
    assert called == registered - of_no_function - of_shards


def test_stream_copy(device):
    """stream_copy, with whose bandwidth the benchmarks compare ops, returns a copy of its input."""
    x = normal(1001, 16, device=device)
    for per_thread in (1, 2, 4, 8):
        assert torch.equal(torch.ops.liger_ext.stream_copy(x, per_thread), x)
