"""Checks the emulator's cross-lane instructions, and the platform's shfl_xor with every mask. It executes small kernels
in which the lanes of a wave read each other's registers (lanes.hip), and compares the results with numpy's. Requires a
HIP build, for its folder of device libraries, and an emulator: python tests/amd/lanes.py gfx90a"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from amd import emulator, objects  # noqa: E402

THREADS = 64  # two waves of 32, or one of 64
LANE = np.arange(THREADS)
OVER_16 = (1, 2, 7, 15)  # masks: the neighbour, two lanes away, and mirror images of eight and of sixteen lanes


def from_lane(lanes: np.ndarray) -> Callable:
    return lambda v: v[lanes]


def half_and(v: np.ndarray, other: np.ndarray) -> np.ndarray:
    return v / 2 + other


def reduced(v: np.ndarray, combine: Callable, masks: Iterable[int]) -> np.ndarray:
    """Combines each lane with lane ^ mask for one mask after another, with one rounding each."""
    for mask in masks:
        v = combine(v.astype(np.float64), v[LANE ^ mask]).astype(np.float32)
    return v


def over_16_lanes(combine: Callable) -> Callable:
    return lambda v: reduced(v, combine, OVER_16)


def reductions(masks: list[int]) -> Callable:
    combines = np.add, np.maximum, half_and
    return lambda v: np.concatenate([reduced(v, combine, reversed(masks)) for combine in combines])


def exchanges(masks: list[int]) -> Callable:
    """Returns the exchange with each mask four times: floats, integers, doubles, and floats with a run-time mask."""
    return lambda v: np.concatenate([v[LANE ^ mask] for mask in masks for _ in range(4)])


EXPECTED: dict[str, Callable] = {
    "quad": from_lane(LANE ^ 1),
    "rotate": from_lane(LANE & ~15 | (LANE - 3) & 15),
    "swizzle": from_lane((LANE & ~31 | LANE & 5 | 16) ^ 1),
    "sum": over_16_lanes(np.add),
    "maximum": over_16_lanes(np.maximum),
    "weighted": over_16_lanes(lambda v, other: v + other / 2),
    "neighbours": from_lane(LANE ^ 5),
    "rows": from_lane(LANE ^ 16),
    "switched_off": lambda v: v,
}


def compiled(arch: str, folder: Path) -> Path:
    output, libraries = folder / "lanes.co", objects.BUILD / "compile-hip/rocm_bitcode"
    command = [
        objects.tool("clang++"),
        "-x",
        "hip",
        f"--offload-arch={arch}",
        "--cuda-device-only",
        "-O3",
        "-std=c++20",
    ]
    command += ["--no-gpu-bundle-output", "-DLIGER_BACKEND=gpu", f"-I{ROOT / 'csrc'}"]
    if libraries.exists():  # device libraries of a distribution's compiler; ROCm's compiler finds its own
        command += ["--rocm-path=/usr", f"--rocm-device-lib-path={libraries}"]
    subprocess.run([*command, ROOT / "tests/amd/lanes.hip", "-o", output], check=True)
    return output


def main() -> int:
    arch, run = sys.argv[1], emulator.load()
    with tempfile.TemporaryDirectory() as folder:
        code = run.CodeObject(str(compiled(arch, Path(folder))))
    masks = [1 << bit for bit in range(6 if arch.startswith("gfx9") else 5)]
    expected = EXPECTED | {"reductions": reductions(masks), "exchanges": exchanges(masks)}
    values = np.random.default_rng(0).standard_normal(THREADS).astype(np.float32)
    wrong = []
    for kernel in code.kernels:
        right = expected[kernel](values)
        found = np.zeros_like(right)
        run.run(code, kernel, 1, THREADS, [values, found, *([1] if kernel == "exchanges" else [])])
        if not np.array_equal(found, right):
            wrong.append(f"{kernel}: {np.flatnonzero(found != right)[:8]} of {right.size} lanes are wrong")
    print("\n".join([*wrong, f"{arch}: {len(code.kernels)} kernels, {len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
