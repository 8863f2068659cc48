"""Measures the speedup by several GPUs of one host: ``torchrun --standalone --nproc-per-node 2 -m
benchmarks.distributed``.

The first table times the fused loss, forward and backward, in two ways: with its vocabulary sharded over the GPUs, and
with the whole vocabulary on one GPU. Its efficiency is the time on one GPU, divided by the number of GPUs and by the
time with shards; 1 is the ideal. The second table times forward and backward of a model that FSDP2 shards, for
liger_ext and Hugging Face. The head's parameters are gathered together with those outside of the layers, or separately
("head by itself"). There is one process per GPU. Each sample is the time of the slowest process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import liger_ext.functional as LF
from liger_ext import apply_liger_kernel_to_llama
from liger_ext._timing import Timing

from .models import _1B
from .suite import Grid, duration
from .timing import peak_mib

SHAPES = [(8192, 4096, 128256), (16384, 4096, 128256), (4096, 2048, 128256), (32768, 2048, 128256)]
LAYERS, BATCH, SEQ = 4, 8, 2048


def in_turns(calls: dict[str, Callable], rounds: int, burst: int) -> dict[str, Timing]:
    """Times bursts of each call in turns, in all processes at once; a sample is the time of the slowest process."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            call()
            torch.cuda.synchronize()
            dist.barrier()
            start.record()
            for _ in range(burst):
                call()
            end.record()
            end.synchronize()
            samples[name].append(slowest(start.elapsed_time(end) * 1e3 / burst))
    return {name: Timing.from_samples(values) for name, values in samples.items()}


def slowest(value: float) -> float:
    most = torch.tensor(value, device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def sharded_vocabulary(rows: int, hidden: int, vocab: int) -> dict[str, object]:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)  # hidden states and targets are equal in all processes
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    whole = (torch.randn(vocab, hidden, device="cuda") * hidden**-0.5).bfloat16().requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    shard = whole.detach().chunk(world)[rank].clone().requires_grad_()

    def one() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(LF.fused_linear_cross_entropy(x, whole, target), (x, whole))

    def all_together() -> tuple[torch.Tensor, ...]:
        loss = LF.fused_linear_cross_entropy(x, shard, target, process_group=dist.group.WORLD)
        return torch.autograd.grad(loss, (x, shard))

    for found, expected in zip(all_together(), one(), strict=True):  # a wrong result is not worth timing
        expected = expected if found.shape == expected.shape else expected.chunk(world)[rank]
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 1e-2, f"{tuple(found.shape)}: relative error {error:.2g}"
    times = in_turns({"one": one, "sharded": all_together}, rounds=8, burst=3)
    return {
        "shape": f"{rows}x{hidden}x{vocab}",
        "one": times["one"],
        "sharded": times["sharded"],
        "efficiency": times["one"].median / world / times["sharded"].median,
        "one_mib": slowest(peak_mib(one, "cuda")),
        "sharded_mib": slowest(peak_mib(all_together, "cuda")),
    }


def build(patched: bool, head_alone: bool) -> torch.nn.Module:
    """An FSDP2 model with the settings for a model that fits: no resharding after the forward, computation in bf16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(**_1B | dict(num_hidden_layers=LAYERS, tie_word_embeddings=False)))
    if patched:
        apply_liger_kernel_to_llama(model=model)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = [*model.model.layers, *([model.lm_head] if head_alone else []), model]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model.train()


def model_steps() -> list[dict[str, object]]:
    ids = torch.randint(_1B["vocab_size"], (BATCH, SEQ), device="cuda")
    results, losses = [], []
    for name, patched, head_alone in (
        ("Hugging Face", False, False),
        ("Hugging Face, head by itself", False, True),
        ("liger_ext", True, False),
        ("liger_ext, head by itself", True, True),
    ):
        model = build(patched, head_alone)

        def step(model=model) -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            model.zero_grad()
            return loss.detach()

        losses.append(step().item())
        peak = slowest(peak_mib(step, "cuda") + torch.cuda.memory_allocated() / 2**20)
        results.append({"step": name, "time": in_turns({"step": step}, rounds=8, burst=3)["step"], "gib": peak / 1024})
        del model, step
        gc.collect()
        torch.cuda.empty_cache()
    assert max(losses) - min(losses) < 1e-2, losses
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun ... -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for JSON lines and Markdown")
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    world = dist.get_world_size()
    loss = Grid(
        f"Fused loss, vocabulary sharded over {world} of {torch.cuda.get_device_name()}, bf16",
        ["rows x hidden x vocab", "one GPU", f"{world} GPUs", "efficiency", "MiB of one GPU", f"of each of {world}"],
    )
    records: list[dict[str, object]] = []
    for shape in SHAPES:
        records.append(r := sharded_vocabulary(*shape))
        sizes = f"{r['one_mib']:.0f}", f"{r['sharded_mib']:.0f}"
        loss.rows.append([r["shape"], duration(r["one"]), duration(r["sharded"]), f"{r['efficiency']:.3f}", *sizes])
        gc.collect()
        torch.cuda.empty_cache()
    steps = Grid(
        f"FSDP2 on {world} GPUs: forward and backward of {LAYERS} layers of Llama-1B, {BATCH} x {SEQ} tokens per GPU",
        ["", "time", "peak GiB per GPU"],
    )
    for r in model_steps():
        records.append(r)
        steps.rows.append([r["step"], duration(r["time"]), f"{r['gib']:.2f}"])
    if dist.get_rank() == 0:
        arguments.out.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(r, default=lambda timing: timing.__dict__) for r in records)
        (arguments.out / "distributed.jsonl").write_text("\n".join(lines) + "\n")
        (arguments.out / "distributed.md").write_text(loss.markdown() + "\n" + steps.markdown())
        console = Console(width=160)
        console.print(loss.rich())
        console.print(steps.rich())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
