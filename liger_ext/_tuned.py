"""What ``python -m liger_ext tune`` measured on this user's devices: their rates, and launch plans that are faster than
the built-in ones; the file that keeps both, and the table in the library that launches kernels.

The file is JSON in the user's cache folder. Rates are a device's with a driver. An entry has the device's name, the
driver, the kernel and the class of calls that it is for, and the knobs (csrc/launch/knobs.h) that won. Of all entries
the current driver's are handed to the library at import, which needs no device; the library picks a device's when it
makes a plan.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import _C, _load

FORMAT = 1  # of the file


@dataclass(frozen=True)
class Call:
    """Calls that share their knobs. ``rows``: calls with the same rows, rounded up to a power of two; ``vec``: elements
    per access, which follow from dtype and alignment; ``heads``: RoPE's heads of q and of k, and the rotary
    dimension."""

    kernel: str  # an op of _C.plans
    vec: int
    rows: int
    cols: int
    heads: tuple[int, int, int] = (0, 0, 0)

    def row_class(self) -> Call:
        return Call(self.kernel, self.vec, 1 << max(0, self.rows - 1).bit_length(), self.cols, tuple(self.heads))


@dataclass(frozen=True)
class Entry:
    device: str  # the GPU's name, as its driver gives it
    driver: str
    call: Call
    knobs: dict[str, int]
    built_in_us: float
    tuned_us: float

    @staticmethod
    def of(made: dict[str, Any]) -> Entry:
        call = Call(**made.pop("call"))
        return Entry(call=call.row_class(), **made)


@dataclass(frozen=True)
class Rates:
    """How fast a GPU is, as ``_C.Rates`` has it."""

    device: str
    driver: str
    matmul_16: float
    matmul_32: float
    bandwidth: float
    launch: float

    def __post_init__(self) -> None:
        if not all(0 < rate < math.inf for rate in list(vars(self).values())[2:]):
            raise ValueError(f"its rates of {self.device} are not all positive and finite")


def path() -> Path:
    """Where the user's file is, or will be."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "liger_ext" / "tuned.json"


def read(file: Path) -> tuple[list[Entry], list[Rates]]:
    """All that is kept, of whatever device; ValueError says why the file cannot be used."""
    try:
        found = json.loads(file.read_text())
        if found["format"] != FORMAT or found["library"] != _load.cpu_facts.version:
            version = f"liger_ext {found['library']}, format {found['format']}"
            raise ValueError(f"it was made by {version}; this is liger_ext {_load.cpu_facts.version}, format {FORMAT}")
        entries = [Entry.of(made) for made in found["tuned"]]
        pack(entries)
        rates = [Rates(**made) for made in found.get("rates", ())]  # older files have none
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is corrupt ({type(error).__name__}: {error})") from error
    return entries, rates


def write(
    file: Path, device: str, driver: str, measured: Iterable[Call], winners: Iterable[Entry], rates: Rates | None
) -> None:
    """Puts ``winners``, and ``rates`` if they were measured, in place of what the file has for these calls on this
    device with this driver; all else in it stays. A reader sees the old file or the new one."""
    try:
        known, known_rates = read(file)
    except ValueError:  # what cannot be used is not kept
        known, known_rates = [], []
    if rates:
        known_rates = [r for r in known_rates if (r.device, r.driver) != (device, driver)] + [rates]
    gone = {(device, driver, call.row_class()) for call in measured}
    entries = [e for e in known if (e.device, e.driver, e.call) not in gone] + list(winners)
    made = {"format": FORMAT, "library": _load.cpu_facts.version}
    made |= {"rates": [asdict(r) for r in known_rates], "tuned": [asdict(entry) for entry in entries]}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.write_text(json.dumps(made, indent=1))
        os.replace(new, file)


# The library's table -------------------------------------------------------------------------------------------------


