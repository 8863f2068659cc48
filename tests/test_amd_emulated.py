"""Tests of the HIP build on a machine without an AMD GPU: the launches of every kernel case fit the device,
and in an emulator the code objects compute right results for a few cases (`tests/amd/run.py --all` runs all)."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from amd import launches, objects, run
from amd.device import Launch

FOLDER = Path(run.__file__).parent
needs_build = pytest.mark.skipif(
    not objects.HIP_LIBRARY.exists(), reason="there is no HIP build: tests/compile_gpu.sh hip"
)


def script(name, *args, **env):
    return subprocess.run(
        [sys.executable, FOLDER / name, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.amd
@pytest.mark.parametrize("arch", objects.BUILT)
def test_a_few_cases_of_every_op(arch):
    done = script("run.py", arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@needs_build
@pytest.mark.amd
@pytest.mark.parametrize("arch", objects.ARCHITECTURES)
def test_lanes_read_each_others_registers(arch):
    done = script("lanes.py", arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@needs_build
@pytest.mark.slow
@pytest.mark.parametrize("arch", objects.BUILT)
def test_every_launch_fits_the_device(arch):
    """Checks threads, whole waves, shared memory and grid of the launches of every kernel case."""
    done = script("launches.py", arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, None),
        ({"block": 1024}, "1024 threads, compiled for 512"),
        ({"block": 480}, "480 threads are not whole waves of 64"),
        ({"shared_bytes": (64 << 10) + 4}, "65540 bytes of shared memory"),
        ({"grid": 0}, "0 blocks"),
        ({"grid": 2**31}, "2147483648 blocks"),
    ],
)
def test_a_launch_that_does_not_fit_is_found(change, found):
    compiled = {".max_flat_workgroup_size": 512, ".wavefront_size": 64, ".group_segment_fixed_size": 0}
    device = SimpleNamespace(kernels={"k": compiled}, shared_bytes=64 << 10)
    launch = Launch(**{"kernel": "k", "grid": 7, "block": 512, "shared_bytes": 64 << 10, "arguments": b""} | change)
    assert launches.problem(device, launch) == found


@needs_build
def test_without_an_emulator_it_says_how_to_get_one(tmp_path):
    done = script("run.py", "gfx942", LIGER_EXT_AMD_EMULATOR=str(tmp_path))
    assert done.returncode == run.NO_EMULATOR, done.stderr
    assert "LIGER_EXT_AMD_EMULATOR" in done.stdout and "tinygrad" in done.stdout
