"""A patched Llama with LoRA adapters that have dropout, several active adapters or biases: they run in our nodes. Loss
and gradients are those of float64 with the masks that the nodes' seeds give, at each level, in tiles and checkpoints.
"""

import copy
import itertools

import pytest
import torch
from dropout_mask import mask, scale
from llama_models import LEVELS, assert_as_good, build, checkpoint_layers, exact, make_batch, one_thread, step  # noqa: F401
from test_adapter_nodes import calls_in_step
from torch import nn
from torch._subclasses import FakeTensor

from liger_ext import apply_liger_kernel_to_llama
from liger_ext.models.training import linear, nodes, products

peft = pytest.importorskip("peft")

NODES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj"))
ALL = list(itertools.chain(*NODES))
# Options of the first adapter, and of a second active one.
CASES = {
    "dropout": (dict(r=8, lora_alpha=16, lora_dropout=0.25), None),
    "dropout, two adapters": (dict(r=8, lora_dropout=0.5), dict(r=3, lora_alpha=1, lora_dropout=0.1)),
    "two adapters": (dict(r=8), dict(r=16, lora_alpha=12)),
    "one of two with dropout": (dict(r=4), dict(r=8, lora_dropout=0.3)),
    "biases": (dict(r=8, lora_bias=True, lora_alpha=24), None),
}
cases = pytest.mark.parametrize("case", CASES)


def adapted(case: str, dtype: torch.dtype) -> nn.Module:
    return with_adapters(build(dtype=dtype), case)


def with_adapters(model: nn.Module, case: str) -> nn.Module:
    torch.manual_seed(3)
    first, second = ({**o, "target_modules": ALL} if o else None for o in CASES[case])
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **first))
    if second:
        model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", **second))
        model.base_model.set_adapter(["default", "second"])
    for name, parameter in sorted(model.named_parameters()):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


class Masked(nn.Module):
    """Dropout with the mask of a node's seed."""

    def __init__(self, seeds: dict, node: tuple, stream: int, p: float) -> None:
        super().__init__()
        self.seeds, self.node, self.stream, self.p = seeds, node, stream, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        keep = mask(self.seeds[self.node], self.stream, *rows.shape, 0, self.p).to(x.device)
        return torch.where(keep, rows * scale(self.p), 0).view(x.shape)


def with_masks(model: nn.Module, seeds: list[int]) -> nn.Module:
    """Returns a copy of a stock model whose dropout has the masks of these seeds, one for each node."""
    model, drawn = copy.deepcopy(model), iter(seeds)
    for layer in model.get_base_model().model.layers:
        for node in NODES:
            parts = [getattr(layer.self_attn if "_proj" in n and n[0] in "qkvo" else layer.mlp, n) for n in node]
            rates = [(p, name) for p in parts for name in p.active_adapters]
            if not any(type(p.lora_dropout[name]) is nn.Dropout for p, name in rates):
                continue
            held = {node: next(drawn)}
            for stream, (part, name) in enumerate(rates):
                old = part.lora_dropout[name]
                if isinstance(old, nn.Dropout):
                    part.lora_dropout[name] = Masked(held, node, stream, old.p)
    assert next(drawn, None) is None
    return model


@pytest.fixture
def drawn(monkeypatch) -> list[int]:
    """Returns the list of the seeds that nodes draw."""
    seeds = []

    def randint(*args, **kwargs):
        seed = torch.randint(*args, **kwargs)
        seeds.append(int(seed))
        return seed

    class Torch:
        def __getattr__(self, name):
            return randint if name == "randint" else getattr(torch, name)

    monkeypatch.setattr(linear, "torch", Torch())
    return seeds


def patched(model: nn.Module, **options) -> nn.Module:
    model = copy.deepcopy(model)
    apply_liger_kernel_to_llama(model=model, **options)
    return model


