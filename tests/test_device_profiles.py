"""Tests of the device profiles that csrc/gpu/device.cu reads from the CUDA runtime. tests/fake_cuda.cpp replaces the
runtime and simulates GPUs of several kinds. They need nvcc, but no GPU."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from op_plans import plans

from liger_ext import _C

ROOT = Path(__file__).parents[1]
TOOLKIT = os.environ.get("CUDA_HOME", "/usr/local/cuda")
NVCC = shutil.which("nvcc", path=os.pathsep.join([TOOLKIT + "/bin", os.environ["PATH"]]))
AMPERE, HOPPER, WITHOUT_COUNTS, IN_TROUBLE, NO_CODE = range(5)  # devices of fake_cuda.cpp

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fake_cuda")
    flags = "-gencode arch=compute_90a,code=sm_90a -std=c++20 --expt-relaxed-constexpr -diag-suppress=20012 -O1"
    sources = ["csrc/gpu/device.cu", "tests/fake_cuda.cpp", "csrc/launch/knobs.cpp", "csrc/launch/profiles.cpp"]
    # -Bsymbolic: calls must not go to torch's CUDA runtime in this process.
    library = ["-shared", "-cudart=none", "-Xcompiler=-fPIC", "-Xlinker=-Bsymbolic"]
    command = [NVCC, *flags.split(), *library, "-DLIGER_BACKEND=gpu", "-Icsrc"]
    done = subprocess.run(
        [*command, *sources, "-o", folder / "fake.so"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "fake.so"


@pytest.fixture
def runtime(built, tmp_path):
    """Loads a new copy of the library, which has not cached a profile."""
    return ctypes.CDLL(str(shutil.copy(built, tmp_path)), mode=os.RTLD_LAZY)  # uncalled functions are undefined


def profile(runtime, device):
    made, read = _C.DeviceProfile(), runtime.liger_ext_gpu_profile
    read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
    return made if read(device, made.address, made.size) == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("current", [AMPERE, HOPPER])
def test_each_device_is_asked_by_itself(runtime, current):
    """Each device is queried by its number; the current device does not change."""
    runtime.cudaSetDevice(current)
    ampere, hopper = profile(runtime, AMPERE), profile(runtime, HOPPER)
    assert (ampere.bulk_copies, ampere.async_copies, ampere.resident_clusters) == (False, True, [0] * 4)
    assert (hopper.bulk_copies, hopper.async_copies, hopper.resident_clusters) == (True, False, [120, 60, 30, 15])
    assert ampere.shared_per_block_optin == 163 << 10 and hopper.shared_per_block_optin == 227 << 10
    assert runtime.fake_current_device() == current and runtime.fake_last_error() == 0


def test_clusters_that_cannot_be_counted_are_not_used(runtime):
    found = profile(runtime, WITHOUT_COUNTS)
    assert found.bulk_copies and found.resident_clusters == [0] * 4
    assert runtime.fake_last_error() == 0
    for op in ("rms_norm", "rms_norm_backward", "softmax", "fused_linear_cross_entropy"):
        for launch in plans(op, found, 8192, 65_536):
            assert launch.plan.cluster == 1 and launch.plan.grid > 0


def test_a_passing_error_is_not_kept(runtime):
    """A call during a temporary error fails; the next call queries again."""
    assert profile(runtime, IN_TROUBLE) is None and runtime.fake_last_error() == 0
    runtime.fake_recover()
    assert profile(runtime, IN_TROUBLE).resident_clusters == [120, 60, 30, 15]


def test_without_code_there_is_a_profile(runtime):
    """A device for which the library has no code has a profile; its first launch names what is missing."""
    assert profile(runtime, NO_CODE).resident_clusters == [0] * 4 and runtime.fake_last_error() == 0
