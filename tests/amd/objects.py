"""Reads the AMD code objects of a HIP build: metadata and instructions of their kernels.

A HIP object file, or a library linked from several, has in its section .hip_fatbin one bundle for each source file. A
bundle contains one ELF file for each architecture. llvm-objdump disassembles them; no part of ROCm is needed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import msgpack
from elftools.elf.elffile import ELFFile

BUILD = Path(__file__).parents[2] / "build"
HIP_LIBRARY = BUILD / "compile-hip/lib/libliger_ext_hip.so"  # built by tests/compile_gpu.sh hip
SEPARATE = {"gfx950": BUILD / "compile-gfx950"}  # code objects of another compiler, built by tests/compile_gfx950.sh


def _architectures() -> tuple[str, ...]:
    """Returns the architectures in the HIP library, or the supported ones if it is not built."""
    cache = HIP_LIBRARY.parents[1] / "CMakeCache.txt"
    built = re.search(r"(?m)^LIGER_EXT_HIP_ARCHS:\w+=(.*)$", cache.read_text()) if HIP_LIBRARY.exists() else None
    return tuple(built[1].split(";")) if built else ("gfx90a", "gfx942", "gfx1100", "gfx1201")


ARCHITECTURES = _architectures()
BUILT = (*ARCHITECTURES, *(arch for arch, folder in SEPARATE.items() if (folder / "done").exists()))
BUNDLE_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"
METADATA_NOTE = 32  # NT_AMDGPU_METADATA
MACHINE_AT, GFX942, GFX950 = 48, 0x4C, 0x4F  # the low byte of an ELF file's e_flags


@dataclass
class Kernel:
    """A kernel in a code object. ``name`` is demangled and short, ``NormForwardTwoPass<bf16, 8, true, false>``;
    ``metadata`` comes from the compiler."""

    symbol: str
    name: str
    metadata: dict
    instructions: list[str] = field(repr=False)
    arch: str = ""

    def count(self, pattern: str) -> int:
        """Returns the number of instructions whose beginning matches a regular expression."""
        return sum(re.match(pattern, line) is not None for line in self.instructions)


def bundled_images(bundle: bytes) -> dict[str, bytes]:
    """Returns the ELF files of one bundle by architecture."""
    images, at = {}, len(BUNDLE_MAGIC) + 8
    (count,) = struct.unpack_from("<Q", bundle, len(BUNDLE_MAGIC))
    for _ in range(count):
        offset, size, name_size = struct.unpack_from("<3Q", bundle, at)
        target = bundle[at + 24 : at + 24 + name_size].decode()
        at += 24 + name_size
        if target.startswith("hip"):
            images[target.rpartition("-")[2]] = bundle[offset : offset + size]
    return images


def code_images(library: os.PathLike | str) -> list[dict[str, bytes]]:
    """Returns the ELF files of each source of a HIP library, by architecture."""
    with open(library, "rb") as file:
        section = ELFFile(file).get_section_by_name(".hip_fatbin")
        data = section.data() if section else b""
    starts = [match.start() for match in re.finditer(re.escape(BUNDLE_MAGIC), data)]
    return [bundled_images(data[start:]) for start in starts]


def kernel_metadata(image: bytes) -> dict[str, dict]:
    """Returns the metadata of a code object's kernels by symbol; empty for a code object without kernels."""
    for segment in ELFFile(io.BytesIO(image)).iter_segments("PT_NOTE"):
        for note in segment.iter_notes():
            if note["n_name"] == "AMDGPU" and note["n_type"] == METADATA_NOTE:
                found = msgpack.unpackb(note["n_descdata"]).get("amdhsa.kernels", [])
                return {kernel[".symbol"].removesuffix(".kd"): kernel for kernel in found}
    return {}


