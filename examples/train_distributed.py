"""One training script for a laptop's CPU up to many nodes: FSDP2, liger_ext, checkpoints, and resuming from them.

    python examples/train_distributed.py MODEL_FOLDER TEXT_FILE
    torchrun --standalone --nproc-per-node 8 examples/train_distributed.py MODEL_FOLDER TEXT_FILE --compile
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/...

Each step trains on --batch windows of --seq tokens, divided among all processes: up to rounding, the losses are equal
for any number of processes. Each process reads its shard of the weights. In a step it also holds the full embedding,
head and a few layers at a time. Started again with the same --output, training resumes from the newest checkpoint, also
with another number of processes. Without torchrun the same code runs in one process, on a GPU or a CPU.

To measure scaling: a Llama-1B with random weights on 8 x 2,048 tokens per GPU, with one GPU and with two. Weights and
AdamW's moments are in fp32, everything else in bf16. The first printed line shows one step, which includes the
libraries' initialisation. Later lines show the tokens per second since the previous line, without the time of saving
checkpoints, and the largest peak memory of a GPU. With --alone they also show the tokens per second of each process as
a fraction of those of one process alone (1 is the ideal):

    python examples/train_distributed.py random:1b --batch 8 --seq 2048 --steps 60 --log-every 20 --save-every 0
    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py random:1b --batch 16 --seq 2048 \\
        --steps 60 --log-every 20 --save-every 0 --alone TOKENS_PER_SECOND_OF_ONE_GPU
"""

import argparse
import contextlib
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from demo.data import batches
from demo.models import SHAPES, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from liger_ext import apply_liger_kernel_to_instance

WINDOWS = 4096  # the number of windows that are cut from the text; a longer run repeats them


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    def convert(text: str) -> float:
        number = kind(text)
        if not number >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return number

    return convert


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ", ".join(f"random:{name}" for name in SHAPES)
    parser.add_argument(
        "model", help=f"folder of a transformers model and its tokenizer; or, for random weights, one of {shapes}"
    )
    parser.add_argument("text", type=Path, nargs="?", help="UTF-8 text (default: Python's standard library)")
    parser.add_argument("--output", type=Path, default=Path("trained"), help="for checkpoints and the trained model")
    parser.add_argument("--steps", type=at_least(1), default=100)
    parser.add_argument("--batch", type=at_least(1), default=8, help="sequences per step, over all processes")
    parser.add_argument("--seq", type=at_least(2), default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=at_least(0.0, float), default=2e-5)
    parser.add_argument("--log-every", type=at_least(1), default=10, metavar="STEPS")
    parser.add_argument(
        "--save-every", type=at_least(0), default=50, metavar="STEPS",
        help="steps between checkpoints; 0: save neither checkpoints nor the trained model",
    )  # fmt: skip
    parser.add_argument("--keep", type=at_least(1), default=2, metavar="CHECKPOINTS", help="number of newest to keep")
    parser.add_argument(
        "--memory",
        default="auto",
        choices=("fast", "auto", "low", "min"),
        help="see docs/patching.md, Levels of memory",
    )
    parser.add_argument("--compile", action="store_true", help="compile each decoder layer with torch.compile")
    parser.add_argument(
        "--alone", type=at_least(1.0, float), metavar="TOKENS",
        help="tokens per second of one process alone; lines then show each process's rate relative to it",
    )  # fmt: skip
    return parser.parse_args()


def start_processes() -> torch.device:
    """Joins the processes that torchrun started, or creates a group of one process. Returns this process's device."""
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


def is_random(name: str) -> bool:
    return name.startswith("random:")


def config_and_tokenizer(name: str) -> tuple[PretrainedConfig, Callable[[str], list[int]]]:
    if is_random(name):
        config, _, encode = load(name)
        return config, encode
    tokenizer = AutoTokenizer.from_pretrained(name)
    return AutoConfig.from_pretrained(name), lambda text: tokenizer(text, verbose=False)["input_ids"]


def build(config: PretrainedConfig, arguments: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The patched and sharded model, with uninitialised fp32 weights; a GPU computes with bf16 copies."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    apply_liger_kernel_to_instance(model, memory=arguments.memory)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = dict(mesh=mesh, mp_policy=precision) if device.type == "cuda" else dict(mesh=mesh)
    for layer in model.model.layers:
        if arguments.compile:
            layer.compile()
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    model.tie_weights()
    return model


def read_weights(model: torch.nn.Module, folder: str) -> None:
    """Reads this process's shard from the model's .safetensors files."""
    reader = dcp.HuggingFaceStorageReader(folder)
    weights = dict(model.named_parameters())
    missing = weights.keys() - reader.read_metadata().state_dict_metadata.keys()
    if missing:
        raise SystemExit(f"the .safetensors files of {folder} have no {min(missing)}")
    dcp.load(weights, storage_reader=reader)


@torch.no_grad()
def make_random_weights(model: torch.nn.Module, config: PretrainedConfig, device: torch.device) -> None:
    """Initialises the weights of a Llama, equally for any number of processes."""
    generator = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        whole = torch.ones(weight.shape, device=device)
        if whole.dim() > 1:
            whole.normal_(0, config.initializer_range, generator=generator)
        weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None))


