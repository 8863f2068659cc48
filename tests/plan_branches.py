"""Which branches of the planner (csrc/launch) no test takes with a kernel behind them: `make plan-branches`.

A branch counts as taken where a kernel is launched with the plan: in a test on the host target, or in one on a GPU. The
former run here, on a host target whose planner counts. The latter's calls are planned here, on reference profiles, by a
planner that counts: those of test_gpu_paths, test_forced_plans and test_large, on an H200 with code for it and with
code for older devices, as builds with CUDA_ARCHS=8.0+PTX and 7.5+PTX have it there. So the list is right as long as
those tests pass on those three builds. Exit status: 0 if no branch is left out.

Not counted: branches that refuse a call, which launch nothing; chunks.h, which ops call by themselves (kernel_cases.py
has one chunk and several); on the host target the backward of the norms, which is also planned for its workspace.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "csrc/launch"
COUNTED = ROOT / "liger_ext/lib/counted"
HOST_TESTS = ("host_kernels.py", "test_forced_plans.py", "test_gpu_paths.py")
HOST_SETTINGS = ({"WARP": "32"}, {"WARP": "64"})
FOR_PYTHON = "// For op_plans.h"  # from this line on a file only tells Python of launches
NO_PLANNER = ("op_plans", "profiles", "knobs", "launch", "chunks")  # what plans are made of, and chunks.h: see above
WITHOUT_LAUNCH = ("norm_partial_rows", "plan_norm_backward(")  # on the host target


def run_host_tests() -> None:
    for settings in HOST_SETTINGS:
        env = {f"LIGER_EXT_HOST_{name}": value for name, value in settings.items()}
        env |= {"LIGER_EXT_LIB": str(COUNTED / "host"), "PYTHONPATH": str(ROOT)}
        tests = [ROOT / "tests" / name for name in HOST_TESTS]
        print(f"host target {settings}", flush=True)
        subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env={**os.environ, **env}, cwd=ROOT, check=True)


def plan_gpu_tests() -> None:
    """In this process, whose liger_ext._C is the planner that counts."""
    (library,) = COUNTED.glob("_C*.so")
    spec = importlib.util.spec_from_file_location("liger_ext._C", library)
    sys.modules["liger_ext._C"] = planner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planner)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import test_forced_plans as forced
    import test_gpu_paths as tests
    import torch
    from gpu_paths import DTYPES, PATHS, Path

    class Gpu:
        type = "cuda"

    for profile in on_an_h200(planner):
        for path in PATHS:
            path.launches(profile, path.rows(profile))
        for op, cols in tests.LONG.items():
            for dtype in DTYPES:
                Path(op, cols, dtype, "few").launches(profile, 3)
                Path(op, cols + 1, dtype, "few").launches(profile, 2)
        for op, cols, dtype in ((op, c, d) for op in tests.TENSORS for c in tests.lengths(Gpu) for d in DTYPES):
            Path(op, cols, dtype, "").launches(profile, 40)
            planner.plans(
                op, profile, 40, cols, str(dtype).removeprefix("torch."), mixed=True
            )  # weights of another dtype
        for op in (op for op, record in forced.OPS.items() if record.kernels == op):
            for knobs in forced.KNOBS:
                for rows, cols in forced.sizes(op, Gpu):
                    for dtype in (torch.float32, torch.bfloat16):
                        Path(op, cols, dtype, "").launches(profile, rows, knobs)
        planner.plans("rope", profile, 2**30 + 2**15, 2, q_heads=1, k_heads=1)  # test_large


def on_an_h200(planner):
    """With code for it, of 8.0 and of 7.5."""
    yield planner.profile("H200")
    for async_copies in (True, False):
        older = planner.profile("H200")
        older.bulk_copies, older.async_copies, older.resident_clusters = False, async_copies, [0] * 4
        yield older


def branches(build: Path) -> dict:
    """{(file, line): [times that each branch of the line was taken]}, of all objects with counts."""
    found = {}
    for data in build.rglob("launch/*.gcda"):
        with tempfile.TemporaryDirectory() as folder:
            command = ["gcov", "--json-format", "--branch-probabilities", "--demangled-names", str(data)]
            subprocess.run(command, cwd=folder, capture_output=True, check=True)
            reports = [json.loads(gzip.decompress(file.read_bytes())) for file in Path(folder).glob("*.gz")]
        on_host = "liger_host_counted" in str(data)
        for file in (file for report in reports for file in report["files"]):
            path = (ROOT / "build/dev" / file["file"]).resolve()
            if path.parent != LAUNCH or path.stem in NO_PLANNER:
                continue
            lines = path.read_text().splitlines()
            end = next((number for number, line in enumerate(lines, 1) if line.startswith(FOR_PYTHON)), len(lines) + 1)
            names = {function["name"]: function["demangled_name"] for function in file["functions"]}
            for line in file["lines"]:
                name = names.get(line.get("function_name"), "")
                if line["line_number"] >= end or (on_host and any(part in name for part in WITHOUT_LAUNCH)):
                    continue
                taken = [branch["count"] for branch in line["branches"] if not branch["throw"]]
                of_function = found.setdefault((path, line["line_number"]), defaultdict(lambda: [0] * 99))[name]
                for i, count in enumerate(taken):
                    of_function[i] += count
                of_function[98] = len(taken)
    return found


def left_out(found: dict) -> list[str]:
    """A line for each place with a branch that was never taken, in any function that has the place."""
    texts = {path: path.read_text().splitlines() for path, _ in found}
    lines = []
    for (path, number), functions in sorted(found.items()):
        text = texts[path]
        if any("throw " in nearby for nearby in text[number - 1 : number + 1]) or text[number - 1].strip() == "}":
            continue  # refuses a call, or ends one that was refused
        for counts in functions.values():
            never = [i for i, count in enumerate(counts[: counts[98]]) if count == 0]
            if never:
                which = ", ".join(map(str, never))
                lines.append(f"{path.name}:{number}: branch {which} of {counts[98]}: {text[number - 1].strip()}")
    return lines


def main() -> int:
    build = ROOT / "build/dev"
    if "--report" not in sys.argv:
        for data in build.rglob("*.gcda"):
            data.unlink()
        run_host_tests()
        subprocess.run([sys.executable, __file__, "--plan"], check=True)  # its counts are written at its end
    lines = left_out(branches(build))
    print(*lines, sep="\n")
    print(f"{len(lines)} places of the planner have a branch that no test takes with a kernel behind it")
    return 1 if lines else 0


if __name__ == "__main__":
    if "--plan" in sys.argv:
        plan_gpu_tests()
    else:
        sys.exit(main())
