"""The HIP library links and loads on a machine without an AMD GPU and with torch's CPU wheel: a stub replaces
libtorch_hip; libamdhip64 is Debian's. ``tests/compile_gpu.sh hip`` builds both the library and the stub."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from amd.objects import HIP_LIBRARY
from elftools.elf.elffile import ELFFile

from liger_ext import _load

STUB = HIP_LIBRARY.parents[1] / "stub/libtorch_hip.so"

pytestmark = pytest.mark.skipif(not STUB.exists(), reason="there is no HIP build: tests/compile_gpu.sh hip")


def dynamic(path):
    """Libraries that a library needs, symbols that it defines, and symbols that it leaves undefined."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        symbols = [s for s in elf.get_section_by_name(".dynsym").iter_symbols() if s.name]
    wanted = {s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s["st_info"]["bind"] == "STB_GLOBAL"}
    return needed, {s.name for s in symbols} - wanted, wanted


def find(name):
    """Path of a system library, as the dynamic linker finds it."""
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    return next((line.split(" => ")[1] for line in listed.splitlines() if line.split()[:1] == [name]), None)


def test_links_with_what_a_rocm_torch_brings():
    """The only undefined symbols are those of libtorch, libtorch_hip, the HIP runtime and the C and C++ libraries; no
    dependency on one ROCm version's libamdhip64."""
    needed, _, wanted = dynamic(HIP_LIBRARY)
    assert "libtorch_hip.so" in needed and not [n for n in needed if "amdhip" in n]
    of_torch_hip = {"aoti_torch_get_current_cuda_stream", "torch_get_current_cuda_blas_handle"}
    runtime = {name for name in wanted if name.startswith(("hip", "__hip"))}
    assert wanted >= of_torch_hip and "hipLaunchKernel" in runtime
    provided = of_torch_hip | dynamic(Path(torch.__file__).parent / "lib/libtorch_cpu.so")[1]
    for name in needed - {"libtorch_hip.so", "libtorch_cpu.so", "libtorch.so", "libc10.so"}:
        provided |= dynamic(find(name))[1]
    assert wanted - runtime - provided == set()
    if amdhip := next((n for n in dynamic(STUB)[0] if "amdhip" in n), None):
        assert runtime - dynamic(find(amdhip))[1] == set()


LOAD = """
import sys, torch, liger_ext
torch.ops.load_library(sys.argv[1])
ops = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("liger_ext::")]
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert len(ops) > 15, ops
print("CPU only:", *[n for n in ops if has(n, "CPU") and not has(n, "CUDA")])
x = torch.randn(4, 8)
assert torch.allclose(liger_ext.rms_norm(x, None), torch.nn.functional.rms_norm(x, (8,), eps=1e-6), atol=1e-6)
"""


def test_loads_and_registers_its_ops():
    """Beside the CPU library; the HIP runtime registers the code objects, but has no device."""
    if not any("amdhip" in n for n in dynamic(STUB)[0]):
        pytest.skip("needs libamdhip64 (package libamdhip64-dev)")
    libraries = os.pathsep.join([str(STUB.parent), os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, HIP_LIBRARY],
        env={**os.environ, "LD_LIBRARY_PATH": libraries, "LIGER_EXT_LIB": str(_load.library_folder())},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "CPU only:", done.stdout
