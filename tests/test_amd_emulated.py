"""The ops of the HIP build on a device that is not there: every launch is one that the GPU would take, and, with an
emulator, the code objects give the right results (tests/amd/run.py has the whole of that)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from amd import objects, run

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
@pytest.mark.parametrize("arch", run.ARCHITECTURES)
def test_a_few_cases_of_every_op(arch):
    done = script("run.py", arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@needs_build
@pytest.mark.parametrize("arch", run.ARCHITECTURES)
def test_every_launch_fits_the_device(arch):
    """Threads, whole waves, shared memory and grid, for hundreds of shapes of every op."""
    done = script("launches.py", arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@needs_build
def test_without_an_emulator_it_says_how_to_get_one(tmp_path):
    done = script("run.py", "gfx942", LIGER_EXT_AMD_EMULATOR=str(tmp_path))
    assert done.returncode == run.NO_EMULATOR, done.stderr
    assert "LIGER_EXT_AMD_EMULATOR" in done.stdout and "tinygrad" in done.stdout