def host_variables(image: bytes) -> dict[str, bytes]:
    """Returns the initial values of the variables that the host can look up in a code object, by symbol."""
    elf, found = ELFFile(io.BytesIO(image)), {}
    for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
        if symbol["st_info"]["type"] == "STT_OBJECT" and not symbol.name.endswith(".kd"):
            section = elf.get_section(symbol["st_shndx"])
            start = symbol["st_value"] - section["sh_addr"]
            found[symbol.name] = section.data()[start : start + symbol["st_size"]]
    return found


def tool(name: str) -> str | None:
    """Returns the path of an LLVM program, of the HIP build's version if it is installed, or None."""
    return shutil.which(f"{name}-19") or shutil.which(name)


def short_names(symbols: list[str]) -> list[str]:
    """Demangles symbols: entry<liger::gpu::(anonymous namespace)::K<liger::gpu::bf16, 8>>(...) becomes K<bf16, 8>."""
    done = subprocess.run([tool("llvm-cxxfilt"), *symbols], capture_output=True, text=True, check=True)
    clean = [re.sub(r"liger::(gpu::)?|\(anonymous namespace\)::", "", line) for line in done.stdout.splitlines()]
    return [re.sub(r"^void entry<(.*?)>\(.*$", r"\1", line) for line in clean]


# {upper half of the first word of an instruction that only gfx950 has: that of a gfx942 instruction with the same
# operands}. v_cvt_pk_f16_f32, v_cvt_pk_bf16_f32: v_add_f32; v_bitop3_b32: v_fma_f32.
NEW_IN_GFX950 = {0xD267: 0xD101, 0xD268: 0xD101, 0xD234: 0xD1CB}


def as_gfx942(image: bytes) -> bytes:
    """Translates gfx950's code for a disassembler without support for gfx950 (LLVM 19)."""
    image = image[:MACHINE_AT] + bytes([GFX942]) + image[MACHINE_AT + 1 :]
    text = ELFFile(io.BytesIO(image)).get_section_by_name(".text")
    if text is None:
        return image
    words = [word for (word,) in struct.iter_unpack("<I", text.data())]
    words = [NEW_IN_GFX950[w >> 16] << 16 | w & 0xFF if w >> 16 in NEW_IN_GFX950 else w for w in words]
    start, end = text["sh_offset"], text["sh_offset"] + text["sh_size"]
    return image[:start] + struct.pack(f"<{len(words)}I", *words) + image[end:]


def disassembled(image: bytes) -> dict[str, list[str]]:
    """Returns the instructions of every function of a code object by symbol, without the comments that objdump
    appends."""
    if image[MACHINE_AT] == GFX950:
        image = as_gfx942(image)
    with tempfile.NamedTemporaryFile(suffix=".elf") as file:
        file.write(image)
        file.flush()
        command = [tool("llvm-objdump"), "-d", "--no-show-raw-insn", "--no-leading-addr", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"(?:[0-9a-f]+ )?<(\S+)>:$", line):
            current = functions.setdefault(match[1], [])
        elif line.startswith(("\t", " ")):
            current.append(line.split("//")[0].strip())
    return functions


def image_kernels(image: bytes) -> list[Kernel]:
    metadata = kernel_metadata(image)
    if not metadata:
        return []
    functions = disassembled(image)
    names = short_names(list(metadata))
    return [Kernel(k, name, m, functions[k]) for (k, m), name in zip(metadata.items(), names, strict=True)]


def images(arch: str) -> list[bytes]:
    """Returns an architecture's code objects, one for each source file. FileNotFoundError names the script that
    compiles them."""
    if arch in SEPARATE:
        found = [path.read_bytes() for path in sorted(SEPARATE[arch].glob("*.co")) if arch in BUILT]
        script = f"tests/compile_{arch}.sh"
    else:
        found = (
            [by_arch[arch] for by_arch in code_images(HIP_LIBRARY) if arch in by_arch] if HIP_LIBRARY.exists() else []
        )
        script = "tests/compile_gpu.sh hip"
    if not found:
        raise FileNotFoundError(f"there is no code for {arch}: run {script}")
    return found
