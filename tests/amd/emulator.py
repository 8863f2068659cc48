"""Finds the emulator of AMD's instructions, which is not part of this project, and corrects known errors of it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

VARIABLE = "LIGER_EXT_AMD_EMULATOR"
HOW_TO_GET_IT = f"""There is no emulator of AMD's instructions here. Set {VARIABLE} to a folder that has
  tinygrad/    a checkout of github.com/tinygrad/tinygrad, whose test/mockgpu/amd/emu.py executes the instructions
               (the checkout may be elsewhere: then TINYGRAD names it)
  amd_run.py   a loader of code objects on top of it: CodeObject(path) and
               run(code_object, kernel, grid, block, arguments, dynamic_lds, order), with arguments as bytes"""


class EmulatorMissing(RuntimeError):
    """Raised if this machine has no emulator; the text explains how to install one."""


@functools.cache
def load() -> ModuleType:
    """Imports the module amd_run. It caches compiled instructions in a separate folder for each version of this
    file."""
    folder = Path(os.environ.get(VARIABLE) or os.devnull)
    checkout = Path(os.environ.setdefault("TINYGRAD", str(folder / "tinygrad")))
    if not (folder / "amd_run.py").exists() or not (checkout / "test/mockgpu/amd/emu.py").exists():
        raise EmulatorMissing(HOW_TO_GET_IT)
    os.environ["AMD_RUN_CACHE"] = _cache(os.environ.get("AMD_RUN_CACHE", str(Path.home() / ".cache/liger_ext_amd")))
    sys.path.insert(0, str(folder))
    try:
        import amd_run
    finally:
        sys.path.remove(str(folder))
    _mend(amd_run.emulator())
    return amd_run


def _cache(folder: str) -> str:
    """Returns the cache folder of this version of the file, so that corrections take effect. A child process inherits
    its parent's folder."""
    version = hashlib.sha1(Path(__file__).read_bytes()).hexdigest()[:16]
    return folder if Path(folder).name == version else str(Path(folder) / version)


def _changed(emu: ModuleType, function: Callable, changes: dict[str, str]) -> Callable:
    """Returns a function of the emulator with parts of its source replaced."""
    source, scope = textwrap.dedent(inspect.getsource(function)), {}
    for old, new in changes.items():
        if old not in source:
            raise RuntimeError(f"the emulator's {function.__name__} has no {old!r}: it is not the version known here")
        source = source.replace(old, new)
    exec(compile(source, emu.__file__, "exec"), vars(emu), scope)
    return scope[function.__name__]


def _mend(emu: ModuleType) -> None:
    _mend_upper_halves(emu)
    _mend_lanes(emu)
    _add_swizzle(emu)


def _mend_upper_halves(emu: ModuleType) -> None:
    """Corrects 16-bit operands. On RDNA v128 to v255 mean the upper halves of v0 to v127. The emulator treats them
    alike on CDNA, where they are ordinary registers, so that kernels with more than 128 registers computed wrong
    results."""
    emu._first_upper_half = lambda inst, first: 1 << 20 if type(inst).__module__.split(".")[-2] == "cdna" else first
    firsts = {"_load_vsrc0": (384,), "_compile_vop12": (128,), "_compile_vopc": (128, 384)}
    for name, numbers in firsts.items():
        old = getattr(emu, name)
        changes = {f">= _c({first})": f">= _c(_first_upper_half(inst, {first}))" for first in numbers}
        setattr(emu, name, _changed(emu, old, changes))
        for kind, handler in emu._INST_HANDLERS.items():
            if handler is old:
                emu._INST_HANDLERS[kind] = getattr(emu, name)


def _all_lanes(ctx, register):
    """Copies a register of every lane. An instruction that reads other lanes' registers reads all of them before it
    writes one; the emulator processes one lane after another."""
    emu = inspect.getmodule(type(ctx))
    lane = ctx.range()
    copy = emu.UOp.placeholder((ctx.wave_size,), emu.dtypes.uint32, slot=0, addrspace=emu.AddrSpace.LOCAL)
    return copy.after(copy.index(lane).store(ctx.rvgpr_dyn(register, lane)).end(lane))


def _mend_lanes(emu: ModuleType) -> None:
    """Corrects instructions that read other lanes. Data parallel primitives (DPP16) with equal source and destination
    read lanes that were already written. They also read inactive lanes, which count as out of bounds unless `fi` is
    set. v_permlanex16 and similar instructions read a literal constant as a register."""
    emu._all_lanes = _all_lanes
    read = "ctx.rvgpr_dyn(ctx.inst_field(type(inst).vsrc0), safe_src_lane)"
    switched_on = "(_c(_iattr(inst, 'fi')).ne(_c(0)) | _lane_active(ctx.rexec(), safe_src_lane))"
    changes = {
        read: "_all_lanes(ctx, ctx.inst_field(type(inst).vsrc0)).index(safe_src_lane).load()\n"
        f"  valid = valid & {switched_on}"
    }
    emu._load_dpp16_src0 = _changed(emu, emu._load_dpp16_src0, changes)
    changes = {f"(src{n}_off, _c(0, dtypes.int))": f"(src{n}_off, _c(0, dtypes.int), 32, literal)" for n in (1, 2)}
    changes["pcode = get_pcode(op)"] = "pcode, literal = get_pcode(op), self.optional_field(inst, 'literal')"
    emu._Ctx.compile_lane_pcode = _changed(emu, emu._Ctx.compile_lane_pcode, changes)


def _add_swizzle(emu: ModuleType) -> None:
    """Adds ds_swizzle in its mode with masks: lane i of 32 reads lane ((i & and) | or) ^ xor, or 0 if that is
    inactive."""

    def swizzle(inst, ctx):
        offset, lane, number = (
            inst.offset1 << 8 | inst.offset0,
            ctx.range(),
            functools.partial(emu._c, dtype=emu.dtypes.int),
        )
        if offset & 0x8000:
            raise NotImplementedError(f"ds_swizzle {offset:#x}")
        keep, put, flip = (offset >> at & 31 for at in (0, 5, 10))
        source = ((lane & number(keep | ~31)) | number(put)) ^ number(flip)
        value = _all_lanes(ctx, ctx.inst_field(type(inst).addr)).index(source).load()
        value = emu._lane_active(ctx.rexec(), source).where(value, emu._c(0))
        store = ctx.wvgpr_dyn(ctx.inst_field(type(inst).vdst), lane, value, ctx.rexec())
        return emu.UOp.sink(store.end(lane), *ctx.inc_pc())

    def handler(old, inst, ctx):
        return (swizzle if "DS_SWIZZLE" in emu._op_name(inst) else old)(inst, ctx)

    for kind in emu._inst_kinds("DS"):
        emu._INST_HANDLERS[kind] = functools.partial(handler, emu._INST_HANDLERS[kind])


def readable(image: bytes) -> bytes:
    """Replaces an instruction that the emulator cannot decode, gfx90a's buffer_wbinvl1_vol, with two s_nop. It
    invalidates a cache, and the emulator has none."""
    return image.replace(bytes.fromhex("0000fce000000000"), bytes.fromhex("000080bf") * 2)
