"""Finds the emulator of AMD's instructions, which is not part of this project, and mends what it gets wrong."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType

VARIABLE = "LIGER_EXT_AMD_EMULATOR"
HOW_TO_GET_IT = f"""There is no emulator of AMD's instructions here. Set {VARIABLE} to a folder that has
  tinygrad/    a checkout of github.com/tinygrad/tinygrad, whose test/mockgpu/amd/emu.py executes the instructions
               (the checkout may be elsewhere: then TINYGRAD names it)
  amd_run.py   a loader of code objects on top of it: CodeObject(path) and
               run(code_object, kernel, grid, block, arguments, dynamic_lds, order), with arguments as bytes"""


class EmulatorMissing(RuntimeError):
    """There is no emulator on this machine; the text says how to get it."""


@functools.cache
def load() -> ModuleType:
    """The module amd_run. Compiled instructions are cached in a folder of its own."""
    folder = Path(os.environ.get(VARIABLE) or os.devnull)
    checkout = Path(os.environ.setdefault("TINYGRAD", str(folder / "tinygrad")))
    if not (folder / "amd_run.py").exists() or not (checkout / "test/mockgpu/amd/emu.py").exists():
        raise EmulatorMissing(HOW_TO_GET_IT)
    os.environ.setdefault("AMD_RUN_CACHE", str(Path.home() / ".cache/liger_ext_amd"))
    sys.path.insert(0, str(folder))
    try:
        import amd_run
    finally:
        sys.path.remove(str(folder))
    _mend(amd_run.emulator())
    return amd_run


def _mend(emu: ModuleType) -> None:
    """On RDNA the 16-bit operands v128 to v255 are the upper halves of v0 to v127, and the emulator takes them for that
    on CDNA too, where they are registers like the others: kernels with more than 128 registers got wrong results."""
    emu._first_upper_half = lambda inst, first: 1 << 20 if type(inst).__module__.split(".")[-2] == "cdna" else first
    for name in ("_load_vsrc0", "_compile_vop12", "_compile_vopc"):
        old = getattr(emu, name)
        source = inspect.getsource(old)
        for first in (128, 384):
            source = source.replace(f">= _c({first})", f">= _c(_first_upper_half(inst, {first}))")
        exec(compile(source, emu.__file__, "exec"), vars(emu))
        for kind, handler in emu._INST_HANDLERS.items():
            if handler is old:
                emu._INST_HANDLERS[kind] = getattr(emu, name)


def readable(image: bytes) -> bytes:
    """A code object without an instruction that the emulator cannot read, gfx90a's buffer_wbinvl1_vol, which empties a
    cache. There are no caches: it becomes two s_nop."""
    return image.replace(bytes.fromhex("0000fce000000000"), bytes.fromhex("000080bf") * 2)