def make_batch(windows: torch.Tensor, step: int, batch: int) -> torch.Tensor:
    """This process's share of a step's windows, which depend only on the step, so that a resumed run uses the same."""
    chosen = torch.randint(len(windows), (batch,), generator=torch.Generator().manual_seed(step))
    return windows[chosen.chunk(dist.get_world_size())[dist.get_rank()]]


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints, the oldest first."""
    # .metadata is written last.
    found = [path.parent for path in output.glob("step-*/.metadata")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> int:
    """Restores a checkpoint; returns its number of steps."""
    state = training_state(model, optimizer, 0)
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, output: Path, keep: int) -> None:
    """Writes a checkpoint; then deletes all but the newest `keep`."""
    dcp.save(training_state(model, optimizer, step), checkpoint_id=output / f"step-{step}")
    if dist.get_rank() == 0:
        for old in checkpoints(output)[:-keep]:
            shutil.rmtree(old)


def save_model(model: torch.nn.Module, name: str, output: Path, file_bytes: float = 5e9) -> None:
    """Saves in the format of `save_pretrained`: each process writes its shard, and the first process joins them."""
    weights, file_number, size = dict(model.named_parameters()), {}, 0
    for weight_name, weight in weights.items():
        file_number[weight_name] = 1 + int(size // file_bytes)
        size += weight.numel() * weight.itemsize
    writer = dcp.HuggingFaceStorageWriter(
        str(output), fqn_to_index_mapping=file_number, save_distributed=True, enable_consolidation=True
    )
    dcp.save(weights, storage_writer=writer)
    if dist.get_rank() == 0:
        shutil.rmtree(output / "sharded")
        model.config.save_pretrained(output)
        model.generation_config.save_pretrained(output)
        if not is_random(name):
            AutoTokenizer.from_pretrained(name).save_pretrained(output)


class Clock:
    """Seconds of training, without those inside `stopped`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.started = device, time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        last, self.started = self.started, time.perf_counter()
        return self.started - last

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self._wait()
        at = time.perf_counter()
        yield
        self._wait()
        self.started += time.perf_counter() - at

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def train(config: PretrainedConfig, windows: torch.Tensor, arguments: argparse.Namespace, device: torch.device) -> None:
    world, first = dist.get_world_size(), dist.get_rank() == 0
    model = build(config, arguments, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=device.type == "cuda")
    done, found = 0, checkpoints(arguments.output) if arguments.save_every else []
    if found:
        done = resume(model, optimizer, found[-1])
        if first:
            print(f"resumed after step {done}", flush=True)
    elif is_random(arguments.model):
        make_random_weights(model, config, device)
    else:
        read_weights(model, arguments.model)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock, since = Clock(device), done
    for step in range(done + 1, arguments.steps + 1):
        input_ids = make_batch(windows, step, arguments.batch).to(device)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (done + 1, arguments.steps) or step % arguments.log_every == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            text = f"step {step}/{arguments.steps}: loss {mean.item():.5f}"  # synchronises with the GPU
            rate = (step - since) * arguments.batch * arguments.seq / clock.lap()
            text += f", {rate:,.0f} tokens/s, {rate / world:,.0f} per process"
            if arguments.alone:
                text += f" ({rate / world / arguments.alone:.3f} of one process alone)"
            if device.type == "cuda":
                peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30, device=device)
                dist.all_reduce(peak, dist.ReduceOp.MAX)
                text += f", {peak.item():.2f} GiB per GPU"
            if first:
                print(text, flush=True)
            since = step
        if arguments.save_every and step % arguments.save_every == 0:
            with clock.stopped():
                save(model, optimizer, step, arguments.output, arguments.keep)
    if arguments.save_every:
        save_model(model, arguments.model, arguments.output)


def end_processes(device: torch.device) -> None:
    """Ends the process group, after all tensors of training were released. A thread of gloo that still holds a tensor
    needs the interpreter to release it, and would abort the process if Python ended first."""
    gc.collect()  # the model: its modules refer to one another
    if device.type == "cpu":
        dist.barrier()  # while this thread waits, gloo's threads release the tensors of earlier collectives
    dist.destroy_process_group()


def main() -> None:
    arguments = parse_arguments()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if arguments.batch % world:
        raise SystemExit(f"--batch {arguments.batch} cannot be divided equally among {world} processes")
    try:
        config, encode = config_and_tokenizer(arguments.model)
        windows = torch.cat(batches(encode, WINDOWS, 1, arguments.seq, arguments.text))
    except ValueError as error:
        raise SystemExit(str(error)) from None
    device = start_processes()
    train(config, windows, arguments, device)
    end_processes(device)


if __name__ == "__main__":
    main()
