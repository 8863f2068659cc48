"""The code objects of every op, executed: tests/amd/run.py has the whole of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from amd import objects, run

SCRIPT = Path(run.__file__)


def script(*args, **env):
    return subprocess.run(
        [sys.executable, SCRIPT, *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


@pytest.mark.amd
@pytest.mark.parametrize("arch", run.ARCHITECTURES)
def test_a_few_cases_of_every_op(arch):
    done = script(arch)
    assert done.returncode == 0 and " 0 wrong" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not objects.HIP_LIBRARY.exists(), reason="there is no HIP build: tests/compile_gpu.sh hip")
def test_without_an_emulator_it_says_how_to_get_one(tmp_path):
    done = script("gfx942", LIGER_EXT_AMD_EMULATOR=str(tmp_path))
    assert done.returncode == run.NO_EMULATOR, done.stderr
    assert "LIGER_EXT_AMD_EMULATOR" in done.stdout and "tinygrad" in done.stdout
