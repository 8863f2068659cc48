"""An AMD GPU in an emulator, as a device of torch's CPU tensors.

``Device("gfx942")`` makes this process's liger_ext run its GPU library: the ops check, plan and launch as they do
on a GPU, and each launch executes the architecture's code object, the one that a HIP build ships, instruction by
instruction. ``tests/amd/runtime.cpp`` is the C++ half.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amd import emulator, objects

HIP_BUILD = objects.HIP_LIBRARY.parents[1]
LIBRARY = HIP_BUILD / "emulated/libliger_ext_cpu.so"
MULTIPROCESSORS = 3  # a small device: persistent blocks get several rows each, a grid has a remainder


def build() -> None:
    """Builds the library, from the objects of ``tests/compile_gpu.sh hip``."""
    subprocess.run(["cmake", "--build", HIP_BUILD, "--target", "liger_ext_emulated"], check=True, capture_output=True)


class Device:
    """``order``: "forward" or "reverse", which wave of a block goes first; ``launched``: how often each kernel ran."""

    def __init__(self, arch: str) -> None:
        self.arch, self.order = arch, "forward"
        self.launched: Counter[str] = Counter()
        self._emulator = emulator.load()
        self._folder = tempfile.TemporaryDirectory(prefix="liger_ext_amd_")
        self._code: dict[str, Any] = {}
        self._variables: dict[str, Any] = {}
        self._find_code()
        self.names = dict(zip(self._code, objects.short_names(list(self._code)), strict=True))

        if "liger_ext" in sys.modules:
            raise RuntimeError("the device must be opened before liger_ext is imported")
        os.environ["LIGER_EXT_LIB"] = str(LIBRARY.parent)
        self._library = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
        self._library.emulated_allocate.restype = ctypes.c_void_p
        self._library.emulated_allocate.argtypes = [ctypes.c_size_t]
        self._library.emulated_free.argtypes = [ctypes.c_void_p]
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *[ctypes.c_int] * 3, ctypes.c_void_p)
        variable = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
        self._callbacks = launch(self._launch), variable(self._variable)
        warp = 64 if arch.startswith("gfx9") else 32
        self._library.emulated_device(arch.encode(), warp, MULTIPROCESSORS, *self._callbacks)

    def _find_code(self) -> None:
        for number, image in enumerate(objects.images(self.arch)):
            kernels = objects.metadata_of(image)
            if kernels:
                path = Path(self._folder.name) / f"{number}.co"
                path.write_bytes(image)
                code = self._emulator.CodeObject(str(path))
                assert not kernels.keys() & self._code.keys(), "two kernels of one name"
                self._code |= dict.fromkeys(kernels, code)
            variables = objects.variables_of(image)
            self._variables |= {k: ctypes.create_string_buffer(v, len(v)) for k, v in variables.items()}

    def _launch(self, name: bytes, grid: int, block: int, shared_bytes: int, arguments: int) -> int:
        try:
            kernel = name.decode()
            code = self._code[kernel]
            given = ctypes.string_at(arguments, code.kernels[kernel][".args"][0][".size"])
            self._emulator.run(code, kernel, grid, block, [given], shared_bytes, self.order)
            self.launched[self.names[kernel]] += 1
            return 0
        except BaseException as error:
            self._library.emulated_failure(str(error).encode())
            return 1

    def _variable(self, name: bytes) -> int:
        found = self._variables.get(name.decode())
        return 0 if found is None else ctypes.addressof(found)

    def place(self, tensor: Tensor) -> Tensor:
        """A copy in the device's memory, with the same strides and alignment, before a page that nobody may touch."""
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
