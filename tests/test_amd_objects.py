"""What the compiler made of the kernels for AMD: limits that a launch would hit, registers, kinds of access. From a HIP
build, which needs no AMD hardware: ``tests/compile_gpu.sh hip``."""

import re
import struct
import subprocess

import pytest
from amd import objects

LANES = {"gfx90a": 64, "gfx942": 64, "gfx950": 64, "gfx1100": 32, "gfx1201": 32}  # of a wave
BUILT = [*objects.ARCHITECTURES, *(arch for arch, folder in objects.SEPARATE.items() if folder.exists())]

# What each kernel reads or writes once and should not keep in the caches (Hint::stream in csrc/gpu).
STREAMS = {
    "StreamCopyKernel": {"load", "store"},
    "NormForwardRegisters": {"load", "store"},
    "NormForwardReread": {"load", "store"},
    "NormBackwardRegisters": {"load", "store"},
    "NormBackwardMeans": set(),
    "NormBackwardTiles": {"load", "store"},
    "SumColumns": set(),
    "RopeKernel": {"load", "store"},
    "GluForwardKernel": {"load", "store"},
    "GluBackwardKernel": {"load", "store"},
    "SoftmaxRegisters": {"load", "store"},
    "SoftmaxReread": {"store"},
    "SoftmaxBackwardRegisters": {"load", "store"},
    "SoftmaxBackwardReread": {"store"},
    "Forward": {"load"},
    "Backward": {"load", "store"},
    "InPlace": {"load", "store"},
    "CountTargets": set(),
    "SumLosses": set(),
    "AddLosses": set(),
    "Scale": {"load", "store"},
    "Fill": set(),
    "PartialColumns": {"load"},
    "Product": set(),
}

pytestmark = [
    pytest.mark.skipif(not objects.HIP_LIBRARY.exists(), reason="there is no HIP build: tests/compile_gpu.sh hip"),
    pytest.mark.skipif(not objects.tool("llvm-objdump"), reason="needs LLVM's tools (package llvm-19)"),
]


@pytest.fixture(scope="module", params=BUILT)
def kernels(request):
    """All kernels of an architecture; with instructions where LLVM's disassembler is as new as the compiler."""
    code = request.param in objects.ARCHITECTURES
    found = [kernel for image in objects.images(request.param) for kernel in objects.kernels_of_image(image, code)]
    assert len(found) > 100 and (not code or all(len(k.instructions) > 10 for k in found))
    for kernel in found:
        kernel.arch = request.param
    return found


@pytest.fixture
def disassembled(kernels):
    if not kernels[0].instructions:
        pytest.skip("the disassembler does not know this architecture")
    return kernels


def naming(kernels, wrong):
    return [f"{k.name} on {k.arch}: {wrong(k)}" for k in kernels if wrong(k)]


def test_every_architecture_has_every_kernel():
    symbols = {arch: {k for image in objects.images(arch) for k in objects.metadata_of(image)} for arch in BUILT}
    assert all(found == symbols["gfx942"] for found in symbols.values())


def test_launch_limits(kernels):
    """32 warps of 64 lanes are 2,048 threads: `invalid argument`, on some GPUs only."""
    limits = {".max_flat_workgroup_size": 1024, ".group_segment_fixed_size": 64 << 10, ".kernarg_segment_size": 4096}
    for key, limit in limits.items():
        assert naming(kernels, lambda k, key=key, limit=limit: max(0, k.metadata[key] - limit)) == []


def test_wave_size(kernels):
    assert {k.metadata[".wavefront_size"] for k in kernels} == {LANES[kernels[0].arch]}


def test_no_spills_and_no_scratch(kernels):
    """But scalar ones where rows are unaligned, whose many predicates are scalar: they stay in registers."""

    def wrong(kernel):
        unaligned = re.search(r"NormBackwardRegisters<\w+, 1,", kernel.name)
        spills = kernel.metadata[".vgpr_spill_count"] if unaligned else kernel.spills
        return spills + kernel.metadata[".private_segment_fixed_size"]

    assert naming(kernels, wrong) == []


def test_no_flat_accesses(disassembled):
    """Where the compiler cannot tell global from shared memory: slower, and they wait for shared memory too."""
    assert naming(disassembled, lambda k: k.count("flat_")) == []


# The bit that asks for no caching, in the assembler of each family.
NON_TEMPORAL = {
    "gfx90a": r"\bslc\b",
    "gfx942": r"\bnt\b",
    "gfx1100": r"\bslc\b",
    "gfx1201": r"\bth:TH_(LOAD|STORE)_NT\b",
}


def test_streaming_accesses(disassembled):
    bit = NON_TEMPORAL[disassembled[0].arch]
    for kernel in disassembled:
        family, _, arguments = kernel.name.partition("<")
        assert family in STREAMS, f"{kernel.name} is new: say in STREAMS what it reads or writes once"
        found = {kind for kind in ("load", "store") if kernel.count(rf"global_{kind}_.*{bit}")}
        if re.match(r"(bf16|f16), 1\b", arguments):  # accesses of 2 bytes have no hint
            assert found <= STREAMS[family], kernel.name
        else:
            assert found == STREAMS[family], f"{kernel.name} on {kernel.arch} streams {found}"


def test_variables_that_the_host_asks_for():
    """No kernel uses them, and a compiler leaves out what nothing uses."""
    for arch in BUILT:
        variables = [item for image in objects.images(arch) for item in objects.variables_of(image).items()]
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
    """A kernel with an array in scratch memory and a pointer that may be to any kind of memory has both."""
    source, image = tmp_path / "bad.cpp", tmp_path / "bad.co"
    source.write_text(BAD_KERNEL)
    target = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib", "-O2"]
    subprocess.run([objects.tool("clang++"), *target, source, "-o", image], check=True)
    (bad,) = objects.kernels_of_image(image.read_bytes())
    assert bad.metadata[".private_segment_fixed_size"] >= 64
    assert bad.count("flat_load") + bad.count("flat_store") > 0
