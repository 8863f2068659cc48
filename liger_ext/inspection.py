"""The command ``python -m liger_ext inspect``: describes what a patch would do in a model, before anything is loaded.

The model is built from its configuration on the meta device, where tensors have no memory, and patched there. So the
description is `PatchHandle.summary` of the loaded model, and no weights are read or downloaded.
"""

import argparse
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .models.patching.handle import TOKENS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from liger_ext.models.summary import Summary


class Impossible(Exception):
    """A request of a command that cannot run, in one sentence: the exit status is 2."""


class Failed(Exception):
    """The reason why a command's work has failed, in one sentence: the exit status is 1."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        description="Shows how many norms, MLPs, attentions, ... of a model would run liger_ext's code, why others "
        "would not, and the memory of the logits that the fused loss spares. Reads the configuration, no weights.",
    )
    add_source(parser)
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of a step (default: {TOKENS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a model's folder, its config.json, a model type such as llama, or a hub name")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    if arguments.tokens < 1:
        raise Impossible(f"--tokens is {arguments.tokens}, expected 1 or more")
    with progress(f"building {arguments.source} on the meta device"):
        config = read_config(arguments.source, arguments.trust_remote_code)
        summary = describe(build(config, torch.device("meta"), arguments.trust_remote_code))
    spared = sum(loss.logits_bytes(arguments.tokens) for loss in summary.losses if loss.how != "all logits")
    if not arguments.json:
        print(summary.table(arguments.tokens))
        return 0
    losses = [loss._asdict() | {"dtype": str(loss.dtype).removeprefix("torch.")} for loss in summary.losses]
    parts = {name: part._asdict() for name, part in summary.parts.items()}
    facts = summary._asdict() | {"parts": parts, "losses": losses}
    print(json.dumps(facts | {"tokens": arguments.tokens, "logits_bytes_spared": spared}))
    return 0


def describe(model: "PreTrainedModel") -> "Summary":
    """Patches a model and returns the handle's summary."""
    from liger_ext.models.auto import apply_liger_kernel_to_instance

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the summary names all reasons
        return apply_liger_kernel_to_instance(model).summary(model)


def read_config(source: str, trust_remote_code: bool) -> "PretrainedConfig":
    """Returns the configuration of a model: of a folder, a file, a model type or a name on the hub.

    Raises:
        Impossible: there is none, or it cannot be read.
    """
    from liger_ext.models import check_transformers

    try:
        check_transformers()
    except ImportError as error:
        raise Impossible(str(error)) from None
    from transformers import CONFIG_MAPPING, AutoConfig

    if not source.strip():
        raise Impossible("the name of the model is empty")
    path = Path(source)
    if source in CONFIG_MAPPING and not path.exists():
        return AutoConfig.for_model(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise Impossible(f"the folder {source} has no config.json")
    if path.exists():
        path = path / "config.json" if path.is_dir() else path
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise Impossible(f"{path} is no JSON file that can be read: {error}") from None
        if not isinstance(facts, dict) or not isinstance(facts.get("model_type"), str):
            raise Impossible(f"{path} has no model_type: it is no configuration of a model")
    elif source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise Impossible(f"{source} is no file, no folder and no model type of transformers")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # of transformers, the hub or the model's own code
        if "trust_remote_code" in str(error):
            raise Impossible(f"{source} comes with Python code: --trust-remote-code runs it") from None
        raise Impossible(f"the configuration of {source} cannot be read: {error_sentence(error)}") from None


def build(config: "PretrainedConfig", device: torch.device, trust_remote_code: bool = False) -> "PreTrainedModel":
    """Returns a model in the dtype of its configuration, with random weights.

    Raises:
        Impossible: the configuration cannot be built.
    """
    import transformers

    autos = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText, transformers.AutoModel
    found = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # until transformers 4.55
    dtype = getattr(config, name, None) or torch.float32
    kept = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        with device:
            if found is not None and not (trust_remote_code and hasattr(config, "auto_map")):
                return found(config)
            auto = next((a for a in autos if type(config) in a._model_mapping or hasattr(config, "auto_map")), None)
            if auto is None:
                raise Impossible(f"transformers has no model for the configuration {type(config).__name__}")
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except Impossible:
        raise
    except Exception as error:  # of transformers or the model's own code
        raise Impossible(f"{config.model_type} cannot be built: {error_sentence(error)}") from None
    finally:
        torch.set_default_dtype(kept)


def error_sentence(error: BaseException) -> str:
    """Returns an error's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Prints `text` on a terminal's stderr after two seconds, and removes it at the end."""
    shown = f"{text} ..."
    timer = threading.Timer(2, lambda: print(f"\r{shown}", end="", file=sys.stderr, flush=True))
    if not sys.stderr.isatty():
        yield
        return
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        print(f"\r{'':{len(shown)}}\r", end="", file=sys.stderr, flush=True)
