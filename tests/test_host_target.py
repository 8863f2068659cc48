"""The GPU's kernels, run on the host: every kernel is compared with float64, and the target's checks must find the bugs
of deliberately broken kernels.

``make host`` builds the host target, into the folder ``host`` beside the libraries; CONTRIBUTING.md shows how to use it
when writing a kernel.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import liger_ext
from liger_ext._load import library_folder

HERE, HOST = Path(__file__).parent, library_folder() / "host"
AHEAD = library_folder() / "ahead" / "host"  # with clusters, and bulk copies that fetch rows ahead
ASYNC = library_folder() / "async" / "host"  # without clusters, with asynchronous copies: the norms' backward uses them

pytestmark = pytest.mark.skipif(not (HOST / "broken_kernels").exists(), reason="no host target: `make host` builds it")
WARPS = 32, 64
TARGETS = {"warps of 32": (HOST, 32), "warps of 64": (HOST, 64), "clusters": (AHEAD, 32)}
LIBRARIES = {**TARGETS, "asynchronous copies": (ASYNC, 32)}
targets = pytest.mark.parametrize("target", TARGETS)
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


def run_on_host(file, target, *args, **env):
    """Runs a file of tests on a target, asserts that all pass, and returns the output."""
    library, warp = LIBRARIES[target]
    path = os.pathsep.join([str(Path(liger_ext.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env |= {"LIGER_EXT_LIB": str(library), "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not cuda", HERE / file, *args]
    done = run(*command, warp=warp, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@warp_widths
def test_quick_cases(warp):
    """A few cases of each op. The slow tests below run all cases, and every kernel."""
    run_on_host("host_kernels.py", f"warps of {warp}", "-k", "test_kernel_cases", "-m", "not slow")


@pytest.mark.slow
@targets
def test_every_kernel(target, capsys):
    """Prints the table: kernels, their instances (by dtype, elements of an access, ...), and the cases that they ran
    in."""
    said = run_on_host("host_kernels.py", target, "-rP")
    with capsys.disabled():
        print(f"\n{target}", *(line for line in said.splitlines() if line.startswith("| ")), sep="\n")


@pytest.mark.slow
@targets
@pytest.mark.parametrize("file", ["test_forced_plans.py", "test_gpu_paths.py", "test_predictions.py"])
def test_every_path(file, target):
    run_on_host(file, target)


@pytest.mark.slow
def test_rows_that_are_held():
    """In clusters, with all options, and with infinities and NaN."""
    run_on_host("test_held_logits.py", "clusters")


@pytest.mark.slow
def test_every_layout():
    run_on_host("test_layouts.py", "warps of 32")


@pytest.mark.slow
@pytest.mark.parametrize("file", ["host_kernels.py", "test_forced_plans.py"])
def test_norms_with_asynchronous_copies(file):
    """As on Ampere and Ada."""
    run_on_host(file, "asynchronous copies", "-k", "norm and not group_norm")


@pytest.mark.slow
@targets
def test_sums_of_exponentials_are_as_exact_as_torch(target):
    said = run_on_host("test_as_exact_as_torch.py", target, "-k", "1000 and not 10000")
    assert "8 passed" in said, said  # softmax, cross entropy without and with smoothing, and jsd with five betas


@pytest.mark.slow
def test_rows_of_logits_in_160_kib():
    """With MI355X's shared memory, which has plans that no device with 64 KiB has."""
    said = run_on_host("host_kernels.py", "warps of 64", "-k", "fused or 64_kib", LIGER_EXT_HOST_SHARED="160")
    assert "skipped" not in said, said


