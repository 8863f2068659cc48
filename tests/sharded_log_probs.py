"""Cases of test_sharded_vocabulary.py: log-probabilities and entropy with a sharded vocabulary, against float64 and
against the op without shards."""

import itertools
from functools import partial

import torch
import torch.distributed as dist
from cases import LOW, RecordCalls, host_target, normal
from sharded_world import case, check_ops, raises
from test_fused_linear_cross_entropy import CHUNKS, ONE_CHUNK, ROWS
from test_linear_log_probs import BOUNDS, EVERYTHING, arguments, judge, leaves
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from liger_ext import functional as F

# Upstream gradients of (log-probabilities, entropy).
BOTH, GRADIENT_CHOICES = (True, True), ((True, True), (True, False), (False, True))


def sharded_op(world, sizes=None):
    return partial(world.run, op=F.linear_log_probs, sizes=sizes)


def temperatures(rows=ROWS):
    return 0.5 + torch.rand(rows, generator=torch.Generator().manual_seed(0))


def token_options():
    yield {"temperature": 0.6}
    yield {"temperature": temperatures()}
    yield {"logit_scale": 0.25}
    yield {"softcap": 3.0}
    yield {"temperature": temperatures(), "logit_scale": 1.5, "softcap": 3.0}


def step(op, inputs, **options):
    """Returns every result, and the gradients for upstream gradients of both signs."""
    found = op(**inputs, **options, **EVERYTHING)
    ups = [normal(*found.log_probs.shape, seed=seed).to(found.entropy.dtype) for seed in (5, 6)]
    return [*found, *torch.autograd.grad([found.log_probs, found.entropy], leaves(inputs), ups)]


@case
def log_probs_and_entropy(world):
    for dtype in LOW:
        for memory in (ONE_CHUNK, CHUNKS):
            for use_log_probs, use_entropy in GRADIENT_CHOICES:
                judge(
                    arguments(ROWS, 24, 51, dtype), dtype, use_log_probs=use_log_probs, use_entropy=use_entropy,
                    memory=memory, run=sharded_op(world),
                )  # fmt: skip


@case
def log_probs_with_options(world):
    for options in token_options():
        for memory in (ONE_CHUNK, CHUNKS):
            for dtype, (use_log_probs, use_entropy) in ((torch.float32, BOTH), (torch.bfloat16, (True, False))):
                judge(
                    arguments(ROWS, 24, 301, dtype), dtype, use_log_probs=use_log_probs, use_entropy=use_entropy,
                    memory=memory, run=sharded_op(world), **options,
                )  # fmt: skip


@case
def log_probs_with_float32_logits(world):
    for dtype in (torch.bfloat16, torch.float16):
        for memory, (use_log_probs, use_entropy) in itertools.product((ONE_CHUNK, CHUNKS), GRADIENT_CHOICES):
            judge(
                arguments(ROWS, 24, 301, dtype), dtype, use_log_probs=use_log_probs, use_entropy=use_entropy,
                memory=memory, run=partial(sharded_op(world), logits_dtype=torch.float32),
                bounds=(1e-5, BOUNDS[dtype][1]), temperature=0.6,
            )  # fmt: skip


@case
def log_probs_as_without_shards(world):
    """Equals the op without shards in float64, up to the order of sums."""
    if host_target():
        return
    for options in token_options():
        for memory in (ONE_CHUNK, CHUNKS):
            inputs = arguments(ROWS, 24, 51, torch.float64)
            ours = step(sharded_op(world), inputs, memory=memory, **options)
            whole = step(F.linear_log_probs, inputs, **options)
            torch.testing.assert_close(ours, whole, rtol=1e-10, atol=1e-12)


@case
def log_probs_with_empty_shards(world):
    for sizes in ([51, 0], [0, 51]) if world.size == 2 else ([20, 31, 0], [0, 51, 0], [3, 0, 48]):
        for memory in (ONE_CHUNK, CHUNKS):
            options = {"memory": memory, "temperature": temperatures(), "softcap": 4.0}
            judge(arguments(ROWS, 24, 51), torch.float32, run=sharded_op(world, sizes), **options)


