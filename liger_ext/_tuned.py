"""Reads and writes the file with the results of ``python -m liger_ext tune``, and installs them in the library that
launches kernels.

The file is JSON in the user's cache folder. For each GPU, by its name and its driver's version, it has

- the GPU's rates (``Rates``): matmuls in flop/s, memory in bytes/s, and seconds to launch a kernel. The fused loss
  estimates the times of its plans from them;
- entries (``Entry``). An entry has the knobs (csrc/launch/knobs.h) with which a kernel was faster than with its
  built-in launch plan. It applies to calls with equal columns and alignment and about as many rows (``KnobKey``).

The import of liger_ext reads the file. It reads the driver's version from the operating system and initialises no GPU.
The entries of that driver are copied to the library, which looks up a device's entries when it plans a launch.
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
class KnobKey:
    """The facts of a call by which its knobs are looked up; calls with equal facts share their knobs. ``rows``: the
    number of rows; ``row_class`` rounds it up to a power of two, as entries require. ``vec``: elements per memory
    access, which follow from dtype and alignment. ``heads``: RoPE's numbers of heads of q and of k, and the rotary
    dimension."""

    kernel: str  # an op of _C.plans
    vec: int
    rows: int
    cols: int
    heads: tuple[int, int, int] = (0, 0, 0)

    def row_class(self) -> KnobKey:
        return KnobKey(self.kernel, self.vec, 1 << max(0, self.rows - 1).bit_length(), self.cols, tuple(self.heads))


@dataclass(frozen=True)
class Entry:
    """The fastest knobs for the calls of one class on one device and driver, and the times in microseconds with the
    built-in plan and with these knobs."""

    device: str  # the GPU's name, as its driver reports it
    driver: str
    call: KnobKey
    knobs: dict[str, int]
    built_in_us: float
    tuned_us: float

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Entry:
        from . import functional

        call = KnobKey(**fields.pop("call"))
        if call.kernel.removesuffix("_backward") not in functional.__all__:
            raise ValueError(f"no op is called {call.kernel!r}")
        return Entry(call=call.row_class(), **fields)


@dataclass(frozen=True)
class Rates:
    """The rates of a GPU, in the units of ``_C.Rates``: matmuls in flop/s, memory in bytes/s, a launch in seconds."""

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
    """Returns the path of the user's file, whether it exists or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "liger_ext" / "tuned.json"


def read(file: Path) -> tuple[list[Entry], list[Rates]]:
    """Returns the entries and rates of all devices. Raises ValueError, with the reason, if the file cannot be used."""
    try:
        found = json.loads(file.read_text())
        if found["format"] != FORMAT or found["library"] != _load.cpu_facts.version:
            version = f"liger_ext {found['library']}, format {found['format']}"
            raise ValueError(f"it was made by {version}; this is liger_ext {_load.cpu_facts.version}, format {FORMAT}")
        entries = [Entry.from_json(fields) for fields in found["tuned"]]
        pack(entries)
        rates = [Rates(**fields) for fields in found.get("rates", ())]  # older files have none
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it is corrupt ({type(error).__name__}: {error})") from error
    return entries, rates


def write(
    file: Path, device: str, driver: str, measured: Iterable[KnobKey], winners: Iterable[Entry], rates: Rates | None
) -> None:
    """Replaces the file's entries for the ``measured`` calls on this device and driver by ``winners``, and its rates by
    ``rates`` unless None. All other contents stay. The file is replaced atomically."""
    try:
        known, known_rates = read(file)
    except ValueError:  # an unusable file is overwritten
        known, known_rates = [], []
    if rates:
        known_rates = [r for r in known_rates if (r.device, r.driver) != (device, driver)] + [rates]
    gone = {(device, driver, call.row_class()) for call in measured}
    entries = [e for e in known if (e.device, e.driver, e.call) not in gone] + list(winners)
    contents = {"format": FORMAT, "library": _load.cpu_facts.version}
    contents |= {"rates": [asdict(r) for r in known_rates], "tuned": [asdict(entry) for entry in entries]}
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        new = Path(folder) / file.name
        new.write_text(json.dumps(contents, indent=1))
        os.replace(new, file)


