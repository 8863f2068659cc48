"""Cases of test_distributed.py in two processes: training that resumes from a checkpoint under another wrapper,
training with a Trainer, and training on log-probabilities."""

import contextlib
import copy
import importlib.util
import os
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_wrappers import (
    ORDERS,
    OURS,
    WRAPPERS,
    average_gradients,
    full_tensors,
    step_batches,
    weights,
    wrapped_units,
)
from llama_models import build, lora, ops, patched, tokens
from processes import all_pairs_cases
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_ext import apply_liger_kernel_to_llama, losses


def saved_and_loaded(world, saver, loader, saved_by, loaded_by, tied):
    """Saves with torch.distributed.checkpoint and loads into a model with other weights. Training then continues as if
    it had not been interrupted."""
    meshes = {
        "FSDP2": init_device_mesh("cpu", (world.size,)),
        "alone": init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("copies", "alone"))["alone"],
    }

    def start(is_patched, wrapper, seed):
        model = build(seed=seed, tie_word_embeddings=tied).train()
        if is_patched == "patched":
            apply_liger_kernel_to_llama(model=model)
        model = DistributedDataParallel(model) if wrapper == "DDP" else fully_shard(model, mesh=meshes[wrapper])
        # Under Adam's default eps a weight whose gradient is almost 0 moves by the sign of a rounding error.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def advance(model, optimizer, steps, wrapper):
        for step in steps:
            ids = tokens(4, 9, seed=step)
            ids = ids if wrapper == "alone" else ids.chunk(world.size)[world.rank]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def checkpoint_state(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def flat_weights(model):
        return torch.cat([p.detach().flatten() for p in full_tensors(model.named_parameters()).values()])

    model, optimizer = start(saver, saved_by, seed=0)
    advance(model, optimizer, range(2), saved_by)
    if saved_by != "alone" or world.rank == 0:
        group = meshes["alone"].get_group() if saved_by == "alone" else None
        dcp.save(checkpoint_state(model, optimizer), checkpoint_id=world.folder / "checkpoint", process_group=group)
    at_break = flat_weights(model)
    advance(model, optimizer, range(2, 4), saved_by)
    dist.barrier()

    other, its_optimizer = start(loader, loaded_by, seed=1)
    state = checkpoint_state(other, its_optimizer)
    group = meshes["alone"].get_group() if loaded_by == "alone" else None
    dcp.load(state, checkpoint_id=world.folder / "checkpoint", process_group=group)
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert torch.equal(flat_weights(other), at_break)
    advance(other, its_optimizer, range(2, 4), loaded_by)
    end = flat_weights(model)
    assert (flat_weights(other) - end).norm() <= 3e-4 * (end - at_break).norm()


KINDS = ("patched", "stock")
CASES = all_pairs_cases(
    "saved",
    saved_and_loaded,
    dict(saver=KINDS, loader=KINDS, saved_by=("FSDP2", "alone", "DDP"), loaded_by=("FSDP2", "alone", "DDP"),
         tied=(False, True)),
    lambda case: (case["saver"], case["loader"]) != ("stock", "stock"),
)  # fmt: skip


def trainer(world, averaged_over):
    """Hugging Face's Trainer wraps the model in DDP. Its log and the trained weights equal those of a stock model."""
    import accelerate
    from test_trainer import ROWS, padded, parameters
    from transformers import Trainer, TrainingArguments

    def run(model):
        reset = accelerate.state.AcceleratorState._reset_state
        reset(reset_partial_state=True)
        arguments = TrainingArguments(
            str(world.folder), use_cpu=True, max_steps=3, gradient_accumulation_steps=2, learning_rate=2e-3,
            per_device_train_batch_size=2, adam_epsilon=1e-4, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, average_tokens_across_devices=averaged_over == "all",
        )  # fmt: skip
        made = Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS, data_collator=padded)
        made.train()
        assert isinstance(made.model_wrapped, DistributedDataParallel)
        evaluated = made.evaluate()["eval_loss"]
        reset(reset_partial_state=True)
        lines = [line[name] for line in made.state.log_history for name in ("loss", "grad_norm") if name in line]
        return torch.tensor([*lines, evaluated]), parameters(model)

    stock = build().train()
    start, model = parameters(stock), patched(stock)
    assert ops(model, **{name: padded(ROWS[:2])[name] for name in ("input_ids", "labels")}) >= OURS
    variables = dict(RANK=world.rank, LOCAL_RANK=world.rank, WORLD_SIZE=world.size, LOCAL_WORLD_SIZE=world.size)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        (expected, end), (found, our_end) = run(stock), run(model)
    assert len(expected) == 7
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    assert (our_end - end).norm() <= 3e-4 * (end - start).norm()


if importlib.util.find_spec("accelerate"):
    CASES |= all_pairs_cases("Trainer", trainer, dict(averaged_over=("all", "each")))


