"""What test_distributed.py runs in two processes: training that is saved and goes on elsewhere."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_wrappers import whole
from llama_models import build, tokens
from processes import cases_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from liger_ext import apply_liger_kernel_to_llama


def saved_and_loaded(world, saver, loader, saved_by, loaded_by, tied):
    """By torch.distributed.checkpoint, into a model with other weights: as if there had been no break."""
    meshes = {
        "FSDP2": init_device_mesh("cpu", (world.size,)),
        "alone": init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("copies", "alone"))["alone"],
    }

    def start(is_patched, wrapper, seed):
        model = build(seed=seed, tie_word_embeddings=tied).train()
        if is_patched == "patched":
            apply_liger_kernel_to_llama(model=model)
        model = DistributedDataParallel(model) if wrapper == "DDP" else fully_shard(model, mesh=meshes[wrapper])
        # Under Adam's usual eps what has almost no gradient moves by the sign of a rounding error.
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def advance(model, optimizer, steps, wrapper):
        for step in steps:
            ids = tokens(4, 9, seed=step)
            ids = ids if wrapper == "alone" else ids.chunk(world.size)[world.rank]
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def state_of(model, optimizer):
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    def weights_of(model):
        return torch.cat([p.detach().flatten() for p in whole(model.named_parameters()).values()])

    model, optimizer = start(saver, saved_by, seed=0)
    advance(model, optimizer, range(2), saved_by)
    if saved_by != "alone" or world.rank == 0:
        group = meshes["alone"].get_group() if saved_by == "alone" else None
        dcp.save(state_of(model, optimizer), checkpoint_id=world.folder / "checkpoint", process_group=group)
    at_break = weights_of(model)
    advance(model, optimizer, range(2, 4), saved_by)
    dist.barrier()

    other, its_optimizer = start(loader, loaded_by, seed=1)
    state = state_of(other, its_optimizer)
    group = meshes["alone"].get_group() if loaded_by == "alone" else None
    dcp.load(state, checkpoint_id=world.folder / "checkpoint", process_group=group)
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert torch.equal(weights_of(other), at_break)
    advance(other, its_optimizer, range(2, 4), loaded_by)
    end = weights_of(model)
    assert (weights_of(other) - end).norm() <= 3e-4 * (end - at_break).norm()


KINDS = ("patched", "stock")
CASES = cases_of(
    "saved",
    saved_and_loaded,
    dict(saver=KINDS, loader=KINDS, saved_by=("FSDP2", "alone", "DDP"), loaded_by=("FSDP2", "alone", "DDP"),
         tied=(False, True)),
    lambda case: (case["saver"], case["loader"]) != ("stock", "stock"),
)  # fmt: skip
