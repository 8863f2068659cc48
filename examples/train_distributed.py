"""One script from a laptop's CPU to many nodes: FSDP2, liger_ext, checkpoints, and resuming from them.

    python examples/train_distributed.py MODEL_FOLDER TEXT_FILE
    torchrun --standalone --nproc-per-node 8 examples/train_distributed.py MODEL_FOLDER TEXT_FILE --compile
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/...

Each step trains on ``--batch`` windows of ``--seq`` tokens, shared by all processes: the losses are the same on any
number of them. Started again with the same ``--output``, it goes on from the newest checkpoint, also on another number
of processes. On one GPU, and on a CPU, the same code runs in one process.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from liger_ext import apply_liger_kernel_to_instance


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of transformers, with its tokenizer")
    parser.add_argument("text", type=Path, help="UTF-8 text to train on")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="checkpoints, and the trained model")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step, of all processes together")
    parser.add_argument("--seq", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--memory", default="auto", choices=("fast", "auto", "low", "min"), help="see the README")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each decoder layer")
    return parser.parse_args()


def start_processes() -> torch.device:
    """Joins the processes that torchrun has started, or is the only one. Returns the device of this one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def build(arguments: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The patched model, sharded: fp32 weights, and on a GPU bf16 copies to compute with."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device).train()
    apply_liger_kernel_to_instance(model, memory=arguments.memory)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = dict(mesh=mesh, mp_policy=precision) if device.type == "cuda" else dict(mesh=mesh)
    for layer in model.model.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def windows_of(arguments: argparse.Namespace) -> torch.Tensor:
    """The text as int64 [windows, seq]."""
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = torch.tensor(tokenizer(arguments.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    if len(ids) < arguments.seq:
        raise SystemExit(f"{arguments.text} has {len(ids)} tokens, fewer than one sequence (--seq {arguments.seq})")
    return ids[: len(ids) // arguments.seq * arguments.seq].view(-1, arguments.seq)


def batch_of(windows: torch.Tensor, step: int, batch: int) -> torch.Tensor:
    """This process's share of a step's windows, which depend on the step alone: a run that is resumed sees the same."""
    chosen = torch.randint(len(windows), (batch,), generator=torch.Generator().manual_seed(step))
    return windows[chosen.chunk(dist.get_world_size())[dist.get_rank()]]


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, output: Path) -> int:
    """Loads the newest checkpoint that was written to its end. Returns how many steps were made."""
    # .metadata is written last.
    found = [int(path.parent.name.removeprefix("step-")) for path in output.glob("step-*/.metadata")]
    if not found:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=output / f"step-{max(found)}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def save_model(model: torch.nn.Module, folder: str, output: Path) -> None:
    """As `save_pretrained` does of a model on one device, by the first process."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        whole.load_state_dict(weights)
        whole.save_pretrained(output)
        AutoTokenizer.from_pretrained(folder).save_pretrained(output)


def main() -> None:
    arguments = parse_arguments()
    device = start_processes()
    world, first = dist.get_world_size(), dist.get_rank() == 0
    if arguments.batch % world:
        raise SystemExit(f"--batch {arguments.batch} cannot be shared equally by {world} processes")
    windows = windows_of(arguments)
    model = build(arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    done = resume(model, optimizer, arguments.output)
    if first and done:
        print(f"resumed after step {done}", flush=True)

    started, since = time.perf_counter(), done
    for step in range(done + 1, arguments.steps + 1):
        input_ids = batch_of(windows, step, arguments.batch).to(device)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % arguments.log_every == 0 or step == arguments.steps:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            text = f"step {step}/{arguments.steps}: loss {mean.item():.5f}"  # waits for the GPU
            rate = (step - since) * arguments.batch * arguments.seq / (time.perf_counter() - started)
            text += f", {rate:,.0f} tokens/s, {rate / world:,.0f} per process"
            if device.type == "cuda":
                text += f", {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB per GPU"
            if first:
                print(text, flush=True)
            started, since = time.perf_counter(), step
        if step % arguments.save_every == 0:
            dcp.save(state_of(model, optimizer, step), checkpoint_id=arguments.output / f"step-{step}")
    save_model(model, arguments.model, arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
