"""A patched Llama whose linear layers are bitsandbytes' 4-bit ones, bare or with PEFT's adapters: a training step runs
our nodes in place of bitsandbytes' and PEFT's code, and is as close to float64 of the decoded weights as a stock step.
"""

import pytest
import torch
from llama_models import LEVELS, assert_as_good, build, checkpoint_layers, exact, make_batch, step
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
            plain.weight.data = bnb.functional.dequantize_4bit(module.weight.data, module.quant_state).float()
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


class _Decodings(TorchDispatchMode):
    """Counts the calls of ops that decode 4-bit weights: ours, and those of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"liger_ext": 0, "bitsandbytes": 0}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        namespace, _, name = op.name().partition("::")
        if "4bit" in name:
            self.counts[namespace] += 1
        return op(*args, **(kwargs or {}))


# The class of the adapters, the model's dtype, whether adapters are fp32 under autocast, options of the 4-bit layers.
CASES = {
    "bare": (None, torch.bfloat16, False, {}),
    "bare, fp32": (None, torch.float32, False, {"quant_type": "nf4"}),
    "Linear, fp32": ("Linear", torch.float32, False, {"quant_type": "nf4"}),
    "Linear, autocast": ("Linear", torch.bfloat16, True, {"quant_type": "nf4"}),
    "Linear4bit, fp32": ("Linear4bit", torch.float32, False, {"quant_type": "fp4", "compress_statistics": False}),
    "Linear4bit, autocast": ("Linear4bit", torch.bfloat16, True, {"quant_type": "nf4"}),
    "Linear4bit, bf16": ("Linear4bit", torch.bfloat16, False, {"quant_storage": torch.bfloat16}),
}
cases = pytest.mark.parametrize("case", CASES)


def models(case: str, device: torch.device, targets=ALL, **sizes) -> list[nn.Module]:
    """Returns two equal models, and one in float64 with the decoded weights."""
    kind, dtype, autocast, options = CASES[case]
    made = []
    for is_exact in (False, False, True):
        model = four_bit(build(dtype=dtype, device=device, tie_word_embeddings=False, **sizes), dtype, **options)
        if kind is not None:
            model = adapted(model, kind, targets)
            if not autocast:
                model = model.to(dtype)  # PEFT keeps the adapters of a bf16 model in fp32
        made.append(exact(decoded(model)) if is_exact else model.train())
    return made


def assert_as_good_as_stock(case, device, targets=ALL, change=lambda model: None, sizes=None, **options):
    """Returns the numbers of weights that a step of the patched model decodes, by the library."""
    stock, model, reference = models(case, device, targets, **(sizes or {}))
    apply_liger_kernel_to_llama(model=model, **options)
    for one in (stock, model):
        change(one)
    batch = make_batch(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=CASES[case][2]):
        expected = step(stock, batch)
        with _Decodings() as decodings:
            found = step(model, batch)
    assert_as_good(found, expected, step(reference, batch))
    return decodings.counts


@cases
def test_a_step_runs_our_nodes(device, case):
    """Two layers with seven weights each are decoded in the forward and in the backward. The first layer's q, k and v
    need no gradient of their input where the embedding is frozen."""
    counts = assert_as_good_as_stock(case, device)
    assert counts == {"liger_ext": 28 if CASES[case][0] is None else 25, "bitsandbytes": 0}


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("case", ["Linear4bit, fp32", "Linear4bit, autocast"])
def test_levels_and_neighbours(device, case, memory):
    """Some layers have no adapter; attention's have a bias, which is trained or not."""
    sizes = {"attention_bias": True}
    counts = assert_as_good_as_stock(case, device, ["q_proj", "v_proj", "down_proj"], sizes=sizes, memory=memory)
    assert counts["bitsandbytes"] == 0


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints(device, use_reentrant):
    counts = assert_as_good_as_stock("Linear4bit, fp32", device, change=lambda m: checkpoint_layers(m, use_reentrant))
    assert counts["liger_ext"] > 0


def test_other_uses_run_bitsandbytes(device):
    """Without gradients, and where the layer's compute dtype is not the matmul's, bitsandbytes' own call runs."""
    _, model, _ = models("Linear4bit, bf16", device)
    apply_liger_kernel_to_llama(model=model)
    with torch.no_grad(), _Decodings() as decodings:
        model(**make_batch(device))
    assert decodings.counts["liger_ext"] == 0 < decodings.counts["bitsandbytes"]
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.compute_dtype = torch.float32
    with _Decodings() as decodings:
        step(model, make_batch(device))
    assert decodings.counts["liger_ext"] == 0 < decodings.counts["bitsandbytes"]


def test_a_second_backward(device):
    _, model, _ = models("Linear4bit, fp32", device)
    apply_liger_kernel_to_llama(model=model)
    loss = model(**make_batch(device)).loss
    loss.backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(p.grad, first[name]) for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.slow
def test_compiled(device):
    stock, model, _ = models("Linear4bit, fp32", device)
    apply_liger_kernel_to_llama(model=model)
    batch = make_batch(device)
    expected = step(stock, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    found = step(model, batch, lambda _, **b: compiled(**b))
    for name, result in found.items():
        torch.testing.assert_close(result, expected[name], rtol=1e-3, atol=1e-5)