def log_probs(world, wrapper, alone, lora_on_head):
    """A user's loss of log-probabilities and entropies trains the same weights as in a single process."""

    def objective(model, batch):
        output = model(**batch, return_log_probs=True, return_entropy=True, temperature=0.7)
        factors = torch.linspace(-1, 1, output.log_probs.numel()).view(output.log_probs.shape)
        return (factors * output.log_probs + output.entropy / 2).mean() + output.loss

    stock = build(tie_word_embeddings=False).train()
    if lora_on_head:
        stock = lora(stock, target_modules=["q_proj", "lm_head"])
    apply_liger_kernel_to_llama(model=stock)
    model = copy.deepcopy(stock)
    if alone:
        inside = model.base_model.model if lora_on_head else model
        inside.lm_head = WRAPPERS[wrapper](inside.lm_head)
    model = WRAPPERS[wrapper](model)
    for of in (stock, model):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.3)
        for (batch,) in step_batches(world):
            optimizer.zero_grad()
            objective(of, batch).backward()
            if of is stock:
                average_gradients(of)
            optimizer.step()
    expected = weights(stock)
    for name, found in weights(model).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


CASES |= all_pairs_cases(
    "log_probs",
    log_probs,
    dict(wrapper=tuple(WRAPPERS), alone=(False, True), lora_on_head=(False, True)),
    lambda case: not (case["alone"] and case["wrapper"] == "DDP"),
)


def trl_head(world, wrapper, is_patched):
    """DPO on the head that TRL's trainers add to a model: this library's op trains the same weights as TRL's."""
    from trl.trainer import utils

    import liger_ext.trl

    def trained(ours):
        model = build(tie_word_embeddings=False).train()
        if is_patched == "patched":
            apply_liger_kernel_to_llama(model=model)
        utils.add_fused_lm_head(model, outputs=("log_probs", "entropy"))
        start, model = weights(model), WRAPPERS[wrapper](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with liger_ext.trl.install() if ours else contextlib.nullcontext():
            assert isinstance(utils._ChunkedLogProbFunction, liger_ext.trl._LogProbs) == ours
            for (batch,) in step_batches(world):
                optimizer.zero_grad()
                output = model(**batch, fused_lm_head=True)
                chosen, rejected = output.log_probs.sum(-1).chunk(2)
                (losses.dpo_loss(chosen, rejected, beta=0.5).mean() - 0.1 * output.entropy.mean()).backward()
                optimizer.step()
        return start, weights(model)

    (start, expected), (_, found) = trained(False), trained(True)
    for name, end in expected.items():
        moved = (end - start[name]).norm()
        assert moved > 0 and (found[name] - end).norm() <= 1e-4 * moved, name


if importlib.util.find_spec("trl"):
    CASES |= all_pairs_cases("trl_head", trl_head, dict(wrapper=tuple(WRAPPERS), is_patched=("stock", "patched")))


def qlora(world, storage, units, order):
    """4-bit layers with LoRA under FSDP2 train as an unsharded patched model does. FSDP2's gathered weights have no
    `quant_state`; our op still decodes them."""
    from test_four_bit_layers import _Decodings, adapted, four_bit

    def trained(shards):
        dtype = getattr(torch, storage)
        model = four_bit(build(dtype=dtype, tie_word_embeddings=False), dtype, quant_type="nf4", quant_storage=dtype)
        model = adapted(model, "Linear4bit").to(dtype).train()
        if order == "patch, wrap" or not shards:
            apply_liger_kernel_to_llama(model=model)
        start = weights(model)
        if shards:
            for layer in model.get_base_model().model.layers:
                for unit in wrapped_units(layer, units):
                    fully_shard(unit)
            fully_shard(model)
        if order == "wrap, patch" and shards:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)  # the patch warns of adapters that PEFT's code runs
                apply_liger_kernel_to_llama(model=model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
        for (batch,) in step_batches(world):
            optimizer.zero_grad()
            with _Decodings() as decodings:
                model(**batch).loss.backward()
            if not shards:
                average_gradients(model)
            optimizer.step()
        assert decodings.counts["liger_ext"] > 0 == decodings.counts["bitsandbytes"], decodings.counts
        return {name: t - start[name] for name, t in weights(model).items() if "lora" in name}

    expected, found = trained(False), trained(True)
    for name, moved in expected.items():
        error = (found[name] - moved).norm()
        assert moved.norm() > 0 and error <= (0.1 if storage == "bfloat16" else 1e-4) * moved.norm(), (name, error)


if importlib.util.find_spec("bitsandbytes"):
    factors = dict(storage=("bfloat16", "float32"), units=("layers", "halves of layers"), order=ORDERS)
    CASES |= all_pairs_cases("qlora", qlora, factors)
