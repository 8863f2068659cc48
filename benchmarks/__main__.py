"""``python -m benchmarks SUITE`` runs a suite of benchmarks with every peer that can be imported. It prints a table,
and writes the measurements as JSON lines, the table as Markdown, and plots to the folder --out."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import subprocess
import time
import types
from pathlib import Path

import torch
from rich.console import Console

import liger_ext
from liger_ext._timing import Timing

from . import suite

# Modules of this package, imported when they run, since some import transformers. Each has run(settings) -> records,
# line(record), table(records, settings) -> one or several, and draw(records, settings, folder) -> files.
SUITES = ("rows", "flce", "plans", "log_probs", "train", "families", "lora", "trl_steps", "host", "memory")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def facts(device: str) -> dict[str, str]:
    """Facts about machine and versions, without which a measurement means nothing."""
    here = Path(__file__).parent
    git = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
        "liger_ext": liger_ext.__version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Times liger_ext, peers and the limit.")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=suite.DTYPES, default=None, help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--providers", nargs="+", default=(), help="only: liger_ext, torch, torch.compile, ...")
    parser.add_argument(
        "--ops", nargs="+", default=(), help="only these ops (rows, host), cases (log_probs) or set-ups (lora)"
    )
    models = "prefixes of models' names, as Llama-1B (plans, log_probs, train, families, lora, trl_steps)"
    parser.add_argument("--models", nargs="+", default=(), help=models)
    train = parser.add_argument_group("whole training steps (train, families, lora)")
    what = train.add_mutually_exclusive_group()
    what.add_argument("--curves", action="store_true", help="fifty steps; status 1 if the losses differ")
    what.add_argument("--context", action="store_true", help="only search for the longest sequence that fits")
    train.add_argument("--limit-gib", type=float, help="memory limit of --context (default: all of a GPU; 4 on a CPU)")
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="draw old records: JSON lines, as rows_h200_bf16.jsonl"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON lines, Markdown and plots")
    arguments = parser.parse_args(argv)
    if arguments.redraw:
        return redraw(arguments.suite, arguments.redraw, arguments.out)
    dtype = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    settings = suite.Settings(
        arguments.device, dtype, tuple(arguments.providers), tuple(arguments.ops), tuple(arguments.models),
        arguments.curves, arguments.limit_gib,
    )  # fmt: skip
    name = "context" if arguments.suite == "train" and arguments.context else arguments.suite
    torch._dynamo.config.cache_size_limit = 64  # one compiled version per shape

    chosen = importlib.import_module(f"{__package__}.{name}")
    known = facts(arguments.device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = arguments.out / f"{name}_{arguments.device}_{dtype}"
    console = Console(width=None if Console().is_terminal else 220)
    console.print(" | ".join(f"{key} {value}" for key, value in known.items()), highlight=False)
    records = []
    with stem.with_suffix(".jsonl").open("w") as file:
        for record in chosen.run(settings):
            records.append(record)
            file.write(json.dumps(known | dataclasses.asdict(record)) + "\n")
            file.flush()
            console.print(chosen.line(record), highlight=False, markup=False)
    if not records:
        parser.error(f"nothing to run: no {name} case matches --ops, --models and --providers")
    grids = chosen.table(records, settings)
    grids = grids if isinstance(grids, list) else [grids]
    for grid in grids:
        console.print(grid.rich())
    stem.with_suffix(".md").write_text("\n".join(grid.markdown() for grid in grids))
    for path in chosen.draw(records, settings, arguments.out):
        console.print(f"picture: {path}")
    if any(getattr(record, "differs", False) for record in records):
        console.print("[bold red]A loss curve differs from Hugging Face's by more than rounding explains.")
        raise SystemExit(1)


def redraw(name: str, file: Path, out: Path) -> None:
    """Draws records of an earlier run; the pictures are named like their file: SUITE_DEVICE_DTYPE.jsonl."""
    device, _, dtype = file.stem.removeprefix(f"{name}_").rpartition("_")
    if not file.stem.startswith(f"{name}_") or dtype not in suite.DTYPES:
        raise SystemExit(
            f"--redraw {file}: expected a name {name}_DEVICE_DTYPE.jsonl with a DTYPE of {', '.join(suite.DTYPES)}"
        )
    with file.open() as lines:
        records = [types.SimpleNamespace(**json.loads(line, object_hook=_timing_again)) for line in lines]
    out.mkdir(parents=True, exist_ok=True)
    for path in importlib.import_module(f"{__package__}.{name}").draw(records, suite.Settings(device, dtype), out):
        print(f"picture: {path}")


def _timing_again(record: dict) -> Timing | dict:
    """Rebuilds a Timing from the JSON object with its fields."""
    return Timing(**record) if record.keys() == {field.name for field in dataclasses.fields(Timing)} else record


if __name__ == "__main__":
    main()