@case
def log_probs_with_frozen_inputs(world):
    for memory in (ONE_CHUNK, CHUNKS):
        for name in ("x", "weight", "bias"):
            for only in (False, True):
                inputs = arguments(ROWS, 24, 51)
                for other in ("x", "weight", "bias"):
                    inputs[other] = inputs[other].detach().requires_grad_((other == name) == only)
                judge(inputs, torch.float32, memory=memory, run=sharded_op(world))
    inputs = {name: t.detach() for name, t in inputs.items()}
    assert not sharded_op(world)(**inputs, entropy=True).entropy.requires_grad


@case
def log_probs_with_few_rows(world):
    for rows in (0, 1, 3):
        for ignored in (0.0, 1.0):
            judge(arguments(rows, 24, 51, ignored=ignored), torch.float32, run=sharded_op(world))


@case
def log_probs_with_listed_rows(world):
    inputs = arguments(120, 16, 51, ignored=0.6)
    options = {"temperature": temperatures(120)}
    expected = step(sharded_op(world), inputs, **options)
    cube = {"x": inputs["x"].view(3, 40, 16), "target": inputs["target"].view(3, 40)}
    shaped = sharded_op(world)(**{**inputs, **cube}, temperature=options["temperature"].view(3, 40), **EVERYTHING)
    listed = step(sharded_op(world), inputs, rows=F.count_rows(inputs["target"]), **options)
    torch.testing.assert_close(listed, expected)
    torch.testing.assert_close([t.view(120) for t in shaped], expected[: len(shaped)])


@case
def ignored_tokens_have_no_gradient(world):
    """Not even if the upstream gradients of the ignored tokens are NaN."""
    inputs = arguments(ROWS, 24, 51)
    for memory in (ONE_CHUNK, CHUNKS):
        found = sharded_op(world)(**inputs, entropy=True, memory=memory)
        up = torch.ones(ROWS).masked_fill(inputs["target"] < 0, torch.nan)
        dx, *others = torch.autograd.grad(found[:2], leaves(inputs), [up, up])
        assert dx.isfinite().all() and not dx[inputs["target"] < 0].any() and all(t.isfinite().all() for t in others)


@case
def log_probs_again(world):
    """A second backward, separate gradients of each result, recomputation in a checkpoint, and hooks on saved
    tensors."""
    inputs, seen = arguments(ROWS, 24, 51), []
    for memory in (ONE_CHUNK, CHUNKS):
        found = sharded_op(world)(**inputs, entropy=True, memory=memory)
        once, twice = (torch.autograd.grad(sum(found[:2]).sum(), leaves(inputs), retain_graph=True) for _ in range(2))
        alone = [torch.autograd.grad(t.sum(), leaves(inputs), retain_graph=True) for t in found[:2]]
        for a, b, log_probs_gradient, entropy_gradient in zip(once, twice, *alone, strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(log_probs_gradient + entropy_gradient, a, atol=1e-5, rtol=1e-4)
        kept = checkpoint(partial(sharded_op(world), **inputs, entropy=True, memory=memory), use_reentrant=False)
        for a, b in zip(once, torch.autograd.grad(sum(kept[:2]).sum(), leaves(inputs)), strict=True):
            torch.testing.assert_close(a, b)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append((t, t.clone())) or t, lambda t: t):
            hooked = sharded_op(world)(**inputs, entropy=True, memory=memory)
        torch.testing.assert_close(torch.autograd.grad(sum(hooked[:2]).sum(), leaves(inputs)), once)
        assert all(torch.equal(t, before) for t, before in seen)
        raises(
            RuntimeError,
            "no second derivative",
            torch.autograd.grad,
            found.entropy.sum(),
            inputs["x"],
            create_graph=True,
        )


@case
def log_probs_in_a_graph(world):
    inputs = arguments(ROWS, 24, 51, bias=False)
    weight = inputs["weight"].detach().split(world.sizes(51))[world.rank].clone().requires_grad_()

    def f(x, weight, target, temperature):
        found = F.linear_log_probs(
            2 * x, weight, target, temperature=temperature, process_group=world.group, entropy=True
        )
        return found.log_probs - found.entropy

    results = []
    for function in (f, torch.compile(f, backend="eager")):
        found = function(inputs["x"], weight, inputs["target"], temperatures())
        results.append((found, *torch.autograd.grad(found.sum(), (inputs["x"], weight))))
    assert all(map(torch.equal, *results))


