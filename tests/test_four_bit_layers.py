"""A patched Llama whose linear layers are bitsandbytes' 4-bit ones, bare or with PEFT's adapters: a training step runs
our nodes in place of bitsandbytes' and PEFT's code, and is as close to float64 of the decoded weights as a stock step.
"""

import contextlib

import pytest
import torch
from llama_models import LEVELS, assert_as_good, build, checkpoint_layers, exact, make_batch, step
from torch import nn

from liger_ext import apply_liger_kernel_to_llama

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def four_bit(model: nn.Module, dtype: torch.dtype, **options) -> nn.Module:
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in ALL:
            bias = module.bias is not None
            layer = bnb.nn.Linear4bit(module.in_features, module.out_features, bias, compute_dtype=dtype, **options)
            layer.load_state_dict(module.state_dict())
            model.set_submodule(path, layer.to(module.weight.device))
    return model


def decoded(model: nn.Module) -> nn.Module:
    """Replaces 4-bit layers by plain ones with the decoded weights, in float32."""
    for path, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            plain.weight.data = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            if module.bias is not None:
                plain.bias.data = module.bias.data.float()
            model.set_submodule(path, plain.requires_grad_(False))
    return model


def adapted(model: nn.Module, kind: str, targets=ALL) -> nn.Module:
    """Adds LoRA adapters: by PEFT's class for plain layers, or by its class for 4-bit layers."""
    model.is_loaded_in_4bit = kind == "Linear4bit"
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=list(targets)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@contextlib.contextmanager
def counted_calls():
    """Yields a list that grows by one entry with each call of a 4-bit layer, of bitsandbytes or PEFT."""
    calls = []
    classes = (bnb.nn.Linear4bit, peft.tuners.lora.layer.Linear, peft.tuners.lora.bnb.Linear4bit)
    hook = nn.modules.module.register_module_forward_pre_hook

    def count(module, args):
        if isinstance(module, classes):
            calls.append(type(module))

    with contextlib.closing(contextlib.ExitStack()) as stack:
        yield calls, lambda: stack.callback(hook(count).remove)


# The adapters' class, the model's dtype, whether adapters are fp32 under autocast, and options of the 4-bit layers.
CASES = {
    "bare": (None, torch.bfloat16, False, {}),
    "bare, fp32": (None, torch.float32, False, {"quant_type": "nf4"}),
    "Linear": ("Linear", torch.bfloat16, False, {"quant_type": "nf4"}),
    "Linear4bit": ("Linear4bit", torch.bfloat16, False, {"quant_type": "nf4", "compress_statistics": False}),
    "Linear4bit, fp32": ("Linear4bit", torch.float32, False, {"quant_type": "fp4"}),
    "Linear4bit, bf16 storage": ("Linear4bit", torch.bfloat16, False, {"quant_storage": torch.bfloat16}),
    "Linear, autocast": ("Linear", torch.bfloat16, True, {"quant_type": "nf4"}),
    "Linear4bit, autocast": ("Linear4bit", torch.bfloat16, True, {"quant_type": "nf4"}),
}
