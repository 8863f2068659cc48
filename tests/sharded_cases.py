"""Cases of test_sharded_vocabulary.py: the fused loss with a vocabulary that is sharded over two or three processes.
``world.run`` takes the arguments of all classes and calls the op with this process's shard."""

import itertools
from functools import partial

import sharded_log_probs  # noqa: F401
import torch
import torch.distributed as dist
from cases import RecordCalls, device_dtypes, normal
from sharded_world import CASES, World, case, check_ops, raises  # noqa: F401
from test_fused_linear_cross_entropy import CHUNKS, ONE_CHUNK, ROWS, head
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_ext import functional as F
from liger_ext.testing import judge

OP = "fused_linear_cross_entropy"
OPTIONS = {
    "label_smoothing": 0.1,
    "lse_square_scale": 1e-2,
    "softcap": 5.0,
    "use_token_scaling": True,
    "return_z_loss": True,
    "return_token_accuracy": True,
    "return_predicted_tokens": True,
}


def weights(vocab, dtype=torch.float32):
    return normal(vocab, seed=9).abs().to(dtype) + 0.1


@case
def every_dtype_and_reduction(world):
    """All logits at once, and chunks; an odd vocabulary with shards of at most 64 classes."""
    for dtype in device_dtypes(torch.device("cpu")):
        for reduction in ("mean", "sum", "none"):
            for memory in (ONE_CHUNK, CHUNKS):
                world.judge({**head(vocab=51, dtype=dtype, bias=True), "reduction": reduction, "memory": memory})


@case
def each_option(world):
    for name, value in OPTIONS.items():
        for memory in (ONE_CHUNK, CHUNKS):
            world.judge({**head(vocab=301), name: value, "memory": memory})


@case
def all_options(world):
    for dtype in (torch.float32, torch.bfloat16):
        for reduction in ("mean", "none"):
            given = {**OPTIONS, "ce_weight": weights(301), "reduction": reduction}
            for memory in (ONE_CHUNK, CHUNKS):
                world.judge({**head(vocab=301, dtype=dtype, bias=True), **given, "memory": memory})


@case
def class_weights(world):
    for smoothing in (0.0, 0.1):
        world.judge({**head(vocab=51), "ce_weight": weights(51), "label_smoothing": smoothing})


@case
def normalizer(world):
    for reduction, value in (("mean", 37.0), ("sum", torch.tensor(0.5))):
        world.judge({**head(vocab=51), "reduction": reduction, "normalizer": value})


@case
def dtypes_mixed(world):
    made = head(vocab=51, dtype=torch.bfloat16, weight_dtype=torch.float32, bias=True)
    for memory in (ONE_CHUNK, CHUNKS):
        for reduction in ("mean", "none"):
            world.judge({**made, "memory": memory, "reduction": reduction})
        world.judge({**head(vocab=51, dtype=torch.bfloat16), "accum_dtype": torch.bfloat16, "memory": memory})


@case
def autocast(world):
    made = head(vocab=51)
    with torch.autocast("cpu", torch.bfloat16):
        judge(OP, made, run=world.run, compute_dtype=torch.bfloat16, base_autocast=True)


@case
def targets_in_one_shard(world):
    for shard in range(world.size):
        made = head(vocab=51)
        first = sum(world.sizes(51)[:shard])
        made["target"] = made["target"].where(made["target"] < 0, first)
        world.judge(made)


@case
def rows_that_are_few(world):
    for rows in (0, 1, 3):
        for ignored in (0.0, 1.0):
            for reduction in ("mean", "none"):
                world.judge({**head(rows=rows, vocab=51, ignored=ignored), "reduction": reduction})


