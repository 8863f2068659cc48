"""Every GPU kernel on the host, against float64: forward and backward, three dtypes, odd sizes, the paths of long rows.

Not collected by itself: the library must be the host target's, for which test_host_target runs this file in a process
for each warp width. By hand, after ``make test`` has built it::

    LIGER_EXT_LIB=liger_ext/lib/host LIGER_EXT_HOST_WARP=64 python -m pytest tests/host_kernels.py -k softmax
"""

import ctypes

import pytest
import torch
from cases import BY_NAME, EXAMPLES, IDS, LOW, laid_out, normal, random_targets

from liger_ext._load import library_folder
from liger_ext.testing import judge

dtypes = pytest.mark.parametrize("dtype", LOW, ids=["fp32", "bf16", "fp16"])
ROWS = ("rms_norm", "add_rms_norm", "layer_norm", "swiglu", "geglu", "softmax")


def row_op(op, rows, cols, dtype, *, layout="contiguous", weight_dtype=None, other_dtype=None, **options):
    """Judges a row op; all of its tensors want gradients."""
    tensors = {"swiglu": ("gate", "up"), "geglu": ("gate", "up"), "add_rms_norm": ("x", "residual")}.get(op, ("x",))
    made = {}
    for seed, name in enumerate(tensors):
        of = other_dtype if seed and other_dtype else dtype
        made[name] = laid_out(normal(rows, cols, dtype=of, seed=seed), layout).requires_grad_()
    for seed, name in enumerate({"layer_norm": ("weight", "bias"), "softmax": ()}.get(op, ("weight",)), start=2):
        if "norm" in op:
            made[name] = normal(cols, dtype=weight_dtype or dtype, seed=seed, mean=1, scale=0.3).requires_grad_()
    judge(op, made | options)


def loss(rows, vocab, dtype, *, layout="contiguous", **options):
    logits = laid_out(normal(rows, vocab, dtype=dtype, scale=3), layout).requires_grad_()
    judge("cross_entropy", {"logits": logits, "target": random_targets(rows, vocab), **options})


def fused_loss(rows, vocab, dtype, *, hidden=8, **options):
    x, weight = normal(rows, hidden, dtype=dtype), normal(vocab, hidden, dtype=dtype, seed=1)
    inputs = {"x": x.requires_grad_(), "weight": weight.requires_grad_(), "target": random_targets(rows, vocab)}
    judge("fused_linear_cross_entropy", inputs | options)


@dtypes
@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_small(example, dtype):
    judge(example.op, example.arguments("cpu", dtype))


@dtypes
@pytest.mark.parametrize("rows, cols", [(0, 8), (1, 1), (3, 7), (3, 33), (5, 64), (1, 1001), (3, 1024), (17, 264)])
@pytest.mark.parametrize("op", ROWS)
def test_odd_sizes(op, rows, cols, dtype):
    row_op(op, rows, cols, dtype)


def test_every_kernel_has_run():
    """Of this process: the last test."""
    kernels = ctypes.CDLL(str(library_folder() / "libliger_ext_cpu.so")).liger_ext_host_kernels
    kernels.restype = ctypes.c_char_p
    launches = [line.split(" ", 1) for line in kernels().decode().splitlines()]
    print(len(launches), "kernels", sum(int(count) for count, _ in launches), "launches")
    assert launches and not [name for count, name in launches if count == "0"]
