"""An emulated AMD GPU, on which liger_ext runs its GPU library with torch's CPU tensors.

After ``Device("gfx942")`` liger_ext in this process runs its GPU library: the ops check, plan and launch as on a GPU,
and each launch calls ``device.execute``. ``tests/amd/runtime.cpp`` is the C++ half. ``Emulation`` executes the code
object that a HIP build ships for the architecture, instruction by instruction.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amd import emulator, objects

HIP_BUILD = objects.HIP_LIBRARY.parents[1]
LIBRARY = HIP_BUILD / "emulated/libliger_ext_cpu.so"
SHARED_BYTES = {"gfx950": 160 << 10}  # shared memory of a block and of a compute unit; 64 KiB on other architectures
MULTIPROCESSORS = 3  # a small device: persistent blocks get several rows each, a grid has a remainder


def build() -> None:
    """Builds the library from the object files of ``tests/compile_gpu.sh hip``."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = ["cmake", "--build", HIP_BUILD, "--target", "liger_ext_emulated"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}{done.stderr}")


@dataclass(frozen=True)
class Launch:
    """A kernel launch. ``kernel``: the symbol in the code object; ``arguments``: the bytes of its struct."""

    kernel: str
    grid: int
    block: int
    shared_bytes: int
    arguments: bytes


class Device:
    """An emulated device. ``kernels``: the compiler's metadata by symbol; ``names``: short names by symbol;
    ``launched``: the number of launches by short name. An exception from ``execute`` becomes the launch's error."""

    def __init__(self, arch: str, multiprocessors: int = MULTIPROCESSORS) -> None:
        if "liger_ext" in sys.modules:
            raise RuntimeError("the device must be opened before liger_ext is imported")
        self.arch, self.images = arch, objects.images(arch)
        self.kernels: dict[str, dict] = {}
        for image in self.images:
            found = objects.kernel_metadata(image)
            assert not found.keys() & self.kernels.keys(), "two kernels have the same name"
            self.kernels |= found
        self.names = dict(zip(self.kernels, objects.short_names(list(self.kernels)), strict=True))
        self.launched: Counter[str] = Counter()
        self.execute: Callable[[Launch], None]
        variables = [item for image in self.images for item in objects.host_variables(image).items()]
        self._variables = {name: ctypes.create_string_buffer(value, len(value)) for name, value in variables}

        os.environ["LIGER_EXT_LIB"] = str(LIBRARY.parent)
        self._library = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
        self._library.emulated_allocate.restype = ctypes.c_void_p
        self._library.emulated_allocate.argtypes = [ctypes.c_size_t]
        self._library.emulated_free.argtypes = [ctypes.c_void_p]
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *[ctypes.c_int] * 3, ctypes.c_void_p)
        variable = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
        self._callbacks = launch(self._launch), variable(self._variable)
        warp = 64 if arch.startswith("gfx9") else 32
        self.shared_bytes = SHARED_BYTES.get(arch, 64 << 10)
        self._library.emulated_device(arch.encode(), warp, multiprocessors, self.shared_bytes, *self._callbacks)

    def _launch(self, name: bytes, grid: int, block: int, shared_bytes: int, arguments: int) -> int:
        kernel = name.decode()
        try:
            size = self.kernels[kernel][".args"][0][".size"]
            self.execute(Launch(kernel, grid, block, shared_bytes, ctypes.string_at(arguments, size)))
            self.launched[self.names[kernel]] += 1
            return 0
        except BaseException as error:
            self._library.emulated_failure(f"{type(error).__name__}: {error}".encode())
            return 1

    def _variable(self, name: bytes) -> int:
        found = self._variables.get(name.decode())
        return 0 if found is None else ctypes.addressof(found)

    def place(self, tensor: Tensor) -> Tensor:
        """Returns a copy in the device's memory, with the same strides and alignment, followed by an inaccessible
        page."""
        storage = tensor.untyped_storage()
        address = self._library.emulated_allocate(storage.nbytes())
        memory = (ctypes.c_char * storage.nbytes()).from_address(address)
        weakref.finalize(memory, self._library.emulated_free, address)
        if storage.nbytes() == 0:
            return tensor
        flat = torch.frombuffer(memory, dtype=tensor.dtype)
        with torch.no_grad():
            placed = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)
        return placed.requires_grad_(tensor.requires_grad)


class Emulation:
    """Executes launches in the emulator, as a device's ``execute``. ``order``: the order of a block's waves, "forward"
    or "reverse"."""

    def __init__(self, device: Device) -> None:
        self.order = "forward"
        self._run = emulator.load().run
        self._folder = tempfile.TemporaryDirectory(prefix="liger_ext_amd_")
        self._code: dict[str, Any] = {}
        for number, image in enumerate(device.images):
            kernels = objects.kernel_metadata(image)
            if kernels:
                path = Path(self._folder.name) / f"{number}.co"
                path.write_bytes(emulator.readable(image))
                self._code |= dict.fromkeys(kernels, emulator.load().CodeObject(str(path)))

    def __call__(self, launch: Launch) -> None:
        code = self._code[launch.kernel]
        given = [launch.arguments]
        self._run(code, launch.kernel, launch.grid, launch.block, given, launch.shared_bytes, self.order)
