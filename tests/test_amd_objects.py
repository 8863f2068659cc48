"""Tests of the compiled kernels for AMD GPUs: launch limits, spilled registers, and kinds of memory access. They read a
HIP build (``tests/compile_gpu.sh hip``), which needs no AMD hardware."""

import dataclasses
import re
import struct
import subprocess

import instances
import ops
import pytest
from amd import objects

LANES = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}  # lanes of a wave

# Accesses ("load", "store") of each kernel that should bypass the caches (Hint::stream in csrc/gpu).
STREAMS = {
    "StreamCopyKernel": {"load", "store"},
    "Dequantize4bitKernel": set(),
    "SeededDropoutKernel": {"load", "store"},
    "NormForwardRegisters": {"load", "store"},
    "NormForwardTwoPass": {"load", "store"},
    "NormBackwardRegisters": {"load", "store"},
    "NormBackwardRows": {"load", "store"},
    "NormBackwardFew": {"load", "store"},
    "NormBackwardMeans": set(),
    "NormBackwardTiles": {"load", "store"},
    "SumColumns": set(),
    "RopeKernel": {"load", "store"},
    "RopeInterleavedKernel": {"load", "store"},
    "GluForwardKernel": {"load", "store"},
    "GluBackwardKernel": {"load", "store"},
    "SoftmaxRegisters": {"load", "store"},
    "SoftmaxLong": {"load", "store"},
    "SoftmaxBackwardRegisters": {"load", "store"},
    "SoftmaxBackwardLong": {"load", "store"},
    "Forward": {"load"},
    "Backward": {"load", "store"},
    "InPlace": {"load", "store"},
    "InPlaceHeld": {"load", "store"},
    "InPlaceLogProbs": {"load", "store"},
    "CountTargets": set(),
    "SumLosses": set(),
    "AddLosses": set(),
    "Scale": {"load", "store"},
    "Fill": set(),
    "PartialColumns": {"load"},
    "Product": set(),
    **ops.STREAMS,
}

# Kernels that exchange values between lanes through LDS on RDNA, too, because their masks are run-time values.
THROUGH_LDS = {"CountTargets", "SumLosses", "SumColumns"}
THROUGH_LDS |= {"GroupNormBackwardRegisters", "GroupNormBackwardHeld", "GroupNormBackwardSums"}

pytestmark = [
    pytest.mark.skipif(not objects.HIP_LIBRARY.exists(), reason="there is no HIP build: tests/compile_gpu.sh hip"),
    pytest.mark.skipif(not objects.tool("llvm-objdump"), reason="needs LLVM's tools (package llvm-19)"),
]


@pytest.fixture(scope="module", params=objects.BUILT)
def kernels(request):
    """Returns all kernels of an architecture."""
    found = [kernel for image in objects.images(request.param) for kernel in objects.image_kernels(image)]
    assert len(found) > 100 and all(len(kernel.instructions) > 10 for kernel in found)
    for kernel in found:
        kernel.arch = request.param
    return found


def test_every_architecture_has_every_kernel():
    symbols = {
        arch: {k for image in objects.images(arch) for k in objects.kernel_metadata(image)} for arch in objects.BUILT
    }
    assert all(found == symbols[objects.BUILT[0]] for found in symbols.values())


def test_every_kernel_of_the_table_is_there(kernels):
    assert {instances.instance_key(kernel.name) for kernel in kernels} == instances.table(ahead=False).keys()


# Checks of one kernel: each returns a list of problems.


def over_limits(kernel):
    """Blocks of more than 1,024 threads, for instance 32 waves of 64 lanes, fail with `invalid argument` on some GPUs.
    Launches request shared memory dynamically (test_amd_emulated checks each), so the code object must contain none."""
    limits = {".max_flat_workgroup_size": 1024, ".group_segment_fixed_size": 0, ".kernarg_segment_size": 4096}
    return [f"{key} is {kernel.metadata[key]}" for key, limit in limits.items() if kernel.metadata[key] > limit]


def other_wave(kernel):
    lanes = kernel.metadata[".wavefront_size"]
    return [f"waves of {lanes}"] if lanes != LANES[kernel.arch] else []


def spilled(kernel):
    """Spilled registers, or arrays in scratch memory. Kernels for unaligned rows may spill scalar registers, because
    they have many scalar predicates; these spills go to vector registers."""
    keys = [".vgpr_spill_count", ".private_segment_fixed_size"]
    if not re.search(r"NormBackwardRegisters<\w+, 1,", kernel.name):
        keys.append(".sgpr_spill_count")
    return [f"{key} is {kernel.metadata[key]}" for key in keys if kernel.metadata[key]]


def flat(kernel):
    """Flat accesses, for pointers that may be to global or shared memory: they are slower, and wait for shared memory,
    too."""
    return [f"{count} flat accesses"] if (count := kernel.count("flat_")) else []