# The library's table -------------------------------------------------------------------------------------------------


def pack(entries: Iterable[Entry]) -> bytes:
    """Returns the table of these entries, for ``install``."""
    rows = []
    for entry in entries:
        call = entry.call
        rows.append((entry.device, call.kernel, call.vec, call.rows, call.cols, call.heads, _C.Knobs(**entry.knobs)))
    return _C.pack_knobs(rows)


_in_use = b""


def install(table: bytes) -> None:
    """Installs a table that ``pack`` returned, in place of an earlier one: the library then reads the knobs of its
    launch plans from this table."""
    global _in_use
    library = _load.gpu_kernels()
    if library is None:
        raise RuntimeError(f"there is no library here that launches GPU kernels: {_load.gpu_status()}")
    install = library.liger_ext_gpu_set_knobs
    install.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    if install(table, len(table) // _C.knob_entry_bytes, _C.knob_entry_bytes) != 0:
        raise RuntimeError("liger_ext's GPU library and its Python module are of different builds: build again")
    _in_use = table


def installed_count() -> int:
    """Returns the number of entries in the installed table."""
    return len(_in_use) // _C.knob_entry_bytes


@contextlib.contextmanager
def forced_knobs(**knobs: int) -> Iterator[None]:
    """Returns a context in which every launch is planned with these knobs of ``_C.Knobs``, whatever its shape; without
    knobs, every launch has its built-in plan. The previous table is restored at the end."""
    before = _in_use
    install(_C.pack_knobs([("", "every", 1, 1, 1, (0, 0, 0), _C.Knobs(**knobs))]))
    try:
        yield
    finally:
        install(before)


# Rates ----------------------------------------------------------------------------------------------------------------

_rates: dict[str, _C.Rates] = {}  # measured rates, by the device's name


def device_rates(profile: _C.DeviceProfile) -> _C.Rates:
    """Returns the rates that were measured on a GPU of this name, or else those of a data sheet."""
    return _rates.get(profile.name) or _C.device_rates(profile)


def describe_rates(rates: Rates | _C.Rates) -> str:
    matmuls = f"matmuls {rates.matmul_16 / 1e12:.0f} Tflop/s in 16 bits and {rates.matmul_32 / 1e12:.0f} in fp32"
    return f"{matmuls}, memory {rates.bandwidth / 1e12:.2f} TB/s, {rates.launch * 1e6:.1f} us to launch a kernel"


def rates_source(profile: _C.DeviceProfile) -> str:
    """Returns the source of the rates that ``device_rates`` returns: "measured", or "from the data sheet of" a GPU."""
    if device_rates(profile).measured:
        return "measured"
    return f"from the data sheet of {_C.nearest_reference(profile).name}"


def _for_library(rates: Rates) -> _C.Rates:
    converted = _C.Rates()
    converted.matmul_16, converted.matmul_32 = rates.matmul_16, rates.matmul_32
    converted.bandwidth, converted.launch, converted.measured = rates.bandwidth, rates.launch, True
    return converted


# At import ------------------------------------------------------------------------------------------------------------


def is_disabled() -> bool:
    return os.environ.get("LIGER_EXT_TUNED") == "0"


def load() -> None:
    """Reads the user's file: installs its entries in the library, and stores its rates for ``device_rates``."""
    file = path()
    value = os.environ.get("LIGER_EXT_TUNED") or "1"
    if value not in ("0", "1"):
        text = f"LIGER_EXT_TUNED is {value!r}, expected 0 (nothing tuned) or 1 (the default); 1 is used"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    if is_disabled() or not os.path.exists(file) or _load.gpu_kernels() is None:
        return
    from ._devices import driver

    try:
        (entries, rates), here = read(file), driver()
        install(pack(entry for entry in entries if entry.driver == here))
        _rates.update({each.device: _for_library(each) for each in rates if each.driver == here})
    except (ValueError, RuntimeError) as error:
        advice = "replace it with `python -m liger_ext tune`, or delete it"
        warnings.warn(f"the tuning results in {file} are ignored: {error}; {advice}", RuntimeWarning, stacklevel=3)
