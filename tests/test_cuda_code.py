"""What nvcc, or clang and CUDA 12's assembler, made of the kernels: registers and local memory of every one that is
built, and kinds of load. Needs nvcc or cuobjdump, no GPU."""

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
CUBINS = ROOT / "build/compile-cuda12"  # by tests/compile_cuda12.sh, in a folder for each architecture
MAX_THREADS, REGISTERS = (
    0x05,
    0x2F,
)  # attributes in a cubin: a block's most threads; a symbol's number and its registers
TOOLKIT = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"
PACKAGES = sysconfig.get_path("purelib") + "/nvidia/cu13/bin"  # of nvidia-cuda-cuobjdump
PATH = os.pathsep.join([TOOLKIT, os.environ["PATH"], PACKAGES])
NVCC, CUOBJDUMP = shutil.which("nvcc", path=PATH), shutil.which("cuobjdump", path=PATH)
needs_nvcc = pytest.mark.skipif(NVCC is None or shutil.which("c++filt") is None, reason="needs nvcc and c++filt")
needs_cubins = pytest.mark.skipif(not (CUBINS / "done").exists(), reason="no cubins of `tests/compile_cuda12.sh`")
needs_cuobjdump = pytest.mark.skipif(
    CUOBJDUMP is None or shutil.which("c++filt") is None, reason="needs cuobjdump and c++filt"
)

# Kernels whose output may be their input's memory: the fused loss's gradient in place of the logits, and dx times a
# row's own factor.
IN_PLACE = {
    "cross_entropy": ("Backward",),
    "cross_entropy_in_place": ("InPlace", "InPlaceHeld"),
    "cross_entropy_tokens": ("InPlaceTokens",),
    "elementwise": ("Scale",),
}


def demangled(text):
    """liger::gpu::entry<liger::gpu::(anonymous namespace)::K<liger::gpu::bf16, 8>>(...) is called K<bf16, 8>."""
    text = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout
    return text.replace("(anonymous namespace)::", "").replace("liger::gpu::", "")


def loads_of_constants(source):
    """{kernel: its loads by way of the cache for memory that nobody writes}."""
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
    """PTX forbids ld.global.nc for memory that is written while the kernel runs, even behind the load."""
    found = loads_of_constants(source)
    in_place = {kernel for kernel in found if kernel.partition("<")[0] in IN_PLACE[source]}
    assert {kernel.partition("<")[0] for kernel in in_place} == set(IN_PLACE[source])
    assert {kernel: found[kernel] for kernel in in_place if found[kernel]} == {}
    if source == "elementwise":  # and the reader sees such loads where there are some
        assert all(loads for kernel, loads in found.items() if kernel.startswith("PartialColumns<float"))


@pytest.mark.slow
@needs_nvcc
def test_dh_is_loaded_as_memory_that_is_written():
    """By the kernels that write h over it: of dh, gate and up only gate and up are constants."""
    found = loads_of_constants("glu")
    with_h = {kernel: loads for kernel, loads in found.items() if re.match("GluBackwardKernel<.*true>", kernel)}
    assert len(with_h) == 3 * 2 * 3  # dtypes, vectors, activations
    for kernel, loads in with_h.items():
        alone = found[kernel.replace("true>", "false>")]
        assert len(loads) * 3 == len(alone) * 2, kernel
    assert any(with_h.values())


def resources(library=None):
    """{architecture: {kernel: (registers, bytes of local memory)}} of a CUDA library; None: of the cubins."""

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
    """A few values may lie in memory of blocks of 1,024 threads, each of which has 64 registers; of others two at most.
    That holds where kernels have been made for the registers there are; elsewhere the compiler keeps up to 256
    bytes."""
    if arch not in ("sm_80", "sm_90a"):
        return memory > 256
    return memory > (128 if registers == 64 else 8)


@needs_cuobjdump
@pytest.mark.parametrize("built_by", LIBRARIES)
def test_registers_are_enough(built_by):
    """On any architecture that a library has; of those of CI, 8.0 with its rings of asynchronous copies among them."""
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
    """The values of an attribute in a cubin's section .nv.info. A record of form 4 is longer than its head."""
    data, at = section.data(), 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4 + (size if form == 4 else 0)
        if attribute == wanted:
            yield struct.unpack(f"<{size // 4}I", data[at - size : at])


def launch_limits(cubin):
    """{kernel: (registers, most threads of a block; None without a launch bound)}."""
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
    """The kernels were made for nvcc's registers; of clang's, up to 280 bytes lie there (9.0a, a norm's backward)."""
    found = resources()
    assert all(len(kernels) > 100 for kernels in found.values())
    assert {f"{name} on {arch}": m for arch, of in found.items() for name, (_, m) in of.items() if m > 288} == {}


@needs_cubins
def test_the_largest_blocks_have_the_registers():
    """A multiprocessor has 65,536; a thread gets eight at a time, and up to 255 without a launch bound."""
    found = {f"{path.parent.name} {k}": of for path in CUBINS.rglob("*.cubin") for k, of in launch_limits(path).items()}
    assert len(found) > 600
    assert {k: of for k, of in found.items() if of[1] is None or -(-of[0] // 8) * 8 * of[1] > 65_536} == {}
