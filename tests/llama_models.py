"""Small Llamas and their comparison, for the tests of patching.

A comparison has three models with the same weights: stock (transformers' code in the dtype under test), patched (a
patched copy of it), and exact (transformers' code in float64, norms and loss included). Over all gradients, the patched
model's distance from the exact one may be `FACTOR` times the stock model's distance; in any one result `SINGLE_FACTOR`
times. Both bounds add the distance that rounding the result causes. The factors leave room: the measured ratio of the
distances has a median of 1 in every parameter.
"""

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from cases import RecordCalls, threads
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from liger_ext import apply_liger_kernel_to_llama

LEVELS = ("fast", "auto", "low", "min")  # levels of memory
levels = pytest.mark.parametrize("memory", LEVELS)
FACTOR = 1.5
SINGLE_FACTOR = 3
VOCAB = 1000
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.15,  # large enough logits that every parameter influences the loss
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Sets one thread: for models this small several threads would only wait for each other."""
    with threads(1):
        yield


def config(**overrides: Any) -> LlamaConfig:
    return LlamaConfig(**{**SIZES, **overrides})


def build(
    cls: type[nn.Module] = LlamaForCausalLM, device: Any = "cpu", dtype=torch.float32, seed: int = 0, **overrides: Any
) -> nn.Module:
    torch.manual_seed(seed)
    return randomised(cls(config(**overrides))).to(device, dtype)


def randomised(model: nn.Module) -> nn.Module:
    """Draws the weights of norms and the biases: their initial values 1 and 0 would hide errors."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


def patched(model: nn.Module, **options: Any) -> nn.Module:
    """Returns a patched copy of the model."""
    model = copy.deepcopy(model)
    apply_liger_kernel_to_llama(model=model, **options)
    return model


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)
    return model


def lora(model: nn.Module, **options: Any) -> nn.Module:
    """Returns the model in a PEFT wrapper whose LoRA layers change the output from the start."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def make_batch(device: Any, rows: int = 3, seq: int = 11, seed: int = 1) -> dict[str, Tensor]:
    ids = tokens(rows, seq, device=device, seed=seed)
    labels = ids.clone()
    labels[0, :4] = -100
    return dict(input_ids=ids, labels=labels)


def tokens(*shape: int, device: Any = "cpu", seed: int = 1) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def exact(model: nn.Module) -> nn.Module:
    """Returns a float64 copy of an unpatched model, whose norms and language-model loss compute in float64, too."""
    copied = copy.deepcopy(model).double()
    for module in copied.modules():
        if isinstance(module, modeling_llama.LlamaRMSNorm):
            module.forward = _exact_rms_norm.__get__(module)
    if isinstance(copied, LlamaForCausalLM):
        copied.loss_function = _exact_loss
    return copied


def _exact_rms_norm(self, hidden_states: Tensor) -> Tensor:
    variance = hidden_states.square().mean(-1, keepdim=True)
    return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


def _exact_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    options = dict(ignore_index=ignore_index, label_smoothing=kwargs.get("label_smoothing", 0.0))
    logits, targets = logits.reshape(-1, vocab_size).double(), shift_labels.reshape(-1)
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, targets, **options)
    return nn.functional.cross_entropy(logits, targets, reduction="sum", **options) / num_items_in_batch


def step(model: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None = None) -> dict[str, Tensor]:
    """Runs a forward, and a backward if it returns a loss. Returns the loss, the logits if any, and all gradients by
    name."""
    model.zero_grad(set_to_none=True)
    output = (forward or (lambda m, **b: m(**b)))(model, **batch)
    results = {name: output[name] for name in ("loss", "logits") if output.get(name) is not None}
    if "loss" in results and results["loss"].requires_grad:
        results["loss"].backward()
        results.update({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return {name: result.detach() for name, result in results.items()}


def steps(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the stacked results of a step of each batch. In one batch a gradient of a few numbers may be exact by
    chance."""
    found = [step(model, batch) for batch in batches]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def ops(model: nn.Module, **batch: Any) -> set[str]:
    """Returns the names of liger_ext's ops that a forward calls."""
    with torch.no_grad(), RecordCalls() as record:
        model(**batch)
    return set(record.names)


def count_calls(model: nn.Module) -> list[None]:
    """Returns a list that grows by one entry with each call of an MLP's last layer."""
    calls: list[None] = []
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


def checkpoint_layers(model: nn.Module, use_reentrant: bool, **options: Any) -> None:
    options["use_reentrant"] = use_reentrant
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if use_reentrant:
        model.enable_input_require_grads()


def distance(result: Tensor, reference: Tensor) -> float:
    """Returns the relative distance, as a ratio of 2-norms."""
    reference = reference.double()
    return ((result.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def rounding(dtype: torch.dtype) -> float:
    """Returns the distance that rounding the result once causes, plus a few fp32 roundings before it."""
    return torch.finfo(dtype).eps / math.sqrt(12) + 4 * torch.finfo(torch.float32).eps


def assert_as_good(patched: Mapping[str, Tensor], stock: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> None:
    """Judges the patched model's loss, logits and gradients. Only its logits may be absent."""
    assert set(stock) == set(reference)
    assert set(patched) | {"logits"} == set(stock) | {"logits"}
    ours = {name: distance(result, reference[name]) for name, result in patched.items()}
    theirs = {name: distance(stock[name], reference[name]) for name in patched}
    # The stock gradient of a few numbers may be exact by chance: in fp32 the median distance of all gradients counts,
    # too.
    usual = statistics.median([theirs[name] for name in theirs.keys() - {"loss", "logits"}] or [0.0])
    for name, result in patched.items():
        assert result.dtype == stock[name].dtype, name
        assert result.shape == stock[name].shape, name
        by_luck = result.dtype is torch.float32 and name not in ("loss", "logits")
        bound = SINGLE_FACTOR * max(theirs[name], usual if by_luck else 0) + rounding(result.dtype)
        if name == "loss" and "logits" in stock:
            # The stock loss, one number, may be exact by chance: the errors of its logits count, too.
            error = (stock["logits"].double() - reference["logits"]).square().mean().sqrt()
            bound += (error / reference["loss"].abs().mean()).item()
        assert ours[name] <= bound, (name, ours[name], bound)
    # A gradient that is exactly 0 in theory (a bias under a softmax over positions) has no relative error.
    largest = max((float(reference[name].norm()) for name in ours.keys() - {"loss", "logits"}), default=0.0)
    gradients = {n for n in ours.keys() - {"loss", "logits"} if float(reference[n].norm()) > 1e-12 * largest}
    if gradients:
        all_ours, all_theirs = (math.fsum(d[name] ** 2 for name in gradients) ** 0.5 for d in (ours, theirs))
        bound = FACTOR * all_theirs + rounding(torch.float32) * len(gradients) ** 0.5
        assert all_ours <= bound, ("all gradients", all_ours, bound)


def compare(
    stock: nn.Module, batch: Mapping[str, Any], forward: Callable[..., Any] | None = None, **options: Any
) -> nn.Module:
    """Patches a copy of `stock` and compares both on one batch, in the mode (train or eval) of `stock`."""
    reference = step(exact(stock), {k: v.double() if _is_float(v) else v for k, v in batch.items()}, forward)
    model = patched(stock, **options)
    assert_as_good(step(model, batch, forward), step(stock, batch, forward), reference)
    return model


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
