"""The table "Heads that the loss is fused with" in docs/patching.md: the rows of logits that a step computes at a time.

Each case changes a stock model and a patched one in the same way, the latter before or after the patch. Their losses
and gradients must be equal. Under DeepSpeed's hooks, and for float8, whose chunks have scales of their own, only the
losses are compared.
"""

import dataclasses
import importlib

import pytest
import torch
from llama_models import VOCAB, build, distance, lora, make_batch, one_thread, step  # noqa: F401
from test_adapters import stirred
from test_patch_wrappers import mesh  # noqa: F401
from test_quantized import KINDS
from test_zero3 import ZeRO3
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.ops._loss_plan import SMALLEST

peft = pytest.importorskip("peft")
hooks = pytest.importorskip("accelerate.hooks")

BATCH = dict(rows=6, seq=50)
FUSED, CHUNKS, ALL = 0, 128, 300  # the most rows of logits in a tensor
FOREIGN = ALL, CHUNKS  # with log-probabilities, checkpoints differentiate weights of other modules, too


class LogitRows(TorchDispatchMode):
    """Records the most rows of logits that an op computes. The fused loss computes its logits inside one op."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for t in () if func.is_view else tree_leaves(results):
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dim() > 1 and t.shape[-1] == VOCAB:
                self.most = max(self.most, t.numel() // VOCAB)
        return results


def resized(model):
    """Builds a new head."""
    model.resize_token_embeddings(VOCAB + 8)
    model.resize_token_embeddings(VOCAB)
    return model


def shards(*modules, output_dtype=None, whole=False):
    def shard(model):
        for name in modules:
            fully_shard(model.get_submodule(name), mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype))
        return fully_shard(model) if whole else model

    return shard


def fsdp1(model, head=False, **options):
    def wrap(module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)

    if head:
        model.lm_head = wrap(model.lm_head)
    return wrap(model)


def find_head(model):
    return next(m for name, m in model.named_modules() if name.rpartition(".")[2] == "lm_head")


def hooked(*user_hooks):
    def hook(model):
        for one in user_hooks:
            hooks.add_hook_to_module(find_head(model), one(), append=True)
        return model

    return hook


def on_devices():
    return hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)


class Halves(hooks.ModelHook):
    def post_forward(self, module, output):
        return output / 2


def read_by_a_user(model):
    find_head(model).register_forward_hook(lambda module, args, output: None)
    return model


def deepspeed(model):
    ZeRO3(model)
    return model


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Elsewhere(nn.Module):
    """Trains a weight of another module."""

    out_features = VOCAB

    def __init__(self, model):
        super().__init__()
        self.others = [model.model.embed_tokens]

    def forward(self, x):
        return nn.functional.linear(x, self.others[0].weight)


def with_head(make):
    def change(model):
        model.lm_head = make(model)
        return model.train()

    return change


def with_class(cls):
    def change(model):
        model.lm_head.__class__ = cls
        return model

    return change


def parametrized(model):
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Softsign())
    return model


def quantised(kind, *names):
    return lambda model: KINDS[kind](model, ("lm_head", *names))


def trained_int8(model):
    """A weight of a tensor subclass that trains."""
    training = pytest.importorskip("torchao.prototype.quantized_training")
    config = training.int8_mixed_precision_training()
    importlib.import_module("torchao.quantization").quantize_(model, config, lambda _, path: path == "lm_head")
    return model


def adapters(**options):
    return lambda model: lora(model, **options)


def then(*changes):
    def change(model):
        for one in changes:
            model = one(model)
        return model

    return change


LORA, COPIED = dict(target_modules=["lm_head"]), dict(target_modules=["q_proj"], modules_to_save=["lm_head"])
FP32 = torch.float32
HEADS = {  # {name: (rows, change of a model)}
    "linear": (FUSED, lambda model: model),
    "bias": (FUSED, with_head(lambda model: nn.Linear(64, VOCAB))),
    "built later": (FUSED, resized),
    "parametrized": (FUSED, parametrized),
    "DDP": (FUSED, DistributedDataParallel),
    "FSDP1": (FUSED, fsdp1),
    "FSDP1, head": (FUSED, lambda model: fsdp1(model, head=True)),
    "FSDP1, head, original parameters": (FUSED, lambda model: fsdp1(model, head=True, use_orig_params=True)),
    "FSDP2": (FUSED, shards(whole=True)),
    "FSDP2, head": (FUSED, shards("lm_head", whole=True)),
    "FSDP2, head, results in fp32": (FUSED, shards("lm_head", output_dtype=FP32)),
    "FSDP2, head, results in bf16": (ALL, shards("lm_head", output_dtype=torch.bfloat16)),
    "FSDP2, head in float64, results in fp32": (ALL, then(nn.Module.double, shards("lm_head", output_dtype=FP32))),
    "FSDP2, head built later": (FUSED, then(resized, shards("lm_head"))),
    "accelerate": (FUSED, hooked(on_devices)),
    "accelerate, head built later": (FUSED, then(resized, hooked(on_devices))),
    "DeepSpeed": (FUSED, deepspeed),
    "copy": (FUSED, adapters(**COPIED)),
    "copy, FSDP2": (FUSED, then(adapters(**COPIED), shards("base_model.model.lm_head", whole=True))),
    "copy, accelerate": (FUSED, then(adapters(**COPIED), hooked(on_devices))),
    "LoRA": (CHUNKS, adapters(**LORA)),
    "DoRA": (CHUNKS, adapters(**LORA, use_dora=True)),
    "LoRA of a parameter": (CHUNKS, adapters(target_modules=[], target_parameters=["lm_head.weight"])),
    "LoRA, tokens": (CHUNKS, adapters(target_modules=["q_proj"], trainable_token_indices={"lm_head": [5, 400]})),
    **{kind: (CHUNKS, quantised(kind)) for kind in KINDS},
    "bitsandbytes 4 bit, LoRA": (CHUNKS, then(quantised("bitsandbytes 4 bit"), adapters(**LORA))),
    "torchao int8, trained": (CHUNKS, trained_int8),
    "a user's class": (CHUNKS, with_class(Doubled)),
    "a user's hook": (ALL, read_by_a_user),
    "a user's hook of accelerate": (ALL, hooked(on_devices, Halves)),
    "a user's hook, LoRA": (ALL, then(adapters(**LORA), read_by_a_user)),
    "accelerate, LoRA": (ALL, then(adapters(**LORA), hooked(on_devices))),
    "accelerate, quantised": (ALL, then(quantised("module"), hooked(on_devices))),
    "FSDP2, LoRA": (ALL, then(adapters(**LORA), shards("base_model.model.lm_head"))),
    "a weight of others": (FOREIGN, with_head(Elsewhere)),
    "without out_features": (ALL, with_head(lambda model: nn.Sequential(nn.Linear(64, VOCAB)))),
}

INVOCATION = 999  # the token that starts an aLoRA adapter
# Options of PEFT's tuners. A tuner that is not named here gets the head as its only target.
TUNERS = {
    "ADALORA": dict(init_r=4, target_r=2, total_step=10),
    "ADAMSS": dict(r=8, num_subspaces=2),
    "BOFT": dict(boft_block_size=4),
    "C3A": dict(block_size=8),
    "FOURIERFT": dict(n_frequency=50),
    "IA3": dict(feedforward_modules=[]),
    "LILY": dict(target_modules=["lm_head", "q_proj"]),
    "LORA": dict(alora_invocation_tokens=[INVOCATION], r=4, target_modules=["lm_head", "q_proj"]),
    "OFT": dict(oft_block_size=8),
    "OSF": dict(target_modules=["lm_head", "q_proj"]),
    "POLY": dict(r=4, n_tasks=2, n_skills=2),
    "ROAD": dict(group_size=8),
    "TRAINABLE_TOKENS": dict(token_indices=[5, 400]),
    "VBLORA": dict(r=2, num_vectors=16, vector_length=8, topk=2, target_modules=["lm_head", "q_proj"]),
}
WITHOUT_CHUNKS = "LILY", "LORA", "POLY"  # LoRA stands for aLoRA
LAYER_TUNERS = "ADAPTION_PROMPT", "SHADOW"  # their targets are attentions or decoder layers


def takes_targets(config):
    return "target_modules" in {field.name for field in dataclasses.fields(config)}


def adapt(kind):
    def change(model):
        if kind == "ADAMSS":
            pytest.importorskip("sklearn")
        options = {"target_modules": ["lm_head"]} | TUNERS.get(kind, {})
        torch.manual_seed(5)
        return stirred(peft.get_peft_model(model, CONFIGS[kind](task_type="CAUSAL_LM", **options)))

    return change


CONFIGS = {kind.value: config for kind, config in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
HEADS |= {
    f"PEFT's {kind}": (ALL if kind in WITHOUT_CHUNKS else CHUNKS, adapt(kind))
    for kind, config in CONFIGS.items()
    if takes_targets(config) and kind not in LAYER_TUNERS
}


def results(model, **batch):
    found = step(model, batch)
    return {name: (r.full_tensor() if hasattr(r, "full_tensor") else r).clone() for name, r in found.items()}


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("log_probs", [False, True], ids=["", "log-probabilities"])
@pytest.mark.parametrize("order", ["patch, change", "change, patch"])
@pytest.mark.parametrize("rows, change", HEADS.values(), ids=HEADS)
def test_rows_of_logits(rows, change, order, log_probs):
    models = []
    for is_patched in (False, True):
        model = build(tie_word_embeddings=False)
        if is_patched and order == "patch, change":
            apply_liger_kernel_to_llama(model=model)
        torch.manual_seed(4)
        model = change(model).train()
        if is_patched and order == "change, patch":
            apply_liger_kernel_to_llama(model=model)
        models.append(model)
    stock, model = models
    batch = make_batch("cpu", **BATCH)
    batch["input_ids"][2:, 7] = INVOCATION
    if change is HEADS["PEFT's POLY"][1]:
        batch["task_ids"] = torch.tensor([0, 1] * 3)
    torch.manual_seed(3)
    expected = results(stock, **batch)
    torch.manual_seed(3)
    with LogitRows() as record:
        found = results(model, **batch, memory=SMALLEST, **({"return_log_probs": True} if log_probs else {}))
    assert record.most == (rows[log_probs] if isinstance(rows, tuple) else rows)
    assert expected.keys() - found.keys() == {"logits"}
    is_float8 = change is HEADS["float8"][1]
    for name in ["loss"] if is_float8 else found:
        assert distance(found[name], expected[name]) <= (1e-2 if is_float8 else 2e-4), name


@pytest.mark.parametrize("name, rows", [("linear", FUSED), ("LoRA", ALL)])
def test_rows_of_logits_in_a_graph(name, rows):
    seen = [0]

    def record(graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dim() > 1 and v.shape[-1] == VOCAB]
        seen.extend(t.numel() // VOCAB for t in tensors)
        return graph.forward

    torch._dynamo.reset()
    model = HEADS[name][1](build(tie_word_embeddings=False)).train()
    apply_liger_kernel_to_llama(model=model)
    compiled, batch = torch.compile(model, backend=record), make_batch("cpu", **BATCH)
    loss = compiled(**batch, memory=SMALLEST, use_cache=False).loss
    torch.testing.assert_close(loss, model(**batch).loss)
    assert max(seen) == rows
