"""Cases of test_distributed.py in two and in four processes: patched Llamas under FSDP2, FSDP1 and DDP.

A case trains a stock model and a patched one under the same wrapper for two steps; each process has its own rows. The
reference is a model in float64 without a wrapper. The patched model's results may be as far from it as the stock
model's results are.
"""

import contextlib
import copy
from functools import partial

import torch
import torch.distributed as dist
from llama_models import assert_as_good, build, checkpoint_layers, exact, lora, ops, tokens
from processes import all_pairs_cases
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.ops._loss_plan import SMALLEST

CASES = {}  # {name: (number of processes, function that each process calls)}
OURS = {"rms_norm", "add_rms_norm", "glu", "rope", "fused_linear_cross_entropy"}
ORDERS = "patch, wrap", "wrap, patch"
CHECKPOINTS = "reentrant", "non-reentrant", "wrapper"  # "wrapper" is torch's own checkpoint wrapper
BF16 = torch.bfloat16


def step_batches(world, micro_steps=1, rows=2, seq=9):
    """Returns this process's rows for two steps. Each process has the same number of labels, so that the mean of the
    processes' means is the mean over all rows."""

    def batch(seed):
        ids = tokens(rows, seq, seed=10 * seed + world.rank)
        return dict(input_ids=ids, labels=ids.masked_fill(torch.arange(seq) < 3, -100))

    return [[batch(step * micro_steps + micro) for micro in range(micro_steps)] for step in range(2)]


