"""The command ``python -m liger_ext compare``: trains a model without and with liger_ext on this machine, and shows the
times of a step, the peak memory and the losses.

Weights and tokens are random: neither time nor memory depends on their values. ``comparison`` trains both sides.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from . import _devices
from .comparison import report
from .comparison.sides import DTYPES, OURS, STOCK, WARM_UP, train
from .inspection import Impossible, add_source, read_config
from .ops._loss_plan import LEVELS

STEPS = 10  # timed steps
LIMIT = 120  # seconds that the command takes by default
DEFAULTS = {"loss": False, "lora": None, "weights": None, "batches": None, "trust_remote_code": False}


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
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write compare.json, and the picture compare.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    check_least(arguments, batch=1, seq=2, lora=1)
    if arguments.lora and importlib.util.find_spec("peft") is None:
        raise Impossible("--lora needs the package peft, which is not installed")
    config = read_config(arguments.source, arguments.trust_remote_code)
    every = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(every, int) or every < 1:
        raise Impossible(f"num_hidden_layers of {arguments.source} is {every}, expected 1 or more")
    device = find_device(arguments.device)
    request = DEFAULTS | {"steps": WARM_UP + STEPS, "learning_rate": 1e-4, "level": arguments.memory}
    request |= {name: getattr(arguments, name) for name in ("source", "trust_remote_code", "batch", "seq", "lora")}
    request |= {"device": str(device), "dtype": arguments.dtype or ("bf16" if device.type == "cuda" else "fp32")}
    depths = _depths(arguments.layers, every) or [_affordable(request, every)]
    facts = measured(request, every, depths, lines=False)
    facts["until"] = None if arguments.layers else LIMIT
    return report.conclude(facts, "compare", arguments.out, arguments.json, any_model=True)


def measured(request: dict[str, Any], every: int, depths: list[int], lines: bool) -> dict[str, Any]:
    """Trains both sides with each number of layers, of ``every`` that the model has; returns the facts of the report.

    ``lines``: whether progress is printed where there is no terminal.
    """
    request = request | {"device_name": _devices.device_name(torch.device(request["device"]))}
    with report.progress(lines) as show:
        found = {depth: train(request | {"depth": depth}, (STOCK, OURS), show) for depth in depths}
    curves = {depth: [side["losses"] for side in sides.values()] for depth, sides in found.items()}
    agreements = {depth: report.agreement(*pair, DTYPES[request["dtype"]]) for depth, pair in curves.items()}
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    facts = {"name": found[depths[0]][STOCK]["model"], "versions": versions, "until": None, "request": request}
    facts |= {"layers": every, "measured": found, "agreement": agreements}
    if len(depths) > 1:
        facts["extrapolated"] = {side: _extrapolated(found, side, every) for side in (STOCK, OURS)}
    return facts


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    for name, bound in least.items():
        value = getattr(arguments, name)
        if value is not None and value < bound:
            raise Impossible(f"--{name} is {value}, expected {bound} or more")


def find_device(name: str | None) -> torch.device:
    """Returns the device that an option names, by default a GPU.

    Raises:
        Impossible: there is none.
    """
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
    rising = depths == sorted(set(depths)) and all(0 < depth <= every for depth in depths)
    if not rising or len(depths) < len(parts) or len(parts) > 2:
        raise Impossible(f"--layers is {text}, expected one or two rising numbers from 1 to {every}")
    return depths


def _affordable(request: dict[str, Any], every: int) -> int:
    """Returns the number of layers with which both sides end within LIMIT, from a few unpatched steps of two layers."""
    start, depth = time.monotonic(), min(2, every)
    probe = request | {"steps": WARM_UP + 2, "depth": depth, "device_name": ""}
    with report.progress(lines=False) as show:
        step = train(probe, (STOCK,), show)[STOCK]["time"]["median"] / 1e6
    probing = time.monotonic() - start
    fixed = 2 * max(probing - (WARM_UP + 2) * step, 0)  # imports and weights
    return max(min(every, int(depth * (LIMIT - probing - fixed) / (2 * request["steps"] * step))), depth)


def _extrapolated(found: dict[int, dict], side: str, every: int) -> dict[str, float | None]:
    """Returns peak memory and time of all layers: both grow linearly with their number."""
    (few, first), (more, second) = ((depth, sides[side]) for depth, sides in found.items())

    def line(low: float | None, high: float | None) -> float | None:
        return None if low is None or high is None else high + (high - low) / (more - few) * (every - more)

    times = line(first["time"]["median"], second["time"]["median"])
    return {"peak_bytes": line(first["peak_bytes"], second["peak_bytes"]), "median": times}