@case
def log_probs_collectives(world):
    """One all_gather of 7 numbers per row, 10 with moments for the entropy, and one all_reduce, for gradients of any
    result."""
    calls, original = [], (dist.all_gather, dist.all_reduce)

    def counted(f, sent):
        def count(*args, **options):
            calls.append((f.__name__, args[sent].dtype, args[sent].numel()))
            return f(*args, **options)

        return count

    inputs = arguments(ROWS, 24, 51, bias=False)
    x, target = inputs["x"], inputs["target"]
    weight = inputs["weight"].detach().split(world.sizes(51))[world.rank].clone().requires_grad_()
    op = partial(F.linear_log_probs, x, weight, target, temperature=temperatures(), process_group=world.group)
    op()
    dist.all_gather, dist.all_reduce = counted(original[0], 1), counted(original[1], 0)
    try:
        for memory in (ONE_CHUNK, CHUNKS):
            for entropy, numbers in ((False, 7), (True, 10)):
                calls.clear()
                found = op(memory=memory, entropy=entropy)
                (found.log_probs + found.entropy if entropy else found).sum().backward()
                sent = ("all_gather", torch.uint8, 8 + numbers * 4 * ROWS), ("all_reduce", torch.float32, x.numel())
                assert tuple(calls) == sent, calls
    finally:
        dist.all_gather, dist.all_reduce = original


@case
def log_probs_matmuls(world):
    """Three matmuls if the gradient of the logits is stored. The backward of the entropy reads probabilities from the
    stored gradient and overwrites it. It recomputes the logits instead if other code may still read that gradient, or
    with a softcap, whose derivative is a factor of it."""
    inputs = arguments(ROWS, 24, 51, bias=False)
    classes = world.sizes(51)[world.rank]
    for memory, entropy, softcap, again in itertools.product(
        (ONE_CHUNK, CHUNKS), (False, True), (None, 5.0), (False, True)
    ):
        matmuls = 3 if memory is ONE_CHUNK and not (entropy and (softcap or again)) else 4
        with FlopCounterMode(display=False) as counter:
            found = sharded_op(world)(**inputs, memory=memory, softcap=softcap, entropy=True)
            (found.log_probs + found.entropy if entropy else found.log_probs).sum().backward(retain_graph=again)
        assert counter.get_total_flops() == 2 * ROWS * 24 * classes * matmuls


@case
def token_shard_ops(world):
    """opcheck of each op; and the op and its fake implementation reject the same arguments."""
    for memory in (ONE_CHUNK, CHUNKS):
        inputs = arguments(130, 4, 51)
        softcap = None if memory is ONE_CHUNK else 5.0
        options = {"temperature": temperatures(130), "logit_scale": 0.5, "softcap": softcap, "memory": memory}
        with RecordCalls() as record:
            found = sharded_op(world)(**inputs, **options, **EVERYTHING)
            torch.autograd.grad(found.log_probs.sum(), leaves(inputs), retain_graph=True)
            torch.autograd.grad(found.entropy.sum(), leaves(inputs))
        names = {"statistics", "losses_", "backward", *(["backward_"] if memory is ONE_CHUNK else [])}
        check_ops(world, record, names)


@case
def log_probs_with_dtensors(world):
    mesh = DeviceMesh.from_group(world.group, "cpu")
    for vocab in (51, 2):  # the last of three shards is empty
        inputs = arguments(ROWS, 24, vocab)
        options = {"temperature": temperatures(), "softcap": 4.0}
        placed = dict(inputs)
        for name in ("weight", "bias"):
            placed[name] = distribute_tensor(inputs[name].detach(), mesh, [Sharded(0)]).requires_grad_()
        found, whole = (step(F.linear_log_probs, of, **options) for of in (placed, inputs))
        found = [t.full_tensor() if hasattr(t, "placements") else t for t in found]
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)


@case
def tokens_that_are_wrong(world):
    inputs = {name: t.detach() for name, t in arguments(8, 4, 51).items()}
    op = sharded_op(world)
    raises(ValueError, "linear_log_probs: temperature has shape (3)", op, **inputs, temperature=torch.ones(3))
    raises(TypeError, "linear_log_probs: process_group must be", F.linear_log_probs, **inputs, process_group="tp")
    for target in (51, -1):
        inputs["target"][5] = target
        raises(IndexError, f"target[5] is {target}, expected a class in [0, 51)", op, **inputs, entropy=True)
    inputs["target"][5] = world.rank
    raises(ValueError, "target is not the same in all processes", op, **inputs, entropy=True)
