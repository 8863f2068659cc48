"""Fine-tunes a Llama twice, unpatched and patched with liger_ext, from the same weights on the same data, and compares.

    python -m examples.demo                      pretrained SmolLM2-135M-Instruct, in sizes for this machine
    python -m examples.demo --model random:1b    the shape of Llama-3.2-1B, randomly initialised

Exit status: 0; 1 if the two loss curves do not agree; 2 for a request that cannot be run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import platform
import sys
from pathlib import Path

if __name__ == "__main__":  # the imports take seconds, and some packages print warnings on import
    print("importing torch and transformers", flush=True)

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.status import Status

from . import memory, models, report, training
from .data import batches

EPOCHS = 4  # number of passes over each batch: enough for the loss to fall within a demo


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = ", ".join(f"random:{name}" for name in models.SHAPES)
    parser.add_argument("--model", default="", help=f"a folder, or one of {shapes} (default: SmolLM2-135M-Instruct)")
    parser.add_argument(
        "--text", type=Path, help="train on this file (default: Python's standard library and its documentation)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    parser.add_argument(
        "--dtype",
        choices=models.DTYPES,
        help="dtype of weights and arithmetic (default: bf16 if the hardware has it)",
    )
    parser.add_argument(
        "--memory",
        choices=models.LEVELS,
        default="auto",
        help="level of memory of the patch (default: auto)",
    )
    for name in ("steps", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int, help="default: chosen for the machine and the model")
    parser.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder for picture and numbers (default: demo_out)"
    )
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "seq"):
        if getattr(args, name) is not None and getattr(args, name) < 2 - (name == "batch"):
            parser.error(f"--{name} {getattr(args, name)} is too small")
    return args


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or 'CPU')}, {torch.get_num_threads()} threads"


def phase(console: Console, what: str) -> Status:
    """Displays the demo's current phase: a spinner on a terminal, a line elsewhere."""
    if not console.is_terminal:
        console.print(what)
    return console.status(what)


def train(console: Console, runs: list[training.Run], data: list[torch.Tensor], plan: models.Plan) -> None:
    """Trains both models: displays a bar for each on a terminal, and elsewhere a line for about every fifth of the
    steps."""
    every = math.ceil(plan.steps / 5)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    bars = Progress(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal)
    with bars:
        tasks = {run.name: bars.add_task(run.name, total=plan.steps) for run in runs}
        for run in training.train(runs, data, plan):
            done, shown = len(run.losses), f"{run.name:12}  loss {run.losses[-1]:.4f}"
            bars.update(tasks[run.name], completed=done, description=shown)
            if bars.disable and (done % every == 0 or done == plan.steps):
                console.print(f"{shown}  step {done} of {plan.steps}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        # The loaders' output, above all their progress bars, would break the display; their failures raise exceptions.
        with phase(console, "loading the model and the text"), contextlib.redirect_stderr(io.StringIO()):
            config, build, encode = models.load(args.model)
            plan = models.make_plan(args, config)
            data = batches(encode, max(1, (plan.steps - 1) // EPOCHS), plan.batch, plan.seq, args.text)
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{error}")
        return 2
    dtype = next(name for name, dtype in models.DTYPES.items() if dtype == plan.dtype)
    level = "" if plan.memory == "auto" else f"memory={plan.memory!r}, "
    title = (
        f"{args.model or 'SmolLM2-135M-Instruct'}, {plan.steps} steps of {plan.batch} x {plan.seq} tokens, {dtype}, "
        f"{level}{device_name(plan.device)}, torch {torch.__version__}, transformers {transformers.__version__}"
    )
    console.print(title)
    peaks: report.Memory = {}
    for name in (training.UNPATCHED, training.PATCHED):
        with phase(console, f"measuring peak memory: {name}, in a separate process"):
            peaks[name] = memory.measure_apart(name, config, plan)
    with phase(console, "training with and without liger_ext"):
        runs = training.make_runs(build, plan)
    train(console, runs, data, plan)

    agreed = report.agreement(runs[0].losses, runs[1].losses, plan.dtype)
    report.print_table(console, title, runs, peaks, plan, agreed)
    args.out.mkdir(parents=True, exist_ok=True)
    report.save_numbers(args.out / "demo.json", title, runs, peaks, plan, agreed)
    report.draw(args.out / "demo.png", title, runs, peaks, plan)
    console.print(f"picture: {args.out / 'demo.png'}   numbers: {args.out / 'demo.json'}")
    if not agreed.holds:
        console.print(
            f"[bold red]The loss curves do not agree: at step {agreed.step} they differ by {agreed.difference:.3g}, "
            f"and rounding explains at most {agreed.bound:.3g}. Please report this, with the title of the table."
        )
        return 1
    console.print("[bold green]The loss curves agree.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
