"""The command ``python -m liger_ext compare``: trains a model without and with liger_ext on this machine, and shows the
times of a step, the peak memory and the losses.

Each side is a process of its own, so that neither inherits memory or compiled code, with the same random weights and
the same batches of random tokens. Neither time nor memory depends on the values of weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch

from ._meter import Meter
from ._timing import Timing
from .inspection import Failed, Impossible, add_source, build, progress, read_config
from .ops._loss_plan import LEVELS

STOCK, OURS = "Hugging Face", "liger_ext"
WARM_UP, STEPS = 3, 10
LIMIT = 120  # seconds that the command takes by default
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        description="Trains a model of this configuration, with random weights, without and with liger_ext: times of a "
        "step, peak memory, losses. By default it trains as few layers as end in two minutes.",
    )
    add_source(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences of a step (default: 1)")
    parser.add_argument("--seq", type=int, default=512, metavar="S", help="tokens of a sequence (default: 512)")
    parser.add_argument("--layers", metavar="N[,M]", help="layers to train; two numbers extrapolate to all layers")
    parser.add_argument("--lora", type=int, metavar="R", help="train LoRA adapters of rank R on all linear layers")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights (default: bf16 on a GPU, fp32 on a CPU)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument("--memory", choices=LEVELS, default="auto", help="default: auto")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    for name, least in (("batch", 1), ("seq", 2), ("lora", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise Impossible(f"--{name} is {value}, expected {least} or more")
    if arguments.lora and importlib.util.find_spec("peft") is None:
        raise Impossible("--lora needs the package peft, which is not installed")
    config = read_config(arguments.source, arguments.trust_remote_code)
    every = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(every, int) or every < 1:
        raise Impossible(f"num_hidden_layers of {arguments.source} is {every}, expected 1 or more")
    device = _device(arguments.device)
    request = {name: getattr(arguments, name) for name in ("source", "trust_remote_code", "batch", "seq", "lora")}
    request |= {"device": str(device), "dtype": arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")}
    request |= {"level": arguments.memory, "steps": STEPS}
    depths = _depths(arguments.layers, every) or [_affordable(request, every)]
    found = {depth: {side: _measured(request, side, depth) for side in (STOCK, OURS)} for depth in depths}
    facts = {"request": request, "layers": every, "measured": found}
    if len(depths) > 1:
        facts["extrapolated"] = {side: _extrapolated(found, side, every) for side in (STOCK, OURS)}
    print(json.dumps(facts) if arguments.json else _table(facts, arguments.layers is None))
    return 0


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", "cuda"):
            raise Impossible(f"--device is {name}, expected cpu, cuda or cuda:N")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Impossible(f"--device is {name}, expected cpu, cuda or cuda:N: {error!s:.60}") from None
    return device


def _depths(text: str | None, every: int) -> list[int]:
    """Returns the numbers of layers that the user names."""
    parts = [] if text is None else text.split(",")
    depths = [int(part) for part in parts if part.isdecimal()]
    if (
        len(depths) < len(parts)
        or len(parts) > 2
        or sorted(set(depths)) != depths
        or not all(0 < d <= every for d in depths)
    ):
        raise Impossible(f"--layers is {text}, expected one or two rising numbers from 1 to {every}")
    return depths


def _affordable(request: dict, every: int) -> int:
    """Returns the number of layers with which both sides end within LIMIT, from two unpatched steps of two layers."""
    start, depth = time.monotonic(), min(2, every)
    probe = _measured(request | {"steps": 2}, STOCK, depth)
    probing = time.monotonic() - start
    steps = 2 * (WARM_UP + STEPS) * probe["time"]["median"] / 1e6
    fixed = 2 * max(probing - (WARM_UP + 2) * probe["time"]["median"] / 1e6, 0)  # imports and weights
    return max(min(every, int(depth * (LIMIT - probing - fixed) / steps)), depth)


def _measured(request: dict, side: str, depth: int) -> dict[str, Any]:
    """Returns what a new process measures for one side.

    Raises:
        Impossible: it has too little memory.
        Failed: another error.
    """
    asked = json.dumps(request | {"side": side, "depth": depth})
    # Freed blocks of a megabyte return to the system at once, so that the resident set equals the memory in use.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-m", __spec__.name, asked]
    pipe = subprocess.PIPE
    with progress(f"training {depth} layers: {side}"):
        child = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            output, errors = child.communicate()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode == 0:
        return json.loads(output.splitlines()[-1])
    last = (errors.strip().splitlines() or ["no message"])[-1]
    if child.returncode == -signal.SIGKILL or "OutOfMemoryError" in errors or "DefaultCPUAllocator" in errors:
        raise Impossible(f"too little memory for {depth} layers with {side}: pass smaller --batch, --seq or --layers")
    raise Failed(f"training {depth} layers with {side} failed: {last}")


def _extrapolated(found: dict[int, dict], side: str, every: int) -> dict[str, float]:
    """Returns peak memory and time of all layers: both grow linearly with their number."""
    (few, first), (more, second) = ((depth, sides[side]) for depth, sides in found.items())

    def line(low: float, high: float) -> float:
        return high + (high - low) / (more - few) * (every - more)

    times = line(first["time"]["median"], second["time"]["median"])
    return {"peak_bytes": line(first["peak_bytes"], second["peak_bytes"]), "median": times}


def _table(facts: dict[str, Any], was_cut: bool) -> str:
    request, every, lines = facts["request"], facts["layers"], []
    for depth, sides in facts["measured"].items():
        stock, ours = sides[STOCK], sides[OURS]
        cut = (
            f" (so that this ends in about {LIMIT} s; --layers {every} trains all)" if was_cut and depth < every else ""
        )
        lora = f", LoRA of rank {request['lora']}" if request["lora"] else ""
        lines.append(
            f"{stock['model']}, {depth} of {every} layers{cut}, {request['batch']} x {request['seq']} tokens{lora}"
        )
        lines.append(f"{request['dtype']}, memory={request['level']!r}, {stock['device']}")
        lines.append(f"  {'':36}{STOCK:>16}{OURS:>16}{'change':>10}")
        lines.append(_row("time of a step, median, ms", stock["time"]["median"] / 1e3, ours["time"]["median"] / 1e3))
        for name, quartile in (("low", "first"), ("high", "third")):
            values = (f"{side['time'][name] / 1e3:,.1f}" for side in (stock, ours))
            lines.append(f"  {f'    {quartile} quartile':36}" + "".join(f"{value:>16}" for value in values))
        if any(side["time"]["high"] > 1.2 * side["time"]["low"] for side in (stock, ours)):
            lines.append("  The times differ by more than 20 %: other work on this machine disturbs them.")
        lines.append(_row("peak memory of a step, MiB", stock["peak_bytes"] / 2**20, ours["peak_bytes"] / 2**20))
        difference = max(abs(a - b) for a, b in zip(stock["losses"], ours["losses"], strict=True))
        lines.append(f"  largest difference of the losses of {len(stock['losses'])} steps: {difference:.2e}")
    if "extrapolated" in facts:
        stock, ours = facts["extrapolated"][STOCK], facts["extrapolated"][OURS]
        lines.append(f"all {every} layers, extrapolated")
        lines.append(_row("time of a step, ms", stock["median"] / 1e3, ours["median"] / 1e3))
        lines.append(_row("peak memory of a step, MiB", stock["peak_bytes"] / 2**20, ours["peak_bytes"] / 2**20))
    return "\n".join(lines)


def _row(name: str, stock: float, ours: float) -> str:
    return f"  {name:36}{stock:>16,.1f}{ours:>16,.1f}{(ours / stock - 1) * 100:>+8.1f} %"


# One side, in its process ---------------------------------------------------------------------------------------------


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Trains one side; returns the times of its steps, its peak memory and its losses."""
    device, dtype = torch.device(request["device"]), DTYPES[request["dtype"]]
    config = read_config(request["source"], request["trust_remote_code"])
    cut_layers(config, request["depth"])
    config.dtype = dtype
    meter = Meter(device)
    with device:
        torch.ones(8, 8).matmul(torch.ones(8, 8))
    empty = meter.reset() if device.type == "cpu" else 0
    torch.manual_seed(0)
    model = trained = build(config, device, request["trust_remote_code"]).train()
    if request["lora"]:
        trained = _with_adapters(model, request["lora"])
    if request["side"] == OURS:
        from liger_ext import apply_liger_kernel_to_instance

        apply_liger_kernel_to_instance(trained, memory=request["level"])
    parameters = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    vocab, shape = model.get_input_embeddings().num_embeddings, (request["batch"], request["seq"])
    generator = torch.Generator().manual_seed(1)
    times, losses = [], []
    for number in range(WARM_UP + request["steps"]):
        tokens = torch.randint(vocab, shape, generator=generator).to(device)
        if number == WARM_UP:
            meter.reset()
        _wait(device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = trained(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        _wait(device)
        times.append((time.perf_counter() - start) * 1e6)
        losses.append(loss.item())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    facts = {"model": type(model).__name__, "device": name, "losses": losses, "peak_bytes": meter.peak() - empty}
    return facts | {"time": vars(Timing.from_samples(times[WARM_UP:]))}


def cut_layers(config: Any, depth: int) -> None:
    """Reduces the number of layers of a configuration, and its lists with a value for each layer."""
    text = config.get_text_config()
    every = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == every:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth


def _with_adapters(model: torch.nn.Module, rank: int) -> torch.nn.Module:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")).train()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