def through_lds(kernel):
    """Exchanges through LDS. Lanes of a wave of 32 read each other's registers directly; the halves of a wave of 64
    cannot."""
    if LANES[kernel.arch] == 64 or kernel.name.partition("<")[0] in THROUGH_LDS:
        return []
    return [f"{count} exchanges through LDS"] if (count := kernel.count("ds_bpermute|ds_swizzle")) else []


def unread(kernel):
    """Instructions that the disassembler does not decode, which the other checks could not see."""
    return [f"{count} unknown instructions"] if (count := kernel.count(r"\.long|<unknown")) else []


# The modifier of accesses that bypass the caches, in the assembler of each architecture.
NON_TEMPORAL = {
    "gfx90a": r"\bslc\b",
    "gfx942": r"\bnt\b",
    "gfx950": r"\bnt\b",
    "gfx1100": r"\bslc\b",
    "gfx1201": r"\bth:TH_(LOAD|STORE)_NT\b",
}


def other_streams(kernel):
    family, _, arguments = kernel.name.partition("<")
    if family not in STREAMS:
        return ["is not in STREAMS: add the accesses that should bypass the caches"]
    found = {kind for kind in ("load", "store") if kernel.count(rf"global_{kind}_.*{NON_TEMPORAL[kernel.arch]}")}
    if re.match(r"(bf16|f16), 1\b", arguments) and found <= STREAMS[family]:  # 2-byte accesses have no hint
        return []
    return [f"streams {found}"] if found != STREAMS[family] else []


@pytest.mark.parametrize("problems", [over_limits, other_wave, spilled, flat, through_lds, unread, other_streams])
def test_code(kernels, problems):
    assert [f"{k.name} on {k.arch}: {problem}" for k in kernels for problem in problems(k)] == []


METADATA = [
    (over_limits, ".max_flat_workgroup_size", 1088),
    (over_limits, ".group_segment_fixed_size", 4),
    (over_limits, ".kernarg_segment_size", 4104),
    (other_wave, ".wavefront_size", 48),
    (spilled, ".vgpr_spill_count", 1),
    (spilled, ".sgpr_spill_count", 1),
    (spilled, ".private_segment_fixed_size", 4),
]
INSTRUCTIONS = [
    (flat, "global_load_dwordx4", "flat_load_dwordx4"),
    (flat, "global_load_b128", "flat_load_b128"),
    (through_lds, "v_permlanex16_b32", "ds_bpermute_b32"),
    (unread, "s_endpgm", ".long 0xd2680001"),
    (other_streams, "global_store", "ds_store"),
]


def test_each_check_finds_what_it_is_for(kernels):
    """Each check reports a problem in a copy of a kernel that has only that problem."""
    kernel = next(k for k in kernels if k.name.startswith("NormForwardRegisters<bf16, 8"))
    for problems, key, value in METADATA:
        wrong = dataclasses.replace(kernel, metadata=kernel.metadata | {key: value})
        assert problems(kernel) == [] != problems(wrong), key
    for problems, there, instead in INSTRUCTIONS:
        changed = [line.replace(there, instead) for line in kernel.instructions]
        wrong = dataclasses.replace(kernel, instructions=changed)
        assert (problems(wrong) != []) == (changed != kernel.instructions), there
    plain = [re.sub(NON_TEMPORAL[kernel.arch], "", line) for line in kernel.instructions]
    wrong = dataclasses.replace(kernel, instructions=plain)
    assert other_streams(wrong) == ["streams set()"]


def test_variables_that_the_host_asks_for():
    """Code objects contain the variables that the host looks up, although no kernel uses them."""
    for arch in objects.BUILT:
        variables = [item for image in objects.images(arch) for item in objects.host_variables(image).items()]
        betas = [value for name, value in variables if "device_beta" in name]
        assert betas == [struct.pack("<2f", 0, 1)]


BAD_KERNEL = """
extern "C" __attribute__((amdgpu_kernel)) void bad(int** table, int n) {
  volatile int kept[16];
  for (int i = 0; i < 16; ++i) kept[i] = n * i;
  *table[n] = kept[n & 15];
}
"""


def test_the_reader_sees_what_the_checks_look_for(tmp_path):
    """The reader of code objects finds scratch memory and flat accesses in a kernel that has both."""
    source, image = tmp_path / "bad.cpp", tmp_path / "bad.co"
    source.write_text(BAD_KERNEL)
    target = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib", "-O2"]
    subprocess.run([objects.tool("clang++"), *target, source, "-o", image], check=True)
    (bad,) = objects.image_kernels(image.read_bytes())
    assert bad.metadata[".private_segment_fixed_size"] >= 64
    assert bad.count("flat_load") + bad.count("flat_store") > 0
