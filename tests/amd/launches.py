"""Checks the launches of every kernel case against the limits in a HIP build's code objects and those of the device, on
a device with as many compute units as a real one. Nothing is executed, so it needs no emulator:
python tests/amd/launches.py gfx942"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402

from amd.device import Device, Launch, build  # noqa: E402

COMPUTE_UNITS = {"gfx90a": 110, "gfx942": 304, "gfx950": 256, "gfx1100": 84, "gfx1201": 64}  # MI250X … RX 9070 XT


def problem(device: Device, launch: Launch) -> str | None:
    """Returns why a GPU would reject the launch, or None."""
    compiled = device.kernels[launch.kernel]
    if not 0 < launch.block <= compiled[".max_flat_workgroup_size"]:
        return f"{launch.block} threads, compiled for {compiled['.max_flat_workgroup_size']}"
    if launch.block % compiled[".wavefront_size"]:
        return f"{launch.block} threads are not whole waves of {compiled['.wavefront_size']}"
    if compiled[".group_segment_fixed_size"] + launch.shared_bytes > device.shared_bytes:
        return f"{launch.shared_bytes} bytes of shared memory"
    return None if 0 < launch.grid < 2**31 else f"{launch.grid} blocks"


def main() -> int:
    build()
    torch.set_num_threads(1)
    device = Device(sys.argv[1], COMPUTE_UNITS[sys.argv[1]])
    from kernel_cases import cases

    from amd.judge import placed_inputs
    from liger_ext import functional
    from liger_ext.testing import named_outputs

    found: set[str] = set()

    def check(launch: Launch) -> None:
        if wrong := problem(device, launch):
            found.add(f"{device.names[launch.kernel]}: {wrong}")

    device.execute = check
    for case in cases():
        inputs = placed_inputs(device, case, case.inputs())
        outputs = [t for t in named_outputs(getattr(functional, case.op)(**inputs)).values() if t.requires_grad]
        wanted = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs])

    x = device.place(torch.zeros(1, 5))

    def stray(launch: Launch) -> None:  # like a kernel that writes past the end of a tensor
        ctypes.memset(x.data_ptr() + 20, 0, 1)

    device.execute = stray
    try:
        functional.softmax(x)
        found.add("a store outside of a tensor was not detected")
    except RuntimeError as error:
        if "outside" not in str(error):
            raise
    for sentence in sorted(found):
        print(sentence)
    print(f"{device.arch}: {device.launched.total()} launches of {len(device.launched)} kernels, {len(found)} wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