@case
def shards_that_are_empty(world):
    for sizes in ([51, 0], [0, 51]) if world.size == 2 else ([20, 31, 0], [0, 51, 0], [3, 0, 48]):
        for memory in (ONE_CHUNK, CHUNKS):
            made = {**head(vocab=51, bias=True), **OPTIONS, "memory": memory}
            world.judge(made, sizes)
        made = {"x": torch.ones(3, 4), "weight": torch.full((51, 4), -50.0), "target": torch.tensor([3, 20, -100])}
        loss, _, _, predicted = world.run(**made, sizes=sizes, return_predicted_tokens=True)
        torch.testing.assert_close(loss, torch.tensor(51.0).log())
        assert predicted.tolist() == [0, 0, -1]


@case
def rows_that_are_listed(world):
    made = head(vocab=51, ignored=0.6)
    for listed in (F.count_rows(made["target"]), (made["target"] >= 0).nonzero()[:, 0]):
        for reduction in ("mean", "none"):
            options = {"reduction": reduction, "return_predicted_tokens": True}
            judge(OP, {**made, **options}, run=partial(world.run, rows=listed))
    others = F.count_rows(made["target"].roll(1))
    raises(ValueError, "rows leaves out row", world.run, **made, rows=others)


@case
def any_leading_dimensions(world):
    made = head(rows=6, vocab=51)
    x, target = made["x"].detach().view(2, 3, -1).requires_grad_(), made["target"].view(2, 3)
    assert world.run(x, made["weight"], target, reduction="none").shape == (2, 3)


@case
def frozen(world):
    for memory in (ONE_CHUNK, CHUNKS):
        for name in ("x", "weight", "bias"):
            made = head(vocab=51, bias=True)
            made[name] = made[name].detach()
            world.judge({**made, "memory": memory})
            made = {key: t.detach() for key, t in made.items()}
            made[name].requires_grad_()
            world.judge({**made, "memory": memory})


@case
def ignored_rows_have_no_gradient(world):
    """Not even if the upstream gradient of the ignored rows is NaN."""
    made = head(vocab=51)
    for memory in (ONE_CHUNK, CHUNKS):
        losses = world.run(**made, reduction="none", memory=memory)
        given = torch.ones_like(losses).masked_fill(made["target"] < 0, torch.nan)
        dx, dweight = torch.autograd.grad(losses, (made["x"], made["weight"]), given)
        assert not dx[made["target"] < 0].any() and dx.isfinite().all() and dweight.isfinite().all()


@case
def without_gradients(world):
    made = head(vocab=51)
    with torch.no_grad():
        loss = world.run(**made)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.fused_linear_cross_entropy(**made))


@case
def first_equal_logit(world):
    """The predicted token is the first of equal logits over all shards; NaN counts as the largest."""
    for first, value in itertools.product((2, 30, 50), (2.0, float("inf"), float("nan"))):
        weight = torch.ones(51, 4)
        weight[first:] = value
        got = world.run(torch.ones(2, 4), weight, torch.tensor([0, first]), return_predicted_tokens=True)
        assert got.predicted_tokens.tolist() == [first, first]


@case
def values_that_are_no_numbers(world):
    for value in (float("nan"), float("inf"), -float("inf")):
        x, weight = torch.eye(4)[:3], normal(51, 4)
        weight[40, 0] = value
        inputs = {"target": torch.tensor([5, 6, -100]), "reduction": "none"}
        results = []
        for f in (world.run, F.fused_linear_cross_entropy):
            leaves = {"x": x.clone().requires_grad_(), "weight": weight.clone().requires_grad_()}
            loss = f(**leaves, **inputs)
            loss.nansum().backward()
            results.append((loss, leaves["x"].grad, leaves["weight"].grad))
        for ours, whole in zip(*results, strict=True):
            torch.testing.assert_close(ours, whole, equal_nan=True, rtol=1e-4, atol=1e-5)


