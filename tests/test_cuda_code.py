"""Tests of the machine code that nvcc, or clang with CUDA 12's assembler, generates for the kernels: registers and
local memory of every built kernel, and kinds of loads. They need nvcc or cuobjdump, but no GPU."""

import os
import re
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from liger_ext import _load

ROOT = Path(__file__).parents[1]
LIBRARIES = {
    "make build": _load.library_folder() / "libliger_ext_cuda.so",
    "tests/compile_gpu.sh cuda": ROOT / "build/compile-cuda/lib/libliger_ext_cuda.so",
}
CUBINS = ROOT / "build/compile-cuda12"  # written by tests/compile_cuda12.sh, a folder for each architecture
MAX_THREADS, REGISTERS = (
    0x05,
    0x2F,
)  # attributes in a cubin: maximum threads of a block; (symbol number, registers)
TOOLKIT = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"
PACKAGES = sysconfig.get_path("purelib") + "/nvidia/cu13/bin"  # the package nvidia-cuda-cuobjdump
PATH = os.pathsep.join([TOOLKIT, os.environ["PATH"], PACKAGES])
NVCC, CUOBJDUMP = shutil.which("nvcc", path=PATH), shutil.which("cuobjdump", path=PATH)
needs_nvcc = pytest.mark.skipif(NVCC is None or shutil.which("c++filt") is None, reason="needs nvcc and c++filt")
needs_cubins = pytest.mark.skipif(not (CUBINS / "done").exists(), reason="no cubins of `tests/compile_cuda12.sh`")
needs_cuobjdump = pytest.mark.skipif(
    CUOBJDUMP is None or shutil.which("c++filt") is None, reason="needs cuobjdump and c++filt"
)

# Kernels that may write their output in place: the fused loss's gradient replaces the logits, and dx times a factor of
# each row replaces dx.
IN_PLACE = {
    "cross_entropy": ("Backward",),
    "cross_entropy_in_place": ("InPlace", "InPlaceHeld"),
    "cross_entropy_log_probs": ("InPlaceLogProbs",),
    "elementwise": ("Scale",),
}


def demangled(text):
    """Demangles and shortens: liger::gpu::entry<liger::gpu::(anonymous namespace)::K<liger::gpu::bf16, 8>>(...) becomes
    K<bf16, 8>."""
    text = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    return text.replace("(anonymous namespace)::", "").replace("liger::gpu::", "")


def noncoherent_loads(source):
    """Returns {kernel: its loads through the non-coherent cache (ld.global.nc)}."""
    flags = "-gencode arch=compute_90a,code=compute_90a -std=c++20 -O3 --expt-relaxed-constexpr -diag-suppress=20012"
    made = [NVCC, *flags.split(), "-DLIGER_BACKEND=gpu", "-Icsrc", "--ptx", f"csrc/gpu/{source}.cu", "-o", "-"]
    ptx = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {}
    for body in re.split(r"(?m)^(?=[.a-z ]*\.entry )", ptx)[1:]:
        name = re.search(r"entry<(.*)>\(", demangled(re.search(r"\.entry (\w+)", body)[1]))[1]
        found[name] = re.findall(r"ld\.global\S*\.nc\S*", body)
    return found


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("source", IN_PLACE)
def test_kernels_that_write_in_place_load_what_may_be_written(source):
    """PTX forbids ld.global.nc for memory that the kernel writes, even if it writes after the load."""
    found = noncoherent_loads(source)
    in_place = {kernel for kernel in found if kernel.partition("<")[0] in IN_PLACE[source]}
    assert {kernel.partition("<")[0] for kernel in in_place} == set(IN_PLACE[source])
    assert {kernel: found[kernel] for kernel in in_place if found[kernel]} == {}
    if source == "elementwise":  # the reader finds ld.global.nc in a kernel that has it
        assert all(loads for kernel, loads in found.items() if kernel.startswith("PartialColumns<float"))


@pytest.mark.slow
@needs_nvcc
def test_dh_is_loaded_as_memory_that_is_written():
    """Kernels that overwrite dh with h load only gate and up with ld.global.nc."""
    found = noncoherent_loads("glu")
    with_h = {kernel: loads for kernel, loads in found.items() if re.match("GluBackwardKernel<.*true>", kernel)}
    assert len(with_h) == 3 * 2 * 3  # dtypes, vectors, activations
    for kernel, loads in with_h.items():
        alone = found[kernel.replace("true>", "false>")]
        assert len(loads) * 3 == len(alone) * 2, kernel
    assert any(with_h.values())