def train(model, batches, read_results, without_sync=None, before_step=None, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for micro_batches in batches:
        optimizer.zero_grad()
        for batch in micro_batches:
            waits = without_sync is not None and batch is not micro_batches[-1]
            with without_sync(model) if waits else contextlib.nullcontext():
                output = model(**batch, **arguments)
                (output.loss / len(micro_batches)).backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()
    results = {name: output[name].detach() for name in ("loss", "logits") if output.get(name) is not None}
    return results | read_results(model)


def average_gradients(model):
    """Averages the gradients over the processes."""
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def full_tensors(named):
    """Returns whole tensors under the names that parameters have without wrappers."""
    found = {}
    for name, t in named:
        for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
            name = name.replace(part, "")
        found[name.removeprefix("module.")] = t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
    return found


def gradients(model):
    return full_tensors((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


def weights(model):
    """Returns a model's whole weights. FSDP1 gathers them only inside of ``summon_full_params``."""
    is_wrapped = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model) if is_wrapped else contextlib.nullcontext():
        return full_tensors((name, p.detach()) for name, p in model.named_parameters())


def compare(
    world,
    wrap,
    order,
    checkpoint=None,
    accumulates="",
    without_sync=None,
    read_results=gradients,
    expected_ops=OURS,
    change=lambda model: model,
    patch=None,
    batch=None,
    memory=None,
    **options,
):
    """Trains stock, patched and float64 models, and compares the results. `accumulates`: each step sums the gradients
    of two batches, with synchronisation ("with sync") or inside of `without_sync(model)`. The patched model's forward
    takes `memory`; the model's configuration takes `options`."""
    stock = change(build(**options).train())
    batches = step_batches(world, 2 if accumulates else 1, **(batch or {}))
    if accumulates != "without sync":
        without_sync = None
    reference = train(exact(stock), batches, read_results, before_step=average_gradients)
    results = []
    for is_patched in (False, True):
        model = copy.deepcopy(stock)
        if checkpoint == "wrapper":
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
        elif checkpoint:
            checkpoint_layers(model, use_reentrant=checkpoint == "reentrant")
        if is_patched and order == "patch, wrap":
            apply_liger_kernel_to_llama(model=model, **(patch or {}))
        model = wrap(model)
        if is_patched and order == "wrap, patch":
            apply_liger_kernel_to_llama(model=model, **(patch or {}))
        # A cache would grow again when a layer is recomputed. transformers' own checkpointing disables it; torch's
        # wrapper does not.
        given = {"use_cache": False} if checkpoint == "wrapper" else {}
        if is_patched and memory is not None:
            given["memory"] = memory
        try:
            results.append(train(model, batches, read_results, without_sync, **given))
        except Exception as error:
            error.add_note(f"The model is {'patched' if is_patched else 'stock'}.")
            raise
    if expected_ops is not None:
        found = ops(model, **batches[0][0])
        assert found == expected_ops, found
    if read_results is weights:  # compare the changes of the weights
        for each in (reference, *results):
            each.update({name: each[name] - p.detach() for name, p in stock.named_parameters()})
    assert_as_good(results[1], results[0], reference)


POLICIES = {
    "fp32": {},
    "bf16": dict(param_dtype=BF16, reduce_dtype=torch.float32),
    "all bf16": dict(param_dtype=BF16),
    "fp32 results": dict(param_dtype=BF16, output_dtype=torch.float32),  # output dtype of head and model
    "inputs as they are": dict(param_dtype=BF16, cast_forward_inputs=False),
}
FSDP2 = dict(
    policy=tuple(POLICIES),
    reshard=(False, True),
    offload=(False, True),
    units=("layers", "halves of layers", "every module"),
    head=("", "head alone", "head and norm"),
    tied=(False, True),
    accumulates=("", "without sync", "with sync"),
    checkpoint=("", *CHECKPOINTS),
    memory=("auto", "low", "fast"),
    order=ORDERS,
)


def wrapped_units(layer, units):
    """Yields the modules of a layer to wrap, the innermost first."""
    if units == "halves of layers":
        yield from (layer.self_attn, layer.mlp)
    elif units == "every module":
        yield from (module for module in layer.modules() if [*module.parameters(recurse=False)])
    yield layer


def fsdp2(world, policy, reshard, offload, units, head, tied, accumulates, checkpoint, memory, order, shape=None):
    names = {1: ("shard",), 2: ("replicate", "shard")}
    mesh = init_device_mesh("cpu", shape or (world.size,), mesh_dim_names=names[len(shape or (0,))])
    of_layers = MixedPrecisionPolicy(**(POLICIES[policy] | dict(output_dtype=None)))
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**POLICIES[policy]), reshard_after_forward=reshard)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)

    def wrap(model):
        for layer in model.model.layers:
            for unit in wrapped_units(layer, units):
                fully_shard(unit, **(options | dict(mp_policy=of_layers)))
        if head:
            fully_shard(model.lm_head if head == "head alone" else [model.model.norm, model.lm_head], **options)
        return fully_shard(model, **options)

    @contextlib.contextmanager
    def without_sync(model):
        switch = model.set_requires_all_reduce if shape else model.set_requires_gradient_sync
        switch(False)
        yield
        switch(True)

    expected_ops = set(OURS)
    if units == "every module":  # FSDP2 gathers a norm's weight only if the norm is called
        expected_ops -= {"add_rms_norm"}
    compare(
        world,
        wrap,
        order,
        checkpoint,
        accumulates=accumulates,
        without_sync=without_sync,
        expected_ops=expected_ops,
        patch=dict(memory=memory),
        tie_word_embeddings=tied,
    )


# FSDP2 refuses a tied head.
CASES |= all_pairs_cases("FSDP2", fsdp2, FSDP2, lambda case: not (case["head"] and case["tied"]))
CASES |= all_pairs_cases(
    "HSDP",
    partial(
        fsdp2,
        shape=(2, 2),
        policy="bf16",
        head="",
        tied=False,
        offload=False,
        checkpoint="",
        units="layers",
        memory="auto",
    ),
    dict(accumulates=("", "without sync"), reshard=FSDP2["reshard"], order=ORDERS),
    processes=4,
)

DDP = dict(
    graph=("", "static", "finds unused"),
    views=(False, True),
    autocast=(False, True),
    tied=(False, True),
    accumulates=("", "without sync", "with sync"),
    checkpoint=("", *CHECKPOINTS),
    order=ORDERS,
)


def ddp(world, graph, views, autocast, tied, accumulates, checkpoint, order):
    def wrap(model):
        wrapped = DistributedDataParallel(
            model, static_graph=graph == "static", find_unused_parameters=graph == "finds unused",
            gradient_as_bucket_view=views, bucket_cap_mb=0.05,
        )  # fmt: skip
        if autocast:
            model.forward = torch.autocast("cpu", BF16)(model.forward)
        return wrapped

    def change(model):
        if graph == "finds unused":
            model.unused = nn.Linear(3, 3)
        return model

    compare(
        world,
        wrap,
        order,
        checkpoint,
        accumulates=accumulates,
        without_sync=DistributedDataParallel.no_sync,
        change=change,
        tie_word_embeddings=tied,
    )


