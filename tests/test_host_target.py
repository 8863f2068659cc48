"""The GPU's kernels, run on the host: every one of them against float64, and broken ones that have to be found.

``make host`` builds what is tested here, into the folder ``host`` beside the libraries; CONTRIBUTING.md says how to
use it when writing a kernel.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import liger_ext
from liger_ext._load import library_folder

HERE, HOST = Path(__file__).parent, library_folder() / "host"

pytestmark = pytest.mark.skipif(
    not (HOST / "broken_kernels").exists(), reason=f"no host target in {HOST}: `make host` builds it"
)
WARPS = 32, 64
warp_widths = pytest.mark.parametrize("warp", WARPS)


def run(*command, warp, **env):
    return subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "LIGER_EXT_HOST_WARP": str(warp), **env},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@functools.cache
def run_on_host(file, warp, *args, **env):
    """Runs a file of tests: the process, and, of host_kernels.py, the cases that each kernel ran in."""
    path = os.pathsep.join([str(Path(liger_ext.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "cases.json"
        env |= {"LIGER_EXT_LIB": str(HOST), "PYTHONPATH": path, "LIGER_EXT_HOST_CASES": str(counts)}
        done = run(sys.executable, "-m", "pytest", "-q", HERE / file, *args, warp=warp, **env)
        return done, json.loads(counts.read_text()) if counts.exists() else {}


@warp_widths
@pytest.mark.parametrize("file", ["host_kernels.py", "test_forced_plans.py", "test_gpu_paths.py", "test_layouts.py"])
def test_every_kernel(file, warp):
    done, _ = run_on_host(file, warp)
    assert done.returncode == 0, done.stdout + done.stderr


@warp_widths
def test_sums_of_exponentials_are_as_exact_as_torch(warp):
    done, _ = run_on_host("test_as_exact_as_torch.py", warp, "-m", "not cuda", "-k", "1000 and not 10000")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_rows_of_logits_in_160_kib():
    """MI355X's shared memory: plans that no device with 64 KiB has."""
    done, _ = run_on_host("host_kernels.py", 64, "-k", "fused or 64_kib", LIGER_EXT_HOST_SHARED="160")
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr


def test_cases_of_every_kernel(capsys):
    """The table: kernels, their instances (by dtype, elements of an access, ...), and cases at each warp width, all
    instances together and of the one with the fewest."""
    counts = {warp: run_on_host("host_kernels.py", warp)[1] for warp in WARPS}
    assert counts[32].keys() == counts[64].keys() and min(min(c.values()) for c in counts.values()) > 0
    families = {}
    for kernel in counts[32]:
        families.setdefault(re.sub(r"<.*", "", kernel.removesuffix("]")).rpartition("::")[2], []).append(kernel)
    head = "".join(f"{f'cases, warps of {warp}':>22}{'fewest':>8}" for warp in WARPS)
    lines = [f"{'kernel':26}{'instances':>10}{head}"]
    for family, instances in sorted(families.items()):
        found = [[counts[warp][kernel] for kernel in instances] for warp in WARPS]
        lines.append(f"{family:26}{len(instances):10}" + "".join(f"{sum(c):22}{min(c):8}" for c in found))
    with capsys.disabled():
        print("", *lines, sep="\n")


# In which thread, and what is found; {warp} is the warp's width, which is also the first thread of the second warp.
BROKEN = {
    "MissingBarrier": ("{warp}", "race: stores 4 bytes at shared memory"),
    "MissingDoubleBuffer": (64, "race: loads 4 bytes at shared memory"),
    "RaceInWarp": (1, "race: stores 4 bytes at shared memory + 4; thread 0 has read them, of the same warp"),
    "StoreAfterLoads": (127, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "StoreAfterLoadsInWarp": (11, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "StoreAfterLoadsOfBlocks": (7, "race: stores 4 bytes at both + 4 (16 bytes); another block has read them"),
    "RaceOnGlobal": (5, "race: stores 4 bytes at out + 560", "thread 4 has written them"),
    "RaceOfBlocks": (7, "race: stores 4 bytes at out + 28", "another block has written them"),
    "ConditionalBarrier": ("{warp}", "divergence: this thread has returned, thread 0 waits at the block barrier"),
    "RaceOfGroups": (
        0,
        "race: loads 4 bytes at shared memory + 256; thread 64 has written them with no barrier between",
    ),
    "MissingDoubleBufferOfGroups": (63, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "IncompleteGroup": ("{warp}", "divergence: this thread has returned, thread 0 waits at the group barrier"),
    "GroupOfPartOfAWarp": (0, "group barrier: group 0 of 16 threads"),
    "TwoBarriers": (3, "divergence: this thread waits at the block barrier", "thread 0 waits at the block barrier"),
    "EarlyReturn": (9, "divergence: this thread has returned, thread 0 waits at the shuffle"),
    "ShuffleOutOfRange": (0, "shuffle out of range: lane 0 ^ {warp} is no lane of a warp of {warp}"),
    "UninitialisedShared": (2, "uninitialised: loads 4 bytes at shared memory + 8"),
    "UninitialisedGlobal": (6, "uninitialised: loads 4 bytes at out + 568"),
    "SharedOutOfBounds": (1, "out of bounds: stores 4 bytes at shared memory + 1024"),
    "GlobalOutOfBounds": (8, "out of bounds: loads 4 bytes outside of all buffers, at in + 512"),
    "GapBetweenRows": (4, "out of bounds: stores 4 bytes outside of all buffers, at out + 1056"),
    "StoreToInput": (3, "out of bounds: stores 4 bytes at in + 12", ", an input"),
    "MisalignedVector": (2, "misaligned: stores 16 bytes at out + 552"),
    "RowLeftOut": (None, "unwritten: 512 bytes, the first at out + 544", "row 1, column 0)"),
    "TailLeftOut": (None, "unwritten: 16 bytes, the first at out + 1040", "row 1, column 124)"),
    "InputLeftOut": (None, "unread: 256 bytes, the first at in + 4 (512 bytes)"),
    "TooFewRowsDeclared": (
        None,
        "uncovered: the launch declares 2 rows of 128 columns, its threads touch 384 elements at out",
    ),
    "OtherMatrixDeclared": (None, "uncovered: the launch declares 3 rows of 136 columns", "elements of no buffer"),
    "TooManyThreads": (0, "launched with 128 threads, compiled for at most 64"),
    "PartOfAWarp": (0, "threads, which is no multiple of the warp's {warp}"),
    "TooMuchSharedMemory": (0, "launched with 65540 bytes of shared memory; the device has 65536"),
}
LAUNCHES = ("TooManyThreads", "PartOfAWarp", "TooMuchSharedMemory")  # found before the first block


@warp_widths
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name, warp):
    """By kind, kernel, block and thread, if one did it; and the same kernel mended is not."""
    thread, *findings = BROKEN[name]
    found, block = run(HOST / "broken_kernels", name, warp=warp).stdout, 0 if name in LAUNCHES else 1
    who = [] if thread is None else [f"block {block} of 3, thread {thread} of "]
    for part in [*findings, f"::{name}\n", *who]:
        assert part.format(warp=warp) in found, found
    assert run(HOST / "broken_kernels", name, "ok", warp=warp).stdout == ""


def test_every_broken_kernel_is_tested():
    assert run(HOST / "broken_kernels", warp=32).stdout.split() == list(BROKEN)
