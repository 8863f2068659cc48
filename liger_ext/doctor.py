"""Reports this machine and the parts of liger_ext that run on it, and tests every op on it against float64.

``python -m liger_ext`` prints the report. ``python -m liger_ext doctor`` adds the numbers of tokens for which the
fused loss of an 8B Llama fits in memory, with ``--verbose`` the launch plans of its ops, and the self-test. It ends
with OK, or with the problems and their remedies.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _C, _devices, _fit, _llama, _load, _loss_report, _tuned, compare, inspection, run, tune

TRANSFORMERS_RANGE = ("4.51.3", "5.24.0")  # the oldest and the newest version that was tested

STATUS = {
    0: "OK",
    1: "an op gives wrong results, or fails",
    3: "there is a GPU that liger_ext cannot use",
    4: "the installed transformers cannot be patched",
}
"""Exit statuses. The doctor exits with the smallest status of its problems, argparse with 2 for wrong arguments."""


@dataclass(frozen=True)
class Problem:
    status: int
    what: str
    advice: str


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())


def _gib(size: int, digits: int = 0) -> str:
    return f"{size / 2**30:.{digits}f} GiB"


def _facts(profile: _C.DeviceProfile) -> str:
    bf16 = "native bf16" if profile.native_bf16 else "no native bf16 (stored, computed in fp32; float16 is faster)"
    if profile.vendor == _C.Vendor.nvidia:
        unit = "SMs"
    else:  # on RDNA, HIP counts pairs of compute units
        unit = "compute units" if profile.warp == 64 else "pairs of compute units"
    return f"warps of {profile.warp}, {profile.multiprocessors} {unit}, {bf16}"


_CODE = {
    "machine code": "covered by this build",
    "PTX": "covered by this build as PTX, which the driver compiles at the first call",
    "nothing": "NOT covered by this build",
}


def _gpu_lines(found: Sequence[_devices.Device]) -> list[str]:
    lines = []
    for device in found:
        facts = f", {_facts(device.profile)}" if device.profile else ""
        memory = f"{_gib(device.total_bytes)} ({_gib(device.free_bytes)} free)"
        lines.append(f"{device.index}: {device.name}, {device.architecture}{facts}, {memory}: {_CODE[device.code]}")
        if device.profile:
            rates = _tuned.describe_rates(_tuned.device_rates(device.profile))
            lines.append(f"   rates for the fused loss, {_tuned.rates_source(device.profile)}: {rates}")
    driver = _devices.driver()
    return lines or ["none that torch can use" + ("" if driver == "none" else f", though there is a driver: {driver}")]


def _torch() -> str:
    oldest = ".".join(map(str, _load.MINIMUM_TORCH))
    return f"{torch.__version__}: supported ({oldest} or newer; an older one is refused at import)"


def _transformers() -> str:
    if importlib.util.find_spec("transformers") is None:
        return "not installed (the ops and modules need no transformers; patching a model does)"
    version = importlib.metadata.version("transformers")
    oldest, newest = TRANSFORMERS_RANGE
    if _numbers(version) < _numbers(oldest):
        return f"{version}: too old, patching a model needs {oldest} or newer"
    if _numbers(version) > _numbers(newest):
        return f"{version}: newer than {newest}, the newest that was tested"
    return f"{version}: supported"


def _tuned_plans() -> str:
    if _tuned.is_disabled():
        return "turned off by LIGER_EXT_TUNED=0"
    count, file = _tuned.installed_count(), _tuned.path()
    if count:
        return f"{count} in use, from {file}"
    there = "does not exist"
    if file.exists():
        there = "has none for this driver"
        try:
            _tuned.read(file)
        except ValueError as error:
            there = f"cannot be used: {error}"
    return f"none in use: {file} {there} (`python -m liger_ext tune` measures them)"


def report() -> list[tuple[str, list[str]]]:
    """Returns the report: headings, and the lines below each."""
    build = _load.cpu_facts
    gpu_builds = [f"{facts.backend} for {facts.architectures}" for facts in _load.gpu_facts.values()]
    return [
        ("liger_ext", [f"{build.version} in {Path(__file__).parent}, built with torch {build.torch}"]),
        ("torch", [_torch()]),
        ("transformers", [_transformers()]),
        ("CPU library", [f"{_load.library_folder() / 'libliger_ext_cpu.so'}"]),
        ("GPU library", [*(gpu_builds or ["not built"]), _load.gpu_status()]),
        ("tuned plans", [_tuned_plans()]),
        ("driver", [_devices.driver(), _devices.toolkit()]),
        ("CPU", [f"{_devices.device_name(torch.device('cpu'))}, instruction set {_devices.cpu_isa()}"]),
        ("GPU", _gpu_lines(_devices.devices())),
    ]


def _installation() -> Iterator[Problem]:
    """Yields the problems of the installation, which are found without running an op."""
    machine = _fit.this_machine()
    for device in _devices.devices():
        name = f"GPU {device.index} ({device.name}, {device.architecture})"
        if not _load.gpu_available():
            yield Problem(3, f"{name} is not used: liger_ext's GPU library is not loaded", _load.gpu_status())
        elif reason := _fit.misfit_reason(_load.gpu_facts, _load.cpu_facts.version, machine, device.architecture):
            yield Problem(3, f"{name} is not used", reason)
        elif device.profile is None:
            yield Problem(
                3, f"{name}: the GPU library cannot read its properties", f"the driver is {_devices.driver()}"
            )
    if machine.backend is None and machine.driver != "none":
        yield Problem(3, f"there is a GPU driver ({machine.driver}), and torch does not use GPUs", _load.gpu_status())
    if "too old" in _transformers():
        advice = f"pip install 'transformers>={TRANSFORMERS_RANGE[0]},<6' (the ops and modules work without)"
        yield Problem(4, f"transformers {_transformers()}", advice)


# Sections -------------------------------------------------------------------------------------------------------------


def plan_lines(profile: _C.DeviceProfile) -> list[dict[str, Any]]:
    """Returns each launch of a Llama-shaped call of each op, or the error that the op raised."""
    lines: list[dict[str, Any]] = []
    for op, launches in _llama.plans(profile):
        if isinstance(launches, Exception):
            lines.append({"op": op, "raised": inspection.error_sentence(launches)})
            continue
        for launch in launches:
            plan = {name: getattr(launch.plan, name) for name in ("grid", "block", "cluster", "smem", "vec", "k")}
            lines.append({"op": op, "kernel": launch.kernel, **plan})
    return lines


def _print_plans(title: str, profile: _C.DeviceProfile) -> None:
    print(f"\nPlans for {title}: {_llama.SHAPE}")
    for op, launches in _llama.plans(profile):
        if isinstance(launches, Exception):
            print(f"  {op:36}raised {inspection.error_sentence(launches)}")
            continue
        shown = []
        for launch in launches:
            plan = launch.plan
            cluster = f" in clusters of {plan.cluster}" if plan.cluster > 1 else ""
            shown.append(f"{launch.kernel} {plan.grid:,} x {plan.block}{cluster}")
        print(f"  {op:36}{', '.join(shown)}")


def _print_memory(title: str, profile: _C.DeviceProfile, free: int) -> None:
    sizes = f"hidden size {_llama.HIDDEN:,}, vocabulary {_llama.VOCAB:,}, bfloat16"
    print(f"\nFused loss on {title}: memory of one call, forward and backward, with its inputs and their gradients")
    print(f"  {sizes}; {_gib(free)} free")
    for level, found in _llama.tokens_at_each_level(profile, free).items():
        taken = f"{_llama.TOKENS:,} tokens take {_gib(found['bytes'], 1)}"
        most = f"a call of at most {found['tokens']:,} tokens fits"
        at_a_time = f"{found['rows']:,} rows of logits at a time"
        if found["stored"] < 1:
            at_a_time = f"{found['stored']:.0%} of their gradient stored, the rest recomputed"
        print(f"  {'memory=' + repr(level):36}{taken}, {at_a_time}; {most}")


def self_test(device: str) -> list[dict[str, Any]]:
    """Runs every op forward and backward in each dtype. Returns, for each run, the result that came closest to its
    bound, or the error that was raised."""
    from . import testing

    results = []
    for op, inputs in testing.examples(device):
        dtype = next(str(v.dtype) for v in inputs.values() if v.is_floating_point()).removeprefix("torch.")
        line = {"device": device, "op": op, "dtype": dtype}
        try:
            measured = testing.compare(op, inputs)
            worst = max(measured, key=lambda m: m.ratio)
            line |= {"what": worst.what, "measure": worst.measure, "error": worst.error, "bound": worst.bound}
            line |= {"ratio": worst.ratio, "share": max(m.share for m in measured), "passed": bool(worst.ratio <= 1)}
        except Exception as error:  # any error is reported, and the other ops still run
            line |= {"raised": inspection.error_sentence(error), "passed": False}
        results.append(line)
    return results


def _print_self_test(device: str, results: Sequence[dict[str, Any]]) -> None:
    dtypes = list(dict.fromkeys(line["dtype"] for line in results))
    print(
        f"\nSelf-test on {device}: largest error / bound of any output or gradient against float64 (1 or less is right)"
    )
    print(f"  {'':36}{''.join(f'{dtype:>12}' for dtype in dtypes)}")
    for op in dict.fromkeys(line["op"] for line in results):
        cells = [f"{line['ratio']:.2f}" if "ratio" in line else "raised" for line in results if line["op"] == op]
        print(f"  {op:36}{''.join(f'{cell:>12}' for cell in cells)}")


def _failures(results: Sequence[dict[str, Any]]) -> Iterator[Problem]:
    for line in results:
        if line["passed"]:
            continue
        what = f"{line['op']} in {line['dtype']} on {line['device']}"
        if "raised" in line:
            yield Problem(
                1, f"{what} raised {line['raised']}", "see the error; a build of this source may be incomplete"
            )
        else:
            numbers = f"{line['measure']} error {line['error']:.3g} of {line['what']}, bound {line['bound']:.3g}"
            advice = "do not train with it: build again, and if it stays, report it with the output of doctor --json"
            yield Problem(1, f"{what} gives wrong results: {numbers}", advice)


# The command ----------------------------------------------------------------------------------------------------------


_COMMANDS = {"tune": tune.run, "run": run.run, "inspect": inspection.run, "compare": compare.run}


def _parser() -> argparse.ArgumentParser:
    statuses = "; ".join(f"{status}: {what}" for status, what in STATUS.items())
    parser = argparse.ArgumentParser(prog="python -m liger_ext", description=__doc__.strip().splitlines()[0])
    parser.add_argument("--version", action="version", version=f"liger_ext {_load.cpu_facts.version}")
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser(
        "doctor",
        description="Reports what runs on this machine, and tests every op against float64.",
        epilog=f"Exit status: {statuses}.",
    )
    doctor.add_argument("--verbose", action="store_true", help="also print the launch plans of each op")
    doctor.add_argument("--json", action="store_true", help="print everything as one JSON object")
    doctor.add_argument("--profile", metavar="NAME", help="show the plans for another GPU, without a self-test")
    _loss_report.add_arguments(doctor)
    tune.add_parser(commands)
    run.add_parser(commands)
    inspection.add_parser(commands)
    compare.add_parser(commands)
    return parser


def _report_profile(name: str, as_json: bool) -> int:
    """Prints the plans for a reference profile, and returns the exit status."""
    profile = _C.profile(name)
    code = _fit.code_for(profile.architecture, _load.gpu_facts)
    if as_json:
        tokens = _llama.tokens_at_each_level(profile, profile.memory_bytes)
        found = {"profile": profile.name, "code": code, "plans": plan_lines(profile), "fused_loss_tokens": tokens}
        print(json.dumps(found))
        return 0
    memory, shared = _gib(profile.memory_bytes), profile.shared_per_block_optin // 1024
    print(f"{profile.name}: {profile.architecture}, {_facts(profile)}, {memory}, {shared} KiB of shared memory a block")
    print(f"{_CODE[code]}{f': {_fit.rebuild(profile.architecture)}' if code == 'nothing' else ''}")
    _print_plans(profile.name, profile)
    _print_memory(profile.name, profile, profile.memory_bytes)
    return 0


def _usable() -> list[_devices.Device]:
    return [device for device in _devices.devices() if device.profile and device.code != "nothing"]


def _doctor(as_json: bool, verbose: bool) -> int:
    usable = _usable()
    names = ["cpu", *(f"cuda:{device.index}" for device in usable)]
    if not as_json:
        _print_report()
        for device in {device.name: device for device in reversed(usable)}.values():  # the first of several equal GPUs
            title = f"{device.index}: {device.name}"
            if verbose:
                _print_plans(title, device.profile)
            _print_memory(title, device.profile, device.free_bytes)
        if not usable:
            print("\nNo GPU here that liger_ext can use: --profile NAME shows the plans for another.")
    tested = {name: self_test(name) for name in names}
    problems = [*_installation(), *(problem for results in tested.values() for problem in _failures(results))]
    status = min((problem.status for problem in problems), default=0)
    if as_json:
        _print_json(usable, tested, problems, status)
        return status
    for name, results in tested.items():
        _print_self_test(name, results)
    print()
    for problem in problems:
        print(f"PROBLEM: {problem.what}\n  TO DO: {problem.advice}")
    print("OK" if status == 0 else f"NOT OK (exit status {status}): {STATUS[status]}")
    return status


def _print_json(usable, tested, problems, status) -> None:
    found = {
        "status": status,
        "report": dict(report()),
        "devices": [
            {
                "index": device.index,
                "name": device.name,
                "architecture": device.architecture,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "plans": plan_lines(device.profile),
                "fused_loss_tokens": _llama.tokens_at_each_level(device.profile, device.free_bytes),
            }
            for device in usable
        ],
        "self_test": [line for results in tested.values() for line in results],
        "problems": [vars(problem) for problem in problems],
    }
    print(json.dumps(_finite(found)))


def _finite(value: Any) -> Any:
    """Replaces non-finite floats by strings, since JSON has no infinities."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print_report() -> None:
    for heading, lines in report():
        for number, line in enumerate(lines):
            print(f"{heading if number == 0 else '':14}{line}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        _print_report()
        return 0
    if chosen.command in _COMMANDS:
        return _COMMANDS[chosen.command](chosen)
    if chosen.loss is None and (chosen.dtype or chosen.reduction):
        parser.error("--dtype and --reduction describe the call of --loss ROWS HIDDEN VOCAB, which is missing")
    if chosen.profile is None and chosen.loss is None:
        return _doctor(chosen.json, chosen.verbose)
    try:
        if chosen.loss is None:
            return _report_profile(chosen.profile, chosen.json)
        here = next((device.profile for device in _usable()), None)
        return _loss_report.run(chosen, here if chosen.profile is None else _C.profile(chosen.profile))
    except ValueError as error:
        parser.error(str(error))