def pack(entries: Iterable[Entry]) -> bytes:
    """A table for ``install``."""
    rows = []
    for entry in entries:
        call = entry.call
        rows.append((entry.device, call.kernel, call.vec, call.rows, call.cols, call.heads, _C.Knobs(**entry.knobs)))
    return _C.pack_knobs(rows)


_in_use = b""


def install(table: bytes) -> None:
    """Makes the library's plans take the knobs of this table (``pack``) in place of any before."""
    global _in_use
    library = _load.gpu_kernels()
    if library is None:
        raise RuntimeError(f"there is no library here that launches GPU kernels: {_load.gpu_status()}")
    install = library.liger_ext_gpu_set_knobs
    install.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    if install(table, len(table) // _C.knob_entry_bytes, _C.knob_entry_bytes) != 0:
        raise RuntimeError("liger_ext's GPU library and its Python module are of different builds: build again")
    _in_use = table


def in_use() -> int:
    """How many entries the library has."""
    return len(_in_use) // _C.knob_entry_bytes


@contextlib.contextmanager
def forced(**knobs: int) -> Iterator[None]:
    """Every plan made meanwhile takes these knobs (those of ``_C.Knobs``; without any, the built-in plans), whatever
    the shape. Then the table is again what it was."""
    before = _in_use
    install(_C.pack_knobs([("", "every", 1, 1, 1, (0, 0, 0), _C.Knobs(**knobs))]))
    try:
        yield
    finally:
        install(before)


# Rates ----------------------------------------------------------------------------------------------------------------

_rates: dict[str, _C.Rates] = {}  # by the device's name: the measured ones


def rates_of(profile: _C.DeviceProfile) -> _C.Rates:
    """Those that were measured on such a GPU, or from a data sheet."""
    return _rates.get(profile.name) or _C.device_rates(profile)


def described(rates: Rates | _C.Rates) -> str:
    matmuls = f"matmuls {rates.matmul_16 / 1e12:.0f} Tflop/s in 16 bits and {rates.matmul_32 / 1e12:.0f} in fp32"
    return f"{matmuls}, memory {rates.bandwidth / 1e12:.2f} TB/s, {rates.launch * 1e6:.1f} us to launch a kernel"


def source(profile: _C.DeviceProfile) -> str:
    """Where ``rates_of`` has them from."""
    if profile.name in _rates:
        return "measured"
    bandwidth = _C.device_rates(profile).bandwidth  # no two GPUs of a vendor have the same
    sheets = (known for known in _C.profiles() if known.vendor == profile.vendor)
    return f"from the data sheet of {next(p.name for p in sheets if _C.device_rates(p).bandwidth == bandwidth)}"


def _for_library(rates: Rates) -> _C.Rates:
    made = _C.Rates()
    made.matmul_16, made.matmul_32 = rates.matmul_16, rates.matmul_32
    made.bandwidth, made.launch, made.measured = rates.bandwidth, rates.launch, True
    return made


# At import ------------------------------------------------------------------------------------------------------------


def off() -> bool:
    return os.environ.get("LIGER_EXT_TUNED") == "0"


def load() -> None:
    """Hands the user's entries to the library, and takes the user's rates."""
    file = path()
    value = os.environ.get("LIGER_EXT_TUNED") or "1"
    if value not in ("0", "1"):
        text = f"LIGER_EXT_TUNED is {value!r}, expected 0 (nothing tuned) or 1 (the default); it is taken for 1"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if off() or not os.path.exists(file) or _load.gpu_kernels() is None:
        return
    from ._devices import driver

    try:
        (entries, rates), here = read(file), driver()
        install(pack(entry for entry in entries if entry.driver == here))
        _rates.update({each.device: _for_library(each) for each in rates if each.driver == here})
    except (ValueError, RuntimeError) as error:
        advice = "make it again with `python -m liger_ext tune`, or delete it"
        warnings.warn(f"what was tuned in {file} is ignored: {error}; {advice}", RuntimeWarning, stacklevel=3)