def resources(library=None):
    """Returns {architecture: {kernel: (registers, bytes of local memory)}} of a CUDA library, or of the cubins for
    None."""

    def usage(file):
        return subprocess.run([CUOBJDUMP, "-res-usage", file], capture_output=True, text=True).stdout

    if library:
        text = usage(library)
    else:
        text = "".join(f"arch = {path.parent.name}\n{usage(path)}" for path in CUBINS.glob("sm_*/*.cubin"))
    text, found = demangled(text), {}
    for section in re.split(r"(?=^arch = sm_)", text, flags=re.M)[1:]:
        kernels = re.findall(r"Function void entry<(.*)>\(.*\n\s*REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", section)
        of_arch = found.setdefault(re.match(r"arch = (\w+)", section)[1], {})
        of_arch |= {name: (int(registers), int(stack) + int(local)) for name, registers, stack, local in kernels}
    return found


def spilled(arch, registers, memory):
    """Returns whether a kernel spills more than allowed. In blocks of 1,024 threads, with 64 registers each, a thread
    may spill 128 bytes; in other blocks two values. These limits hold for the architectures for which kernels are
    tuned; on the others a thread may spill 256 bytes."""
    if arch not in ("sm_80", "sm_90a"):
        return memory > 256
    return memory > (128 if registers == 64 else 8)


@needs_cuobjdump
@pytest.mark.parametrize("built_by", LIBRARIES)
def test_registers_are_enough(built_by):
    """Kernels do not spill on any architecture of a library. CI builds several, among them 8.0 with pipeline stages of
    asynchronous copies."""
    if not LIBRARIES[built_by].exists():
        pytest.skip(f"no library of `{built_by}`")
    found = resources(LIBRARIES[built_by])
    if not found:
        pytest.skip(f"the library of `{built_by}` has no CUDA machine code")
    assert all(len(kernels) > 100 for kernels in found.values()), {arch: len(of) for arch, of in found.items()}
    assert {
        f"{name} on {arch}": m for arch, of in found.items() for name, (r, m) in of.items() if spilled(arch, r, m)
    } == {}


def attributes(section, wanted):
    """Yields the values of an attribute in a cubin's section .nv.info. Only records of form 4 have data after the
    header."""
    data, at = section.data(), 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4 + (size if form == 4 else 0)
        if attribute == wanted:
            yield struct.unpack(f"<{size // 4}I", data[at - size : at])


def launch_limits(cubin):
    """Returns {kernel: (registers, maximum threads of a block, or None without a launch bound)}."""
    with open(cubin, "rb") as file:
        elf, found = ELFFile(file), {}
        if section := elf.get_section_by_name(".nv.info"):
            symbols = elf.get_section_by_name(".symtab")
            for number, registers in attributes(section, REGISTERS):
                kernel = symbols.get_symbol(number).name
                threads = attributes(elf.get_section_by_name(f".nv.info.{kernel}"), MAX_THREADS)
                found[kernel] = registers, next(threads, (None,))[0]
        return found


@needs_cubins
def test_every_source_compiles_with_cuda_12():
    sources = {path.stem for path in (ROOT / "csrc/gpu").glob("*.cu")}
    compiled = {folder.name: {path.stem for path in folder.glob("*.cubin")} for folder in CUBINS.glob("sm_*")}
    assert compiled == dict.fromkeys(("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"), sources)


@needs_cubins
@needs_cuobjdump
def test_local_memory_with_cuda_12():
    """The kernels are tuned for nvcc's register allocation; with clang's a thread spills up to 280 bytes (a norm's
    backward on 9.0a)."""
    found = resources()
    assert all(len(kernels) > 100 for kernels in found.values())
    assert {f"{name} on {arch}": m for arch, of in found.items() for name, (_, m) in of.items() if m > 288} == {}


@needs_cubins
def test_the_largest_blocks_have_the_registers():
    """The largest block of every kernel fits into the 65,536 registers of a multiprocessor. A thread receives registers
    in units of eight, and up to 255 without a launch bound."""
    found = {f"{path.parent.name} {k}": of for path in CUBINS.rglob("*.cubin") for k, of in launch_limits(path).items()}
    assert len(found) > 600
    assert {k: of for k, of in found.items() if of[1] is None or -(-of[0] // 8) * 8 * of[1] > 65_536} == {}