@pytest.mark.parametrize("memory", LEVELS)
@cases
def test_as_good_as_with_the_masks_in_pytorch(device, drawn, case, memory):
    stock = adapted(case, torch.float32).to(device)
    model, batch = patched(stock, memory=memory), make_batch(device)
    torch.manual_seed(1)
    found = step(model, batch)
    masked = with_masks(stock, drawn)
    assert_as_good(found, step(masked, batch), step(exact(masked), batch))
    assert (len(drawn) == 6) == ("dropout" in case) and not calls_in_step(model)  # of PEFT's forward


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints_repeat_the_masks(device, drawn, use_reentrant, tile, monkeypatch):
    """Tiles draw their rows of the mask, and so give the same result."""
    if tile:
        monkeypatch.setattr(nodes, "TILE", tile * 128)
    stock = adapted("dropout", torch.float32).to(device)
    model, batch = patched(stock), make_batch(device)
    checkpoint_layers(model, use_reentrant)
    torch.manual_seed(1)
    found = step(model, batch)
    first, second = drawn[:6], drawn[6:]
    assert [*second[3:], *second[:3]] == first  # the second runs start with the last layer
    masked = with_masks(stock, first)
    assert_as_good(found, step(masked, batch), step(exact(masked), batch))


@pytest.mark.parametrize("memory", LEVELS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
@cases
def test_no_rows(device, case, shape, memory):
    """An expert without tokens."""
    stock = adapted(case, torch.float32).to(device)
    gradients = []
    for model in (stock, patched(stock, memory=memory)):
        x = torch.randn(shape, device=device, requires_grad=True)
        mlp = model.get_base_model().model.layers[0].mlp
        mlp(x).sum().backward()
        gradients.append([x.grad, *(p.grad for p in mlp.parameters())])
    for found, expected in zip(*gradients, strict=True):
        assert found is expected is None or torch.equal(found, expected)


def test_a_seed_repeats_a_step_and_evaluation_drops_nothing(device):
    model, batch = patched(adapted("dropout", torch.float32).to(device)), make_batch(device)
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(step(model, batch)["loss"])
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[1], losses[2])
    model.eval()
    assert torch.equal(step(model, batch)["loss"], step(model, batch)["loss"])


def test_gradients_of_fp32_adapters_are_rounded_once(device):
    """Under autocast a matmul of 16-bit values gives the gradients of fp32 adapters in fp32."""
    stock = adapted("two adapters", torch.bfloat16).to(device)
    model, batch = patched(stock), make_batch(device)
    with torch.autocast(device.type, torch.bfloat16):
        found = step(model, batch)
    # PEFT 0.18 creates the second adapter in bf16.
    gradients = [found[n] for n, p in model.named_parameters() if "default" in n and p.requires_grad]
    assert all(g.dtype == torch.float32 for g in gradients)
    assert any(not torch.equal(g, g.bfloat16().float()) for g in gradients)


@pytest.mark.cuda
def test_replays_of_a_graph_draw_new_masks():
    """A replay of a captured step computes the bits of a step from the same state of the random generator."""
    model, batch = patched(adapted("dropout", torch.float32).cuda()), make_batch("cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        step(model, batch)
    torch.cuda.synchronize()
    graph, losses = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        captured = step(model, batch)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        torch.manual_seed(seed)
        for name, expected in step(model, batch).items():
            assert torch.equal(replayed[name], expected), name
        losses.append(replayed["loss"])
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[1], losses[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case, backend, checkpoints",
    [
        ("dropout", "aot_eager", False),
        ("two adapters", "aot_eager", False),
        ("dropout", "inductor", False),
        ("dropout", "inductor", True),
    ],
)
def test_compiled(device, monkeypatch, case, backend, checkpoints):
    """Each call of a graph draws new seeds, which a checkpoint repeats. Inductor draws other numbers than torch."""
    seeds, dropout = {}, products._seeded_dropout

    def record(x, seed, *options):
        if not isinstance(seed, FakeTensor):
            seeds[int(seed)] = None
        return dropout(x, seed, *options)

    monkeypatch.setattr(products, "_seeded_dropout", record)
    stock, batch = adapted(case, torch.float32).to(device), make_batch(device)
    model = patched(stock)
    if checkpoints:
        checkpoint_layers(model, use_reentrant=False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found = step(model, batch, lambda _, **b: compiled(**b))
    drawn = list(seeds)
    assert len(drawn) == (12 if case == "dropout" else 0)
    masked = with_masks(stock, drawn[6:])
    assert_as_good(found, step(masked, batch), step(exact(masked), batch))
