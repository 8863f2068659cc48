"""Tests that an error thrown in C++ reaches Python with the type that csrc/kernels/errors.h names and with its text
alone, also in inference mode, in a backward and in a compiled graph."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

import liger_ext.functional as F

ROOT = Path(__file__).parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("c++")

RAISED = [
    (ValueError, "x is 1, expected 2"),
    (ValueError, "x has too many rows"),
    (IndexError, "target[0] is 9"),
    (MemoryError, "std::bad_alloc"),
    (torch.OutOfMemoryError, "out of memory"),
    (RuntimeError, "no code for this GPU"),
]


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    """Returns an op that throws each of the errors."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("raised") / "raised.so"
    command = [COMPILER, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-o", library]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-I", ROOT / "csrc"]
    command += [part for folder in include_paths() for part in ("-isystem", folder)]
    command += [ROOT / "tests/raised.cpp", ROOT / "csrc/ops/boxed.cpp", "-L", TORCH_LIB_PATH, "-ltorch_cpu"]
    subprocess.run(command, check=True)
    torch.ops.load_library(library)
    return torch.ops.liger_ext_raised.raised


class InBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.function(), None


def plain(function):
    function()


def in_inference_mode(function):
    with torch.inference_mode():
        function()


def in_backward(function):
    InBackward.apply(torch.ones(2, requires_grad=True), function).sum().backward()


calls = pytest.mark.parametrize("call", [plain, in_inference_mode, in_backward])


@calls
@pytest.mark.parametrize("kind", range(len(RAISED)))
def test_every_kind_of_error(raised, call, kind):
    expected, text = RAISED[kind]
    x = torch.ones(2)
    with pytest.raises(expected) as error:
        call(lambda: raised(x, kind))
    assert error.type is expected and str(error.value) == text


# Inputs for an error that the fake implementation detects, too, and for one that only the kernel detects.
X, OUTSIDE = torch.ones(3, 8), torch.tensor([1, 2, 9])
OURS = {
    "functional": lambda: F.rms_norm(X, torch.ones(7)),
    "functional, with a gradient": lambda: F.rms_norm(X.clone().requires_grad_(), torch.ones(7)),
    "torch.ops": lambda: torch.ops.liger_ext.rms_norm(X, torch.ones(7), 1e-6, 0.0, 0),
}


@calls
@pytest.mark.parametrize("name", OURS)
def test_wrong_arguments(call, name):
    with pytest.raises(ValueError) as error:
        call(OURS[name])
    assert error.type is ValueError and str(error.value) == "rms_norm: weight has shape (7), expected (8)"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_compiled_graph_raises_as_its_op_does(requires_grad):
    x = X.clone().requires_grad_(requires_grad)
    compiled = torch.compile(lambda x, target: F.cross_entropy(x, target) * 2, fullgraph=True)
    with pytest.raises(IndexError) as eager:
        F.cross_entropy(x, OUTSIDE)
    with pytest.raises(IndexError) as error:
        compiled(x, OUTSIDE)
    assert error.type is IndexError and str(error.value) == str(eager.value)


AFTER_A_FAULT = """
import torch
import liger_ext.functional as F
x = torch.randn(4096, 4096, device="cuda")
F.softmax(x)
try:
    torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")]
    torch.cuda.synchronize()
except Exception as error:
    print(type(error).__name__)
try:
    F.softmax(x.expand(8, 4096, 4096))
except Exception as error:
    print(type(error).__name__, str(error).replace("\\n", " "))
"""


@pytest.mark.cuda
def test_an_allocation_after_a_fault_of_a_kernel_names_the_fault():
    """After a fault the device rejects every request, allocations included. The error must not claim a lack of memory,
    because a smaller batch would not help."""
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", AFTER_A_FAULT]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=False)
    said = done.stdout.strip().splitlines()
    assert len(said) == 2, done.stdout + done.stderr
    assert not said[1].startswith("OutOfMemoryError") and "out of memory" not in said[1], said[1]
    assert "device-side assert" in said[1], said[1]