@case
def bad_targets(world):
    """A bad target in the first or the last chunk raises in every process, so that none waits for the others."""
    for row in (0, ROWS - 1):
        for sizes in (None, [51] + [0] * (world.size - 1)):
            for target in (51, -1):
                made = head(vocab=51)
                made["target"][row] = target
                text = f"target[{row}] is {target}, expected a class in [0, 51)"
                raises(IndexError, text, world.run, **made, sizes=sizes, memory=CHUNKS)
                raises(IndexError, text, world.run, **made, sizes=sizes, rows=torch.tensor([row]))


@case
def data_that_differs(world):
    """Different targets, as under data parallelism, raise an error: the DTensors of FSDP2 look like those of tensor
    parallelism."""
    made = head(vocab=51)
    made["target"][0] = world.rank
    raises(ValueError, "target is not the same in all processes", world.run, **made)


@case
def arguments_that_are_wrong(world):
    made = {key: t.detach() for key, t in head(vocab=51).items()}
    op = partial(F.fused_linear_cross_entropy, **made)
    raises(TypeError, "process_group must be a ProcessGroup, not str", op, process_group="tp")
    learned = {"ce_weight": torch.ones(51), "label_smoothing": torch.tensor(0.1), "lse_square_scale": torch.tensor(0.1)}
    for name, t in learned.items():
        raises(ValueError, f"{name} requires a gradient", world.run, **made, **{name: t.requires_grad_()})
    raises(ValueError, "memory is 'much'", world.run, **made, memory="much", sizes=[51] + [0] * (world.size - 1))
    raises(ValueError, "accum_dtype is", world.run, **made, accum_dtype=torch.float16)
    raises(ValueError, "label_smoothing is 2", world.run, **made, label_smoothing=2.0)
    raises(ValueError, "fused_linear_cross_entropy: weight has shape", world.run, **{**made, "x": made["x"][:, :-1]})


@case
def second_backward(world):
    made = head(vocab=51)
    for memory in (ONE_CHUNK, CHUNKS):
        loss = world.run(**made, memory=memory)
        leaves = made["x"], made["weight"]
        once, twice = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, once, twice))
    raises(RuntimeError, "no second derivative", torch.autograd.grad, loss, made["x"], create_graph=True)


@case
def compiled(world):
    """The op runs between two graphs, with the same bits as in eager mode."""
    made = head(vocab=51)
    weight = made["weight"].detach().split(world.sizes(51))[world.rank].clone().requires_grad_()

    def f(x, weight, target):
        return 3 * F.fused_linear_cross_entropy(2 * x, weight, target, process_group=world.group)

    results = []
    for function in (f, torch.compile(f, backend="eager")):
        loss = function(made["x"], weight, made["target"])
        results.append((loss, *torch.autograd.grad(loss, (made["x"], weight))))
    assert all(map(torch.equal, *results))


@case
def checkpointed(world):
    made = head(vocab=51)
    results = []
    for f in (world.run, partial(checkpoint, world.run, use_reentrant=False)):
        loss = f(*made.values())
        results.append((loss, *torch.autograd.grad(loss, (made["x"], made["weight"]))))
    assert all(map(torch.equal, *results))


@case
def collectives(world):
    """The forward runs one all_gather of a few numbers per row, the backward one all_reduce of the size of x, for any
    number of chunks. The sizes of a weight's shards are gathered once."""
    calls, original = [], (dist.all_gather, dist.all_reduce)

    def counted(f, sent):
        def count(*args, **options):
            calls.append((f.__name__, args[sent].dtype, args[sent].numel()))
            return f(*args, **options)

        return count

    dist.all_gather, dist.all_reduce = counted(original[0], 1), counted(original[1], 0)
    try:
        gather, total = "all_gather", "all_reduce"
        for rows, memory in ((ROWS, ONE_CHUNK), (ROWS, CHUNKS), (0, CHUNKS)):
            made = head(rows=rows, vocab=51, dtype=torch.bfloat16)
            x = made["x"]
            weight = made["weight"].detach().split(world.sizes(51))[world.rank].clone().requires_grad_()
            op = partial(F.fused_linear_cross_entropy, x, weight, made["target"], process_group=world.group)
            statistics = (gather, torch.uint8, 8 + 7 * 4 * rows)
            for sizes in ([(gather, torch.uint8, 8)], []):
                calls.clear()
                op(memory=memory).backward()
                assert calls == [*sizes, statistics, (total, torch.float32, x.numel())], calls
            calls.clear()
            with torch.no_grad():
                op(memory=memory)
            assert calls == [statistics], calls
            calls.clear()
            F.fused_linear_cross_entropy(x.detach(), weight, made["target"], process_group=world.group).backward()
            assert calls == [statistics], calls
    finally:
        dist.all_gather, dist.all_reduce = original


