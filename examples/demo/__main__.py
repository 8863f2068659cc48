"""Fine-tunes a Llama twice, unpatched and patched with liger_ext, from the same weights on the same data, and compares.

    python -m examples.demo                      pretrained SmolLM2-135M-Instruct, in sizes for this machine
    python -m examples.demo --model random:1b    the shape of Llama-3.2-1B, randomly initialised

Exit status: 0; 1 if the two loss curves do not agree; 2 for a request that cannot be run.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # the imports take seconds, and some packages print warnings on import
    print("importing torch and transformers", flush=True)

import torch

from liger_ext import _devices, compare
from liger_ext.comparison import report
from liger_ext.inspection import Failed, Impossible

from . import models
from .data import batches

EPOCHS = 4  # number of passes over each batch: enough for the loss to fall within a demo


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    shapes = ", ".join(f"random:{name}" for name in models.SHAPES)
    add("--model", default="", help=f"a folder, or one of {shapes} (default: SmolLM2-135M-Instruct)")
    add("--text", type=Path, help="train on this file (default: Python's standard library and its documentation)")
    add("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    kinds = compare.DTYPES
    add("--dtype", choices=kinds, help="dtype of weights and arithmetic (default: bf16 if the hardware has it)")
    add("--memory", choices=compare.LEVELS, default="auto", help="level of memory of the patch (default: auto)")
    for name in ("steps", "batch", "seq"):
        add(f"--{name}", type=int, help="default: chosen for the machine and the model")
    add("--out", type=Path, default=Path("demo_out"), help="folder for picture and numbers (default: demo_out)")
    return parser.parse_args(argv)


def train(args: argparse.Namespace, folder: Path) -> dict:
    """Trains both sides and returns the facts of the report; passes the batches to the sides through a folder."""
    compare.check_least(args, steps=2, batch=1, seq=2)
    print("loading the model and the text", flush=True)
    config, _, encode = models.load(args.model)
    request = compare.DEFAULTS | models.choose_sizes(args, config) | {"loss": True, "level": args.memory}
    source = folder
    if args.model.startswith("random:"):
        config.save_pretrained(folder)
    else:
        source, request["weights"] = models.pretrained(args.model)
    request["learning_rate"] = 1e-4 if request["weights"] is not None else 3e-4
    request |= {"source": str(source), "batches": str(folder / "batches.pt")}
    count = max(1, (request["steps"] - 1) // EPOCHS)
    data = batches(encode, count, request["batch"], request["seq"], args.text)
    torch.save(torch.stack(data), request["batches"])
    name = _devices.device_name(torch.device(request["device"]))
    print(f"training with and without liger_ext: {request['steps']} steps, {request['dtype']}, {name}", flush=True)
    every = config.num_hidden_layers
    return compare.measured(request, every, [every], lines=True) | {"name": args.model or "SmolLM2-135M-Instruct"}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with TemporaryDirectory() as folder:
            facts = train(args, Path(folder))
    except (ValueError, OSError, Impossible, Failed) as error:
        print(error)
        return 1 if isinstance(error, Failed) else 2
    return report.conclude(facts, "demo", args.out, as_json=False, any_model=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