def ddp_can(case):
    """Returns whether DDP supports a case. A static graph does not work without synchronisation, nor a reentrant
    checkpoint with ``find_unused_parameters``."""
    unsynchronised = case["graph"] == "static" and case["accumulates"] == "without sync"
    return not unsynchronised and not (case["graph"] == "finds unused" and case["checkpoint"] == "reentrant")


CASES |= all_pairs_cases("DDP", ddp, DDP, ddp_can)

FSDP1 = dict(
    use_orig_params=(False, True),
    strategy=("FULL_SHARD", "SHARD_GRAD_OP"),
    bf16=(False, True),
    units=("layers", "every module"),
    head=("", "head alone"),
    tied=(False, True),
    accumulates=("", "without sync"),
    checkpoint=("", *CHECKPOINTS),
    order=ORDERS,
)


def fsdp1(world, use_orig_params, strategy, bf16, units, head, tied, accumulates, checkpoint, order):
    def wrap(model):
        def is_unit(module, recurse, nonwrapped_numel):
            return recurse or any(module is unit for unit in chosen)

        chosen = [unit for layer in model.model.layers for unit in wrapped_units(layer, units)]
        chosen += [model.lm_head] * bool(head)

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=is_unit,
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(BF16, torch.float32) if bf16 else None,
            device_id=torch.device("cpu"),
        )

    compare(
        world,
        wrap,
        order,
        checkpoint,
        accumulates=accumulates,
        without_sync=FullyShardedDataParallel.no_sync,
        read_results=weights,
        expected_ops=OURS if units == "layers" else OURS - {"add_rms_norm"},
        tie_word_embeddings=tied,
    )


CASES |= all_pairs_cases("FSDP1", fsdp1, FSDP1, lambda case: not (case["head"] and case["tied"]))

WRAPPERS = {
    "DDP": DistributedDataParallel,
    "FSDP1": partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu")),
    "FSDP2": fully_shard,
}


def peft_head(world, wrapper, alone, head):
    """Trains a PEFT model whose head has LoRA or is trained as a copy. A head with LoRA returns the logits of some rows
    at a time, or all logits where a wrapper gathers the head's weights and sums their gradients; of a copied head the
    loss is fused."""

    def wrap(model):
        if alone:
            model.base_model.model.lm_head = WRAPPERS[wrapper](model.base_model.model.lm_head)
        return WRAPPERS[wrapper](model)

    adapted = dict(target_modules=["q_proj", "lm_head"])
    copied = dict(target_modules=["q_proj"], modules_to_save=["lm_head"])
    compare(
        world,
        wrap,
        "wrap, patch",
        change=lambda model: lora(model, **(adapted if head == "LoRA" else copied)),
        read_results=weights,
        expected_ops=OURS - {"fused_linear_cross_entropy"} | {"cross_entropy"} if head == "LoRA" else OURS,
        memory=SMALLEST,
        batch=dict(rows=6, seq=50),
        tie_word_embeddings=False,
    )


CASES |= all_pairs_cases(
    "head",
    peft_head,
    dict(wrapper=tuple(WRAPPERS), alone=(False, True), head=("LoRA", "copy")),
    lambda case: not (case["alone"] and case["wrapper"] == "DDP"),
)


def compiled(world, wrapper):
    """Compiles the layers under FSDP2, as its users do, and the whole model under DDP, whose graph torch splits at the
    ends of buckets."""

    def wrap(model):
        is_patched = type(model).__module__.startswith("liger_ext")
        if wrapper == "FSDP2":
            for layer in model.model.layers:
                if is_patched:
                    layer.compile(backend="aot_eager")
                fully_shard(layer)
        model = WRAPPERS[wrapper](model)
        if is_patched and wrapper == "DDP":
            model.compile(backend="aot_eager")
        return model

    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compare(world, wrap, "patch, wrap", expected_ops=None, tie_word_embeddings=False)
    assert graphs["unique_graphs"] > before


CASES |= all_pairs_cases("compiled", compiled, dict(wrapper=("DDP", "FSDP2")))
