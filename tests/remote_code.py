"""Writes repositories of models with remote code, whose source is that of transformers' modules."""

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from llama_models import SIZES, randomised
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = """
from transformers.models.{family}.configuration_{family} import {prefix}Config as Theirs

class XConfig(Theirs):
    model_type = "{model_type}"
"""


def write_repository(
    folder: Path,
    model_type: str,
    changes: Mapping[str, str] | None = None,
    family: str = "llama",
    options: Mapping[str, object] | None = None,
) -> Path:
    """Writes a repository with the code of a family of transformers, edited by `changes` ({old text: new text}), and
    its configuration."""
    prefix = family.capitalize()
    text = inspect.getsource(importlib.import_module(f"transformers.models.{family}.modeling_{family}"))
    text = re.sub(r"from \.\.\.(?=\w)", "from transformers.", text)
    text = text.replace("from ... import", "from transformers import")
    text = text.replace(f".configuration_{family} import ", ".configuration_x import XConfig as ")
    for old, new in (changes or {}).items():
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir()
    (folder / "modeling_x.py").write_text(text)
    (folder / "configuration_x.py").write_text(CONFIG.format(family=family, prefix=prefix, model_type=model_type))
    maps = dict(AutoConfig="configuration_x.XConfig", AutoModelForCausalLM=f"modeling_x.{prefix}ForCausalLM")
    config = {**SIZES, **(options or {}), "model_type": model_type, "auto_map": maps}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def build(folder: Path, auto: type = AutoModelForCausalLM, **options: object) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return randomised(auto.from_config(config, trust_remote_code=True, **options)).train()