@case
def memory_levels(world):
    """Three matmuls of the shard if the logits are stored, and four if the backward recomputes them."""
    made = head(vocab=51)
    classes, (rows, hidden) = world.sizes(51)[world.rank], made["x"].shape
    for memory, matmuls in (("fast", 3), ("auto", 3), ("low", 3), ("min", 3), (ONE_CHUNK, 3), (CHUNKS, 4)):
        world.judge({**made, "memory": memory})
        with FlopCounterMode(display=False) as counter:
            world.run(**made, memory=memory).backward()
        assert counter.get_total_flops() == 2 * rows * hidden * classes * matmuls


@case
def shard_ops(world):
    """opcheck of each op; and the op and its fake implementation reject the same arguments."""
    for options in ({}, {**OPTIONS, "ce_weight": weights(51), "memory": CHUNKS, "reduction": "none"}):
        made = head(rows=130 if options else 5, hidden=4, vocab=51, bias=True)
        with RecordCalls() as record:
            world.run(**made, **options).loss.sum().backward() if options else world.run(**made).backward()
        check_ops(world, record, {"statistics", "losses_", "backward"})


@case
def dtensors(world):
    mesh = DeviceMesh.from_group(world.group, "cpu")
    for vocab in (51, 2):  # the last of three shards is empty
        for dtype in (torch.float32, torch.bfloat16):
            made = head(vocab=vocab, dtype=dtype, bias=True)
            whole = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in made.items()}
            expected = F.fused_linear_cross_entropy(**whole)
            expected.backward()
            for x_too in (False, True):
                placed = {n: distribute_tensor(made[n].detach(), mesh, [Sharded(0)]) for n in ("weight", "bias")}
                placed |= {"x": made["x"].detach().clone(), "target": made["target"]}
                if x_too:
                    placed |= {n: distribute_tensor(placed[n], mesh, [Replicate()]) for n in ("x", "target")}
                for name in ("x", "weight", "bias"):
                    placed[name].requires_grad_()
                loss = F.fused_linear_cross_entropy(**placed)
                loss.backward()
                torch.testing.assert_close(loss, expected)
                for name in ("x", "weight", "bias"):
                    gradient = placed[name].grad
                    if name != "x" or x_too:
                        assert gradient.placements == placed[name].placements
                        gradient = gradient.full_tensor()
                    torch.testing.assert_close(gradient, whole[name].grad)


@case
def dtensors_with_other_placements(world):
    mesh = DeviceMesh.from_group(world.group, "cpu")
    made = {name: t.detach() for name, t in head(vocab=51).items()}
    op = F.fused_linear_cross_entropy
    for placement in (Replicate(), Sharded(1)):
        weight = distribute_tensor(made["weight"], mesh, [placement])
        raises(ValueError, "weight has placements", op, **{**made, "weight": weight})
    made["weight"] = distribute_tensor(made["weight"], mesh, [Sharded(0)])
    x = distribute_tensor(made["x"], mesh, [Sharded(0)])
    raises(ValueError, "x has placements", op, **{**made, "x": x})
    raises(ValueError, "process_group is given", op, **made, process_group=world.group)