# The thread, and the findings; {warp} is the warp's width, which is also the first thread of the second warp.
BROKEN = {
    "MissingBarrier": ("{warp}", "race: stores 4 bytes at shared memory"),
    "MissingDoubleBuffer": (64, "race: loads 4 bytes at shared memory"),
    "RaceInWarp": (1, "race: stores 4 bytes at shared memory + 4; thread 0 has read them, of the same warp"),
    "StoreAfterLoads": (127, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "StoreAfterLoadsInWarp": (11, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "BlockStoreAfterLoads": (7, "race: stores 4 bytes at both + 4 (16 bytes); another block has read them"),
    "RaceOnGlobal": (5, "race: stores 4 bytes at out + 560", "thread 4 has written them"),
    "BlockRace": (7, "race: stores 4 bytes at out + 28", "another block has written them"),
    "ConditionalBarrier": ("{warp}", "divergence: this thread has returned, thread 0 waits at the block barrier"),
    "GroupRace": (
        0,
        "race: loads 4 bytes at shared memory + 256; thread 64 has written them with no barrier between",
    ),
    "MissingGroupDoubleBuffer": (63, "race: stores 4 bytes at shared memory + 0; other threads have read them"),
    "IncompleteGroup": ("{warp}", "divergence: this thread has returned, thread 0 waits at the group barrier"),
    "PartialWarpGroup": (0, "group barrier: group 0 of 16 threads"),
    "DifferentBarriers": (
        3,
        "divergence: this thread waits at the block barrier",
        "thread 0 waits at the block barrier",
    ),
    "EarlyReturn": (9, "divergence: this thread has returned, thread 0 waits at the shuffle"),
    "ShuffleBeyondWarp": (0, "shuffle out of range: lane 0 ^ {warp} is no lane of a warp of {warp}"),
    "UninitialisedShared": (2, "uninitialised: loads 4 bytes at shared memory + 8"),
    "UninitialisedGlobal": (6, "uninitialised: loads 4 bytes at out + 568"),
    "SharedPastEnd": (1, "out of bounds: stores 4 bytes at shared memory + 1024"),
    "GlobalPastEnd": (8, "out of bounds: loads 4 bytes outside of all buffers, at in + 512"),
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
    "OtherMatrixDeclared": (None, "uncovered: the launch declares 3 rows of 136 columns", "no buffer of which"),
    "TooManyThreads": (0, "launched with 128 threads, compiled for at most 64"),
    "PartialWarp": (0, "threads, which is no multiple of the warp's {warp}"),
    "TooMuchSharedMemory": (0, "launched with 65540 bytes of shared memory; the device has 65536"),
}
LAUNCHES = ("TooManyThreads", "PartialWarp", "TooMuchSharedMemory")  # found before the first block runs


# For devices with clusters and copies to shared memory: the block, the thread, and the findings.
BROKEN_TRANSFERS = {
    "UnannouncedPhase": (1, 0, "deadlock: this thread waits for a phase of the mbarrier", "which nobody has announced"),
    "MissingBytes": (
        1,
        0,
        "deadlock: this thread waits for a phase of the mbarrier",
        "of whose 528 bytes 512 have come",
    ),
    "TooManyBytes": (1, 0, "mbarrier: 512 bytes come to the one at shared memory + 512, 496 are announced"),
    "LoadWithoutWait": (
        1,
        32,
        "race: loads 4 bytes at shared memory + 128",
        "brought that this warp has not waited for",
    ),
    "WaitForTheOtherParity": (1, 32, "deadlock: this thread waits for a phase of the mbarrier"),
    "CopyOverLoads": (1, 1, "race: loads 4 bytes at shared memory + 4, which a transfer has brought that this warp"),
    "MissingFence": (
        1,
        0,
        "overwritten: a copy stores 512 bytes at shared memory + 0",
        "loaded without a fence behind it",
    ),
    "EndBeforeTheCopy": (1, 0, "ends: a thread has returned before the block has waited for what comes"),
    "MbarrierWithoutBarrier": (
        1,
        1,
        "mbarrier: the one at shared memory + 512 was initialised by thread 0 with no barrier",
    ),
    "AsynchronousCopy": (1, 3, "race: loads 4 bytes at shared memory + 48, which a transfer may still be bringing"),
    "EndBeforeAsynchronousCopies": (
        1,
        0,
        "ends: thread 0 has returned before it has waited for its asynchronous copies",
    ),
    "MessageWithoutClusterBarrier": (
        1,
        0,
        "mbarrier: the one of another block was initialised by thread 0 with no barrier",
    ),
    "MessageOverLoads": (0, 0, "race: loads 4 bytes at shared memory + 4, which a transfer may still be bringing"),
    "EndBeforeTheMessage": (1, 0, "ends: a thread has returned before the block has waited for what comes"),
    "MissingClusterBarrier": (
        0,
        0,
        "deadlock: this thread waits at the cluster barrier",
        "not all of the cluster have arrived",
    ),
}


def check_broken(folder, warp, name, who, findings):
    """The output names the broken kernel, the error, and the block and thread; the corrected kernel has no findings."""
    found = run(folder / "broken_kernels", name, warp=warp).stdout
    for part in [*findings, f"::{name}\n", who]:
        assert part.format(warp=warp) in found, found
    assert run(folder / "broken_kernels", name, "ok", warp=warp).stdout == ""


@warp_widths
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_found(name, warp):
    thread, *findings = BROKEN[name]
    who = "" if thread is None else f"block {0 if name in LAUNCHES else 1} of 3, thread {thread} of "
    check_broken(HOST, warp, name, who, findings)


@pytest.mark.parametrize("name", BROKEN_TRANSFERS)
def test_a_broken_transfer_is_found(name):
    block, thread, *findings = BROKEN_TRANSFERS[name]
    check_broken(AHEAD, 32, name, f"block {block} of ", [*findings, f"thread {thread} of 128"])


def test_every_broken_kernel_is_tested():
    assert run(HOST / "broken_kernels", warp=32).stdout.split() == list(BROKEN)
    assert run(AHEAD / "broken_kernels", warp=32).stdout.split() == list(BROKEN_TRANSFERS)
