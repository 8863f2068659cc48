"""The losses of a step's micro-batches add up to the loss of the step, with the step's normalizer."""

from random import Random

import pytest
import torch
from cases import normal, random_targets

from liger_ext import losses
from liger_ext.losses.policy import _CLIPPED

COUNT_TOKENS = "bnpo", "dapo", "cispo", "vespo"
COUNT_SEQUENCES = "grpo", "dr_grpo", "luspo", "sapo"


class Step:
    """Random arguments of ``grpo_loss`` for a step, and the rows of its micro-batches. Some have no valid token, some
    no sequence."""

    def __init__(self, rng: Random, kind: str) -> None:
        def normal(*shape):
            return torch.randn(shape, generator=values, dtype=torch.float64)

        self.rng, values = rng, torch.Generator().manual_seed(rng.randrange(1 << 30))
        sizes = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.randint(1, 5))]
        sequences, tokens = shape = sum(sizes), rng.randint(1, 5)
        ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
        self.rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        density = rng.choice([[0.0]] + 3 * [[0.0, 0.5, 1.0]])
        counts = torch.cat([torch.rand(size, tokens, generator=values) < rng.choice(density) for size in sizes])
        mask = rng.choice([counts, counts * 2.0])
        policy = torch.randint(3, shape, generator=values) * rng.choice([0, 1, 1])
        self.log_probs, self.entropy = (normal(*shape).requires_grad_() for _ in range(2))
        self.arguments = {
            "loss_type": kind, "max_completion_length": 7, "beta": rng.choice([0.0, 0.3]), "mask": mask,
            "importance_sampling_level": rng.choice(["token", "sequence" if kind in _CLIPPED else "token"]),
            "advantages": rng.choice([normal(sequences), normal(*shape)]), "ref_log_probs": normal(*shape),
            "old_log_probs": rng.choice([None, normal(*shape)]), "delta": rng.choice([None, 1.5]),
            "sampling_ratio": rng.choice([None, normal(sequences, 1).exp()]), "entropy": self.entropy,
            "use_bias_correction_kl": rng.choice([False, True]), "entropy_coef": rng.choice([0.0, 0.2]),
            "policy_mask": rng.choice([None, policy, policy > 0]),
        }  # fmt: skip
        weights = mask * 1.0 if self.arguments["policy_mask"] is None else mask * self.arguments["policy_mask"]
        self.count = mask.sum().item() if kind in COUNT_TOKENS else sequences
        self.entropy_count = weights.sum().item()
        self.processes = rng.choice([1, 64])

    def loss(self, rows: slice = slice(None), **normalizers) -> losses.GRPOOutput:
        arguments = {name: t[rows] if isinstance(t, torch.Tensor) else t for name, t in self.arguments.items()}
        return losses.grpo_loss(self.log_probs[rows], **arguments, **normalizers)

    def normalizers(self) -> dict:
        """Returns the counts of the step, divided by the number of processes, as numbers or tensors."""
        same = self.arguments["loss_type"] in COUNT_TOKENS and self.arguments["policy_mask"] is None
        made = {"normalizer": self._option(self.count)}
        if self.arguments["entropy_coef"] != 0 and not (same and self.rng.choice([True, False])):
            made["entropy_normalizer"] = self._option(self.entropy_count)
        return made

    def _option(self, count: float) -> torch.Tensor | float:
        each = count / self.processes
        kinds = [each, torch.tensor(each, dtype=torch.float64), torch.tensor([each], dtype=torch.float64)]
        if each == int(each):
            kinds += [int(each), torch.tensor(int(each))]
        return self.rng.choice(kinds)


@pytest.mark.parametrize("kind", COUNT_TOKENS + COUNT_SEQUENCES)
def test_micro_batches_add_up_to_the_step(kind):
    """Loss and gradients, with the divergence and the entropy bonus. The step's loss is computed without a normalizer:
    then the type itself counts what it divides by."""
    rng, empty = Random(kind), 0
    for _ in range(125):
        step = Step(rng, kind)
        leaves, normalizers = (step.log_probs, step.entropy), step.normalizers()
        total = sum(step.loss(rows, **normalizers).loss for rows in step.rows)
        expected = step.loss().loss * step.processes
        found = [(t, *torch.autograd.grad(t, leaves, allow_unused=True)) for t in (total, expected)]
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
        empty += step.count == 0
    assert empty > 0


@pytest.mark.parametrize("kind", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_micro_batches_of_a_module(kind, number):
    """The number of tokens of the step, weighted by a factor that makes it less than 1."""
    x, weight, ids = normal(4, 5, 8), normal(11, 8, seed=1).requires_grad_(), random_targets(20, 11, ignored=0)
    mask, advantages = (torch.arange(20) % 3 == 0).view(4, 5), torch.tensor([1.0, -0.5, 2.0, 1.5])
    mask[1] = False
    module = losses.LigerFusedLinearGRPOLoss(beta=0.1, use_ref_model=False, loss_type=kind)
    batch = x, ids.view(4, 5), mask, advantages

    def loss(rows, *more):
        x, *others = (t[rows] for t in batch)
        return module(x, weight, *others, num_items_in_batch=number(*more) if more else None)[0]

    total = sum(loss(slice(row, row + 1), mask.sum().item() / 64) for row in range(4))
    found = [(t, *torch.autograd.grad(t, weight)) for t in (total, 64 * loss(slice(None)))]
    torch.testing.assert_close(*found)
    nothing = loss(slice(1, 2), 0.0)
    assert nothing == 0 and not torch.autograd.grad(nothing, weight)[0].any()
    if number is float:
        with pytest.raises(ValueError, match=r"num_items_in_batch is -1\.0, expected a number, at least 0"):
            loss(slice(None), -1.0)


BAD = [
    ({"normalizer": -1}, "normalizer is -1, expected a number, at least 0"),
    ({"normalizer": torch.inf}, "normalizer is inf"),
    ({"entropy_normalizer": torch.nan}, "entropy_normalizer is nan"),
    ({"normalizer": torch.ones(3)}, r"normalizer has shape \(3,\), expected one number"),
    ({"entropy_normalizer": torch.ones(3)}, r"entropy_normalizer has shape \(3,\), expected one number"),
    ({"entropy_coef": 0.1, "normalizer": 2, "loss_type": "sapo"}, r"counts sequences \(loss_type 'sapo'\)"),
    ({"entropy_coef": 0.1, "normalizer": 2, "policy_mask": torch.ones(1, 3)}, "entropy_normalizer is None, and normal"),
]


@pytest.mark.parametrize("options, message", BAD, ids=[message for _, message in BAD])
def test_bad_normalizers(options, message):
    x = -torch.ones(1, 3)
    with pytest.raises(ValueError, match=message):
        losses.grpo_loss(x, x[:, 0], x, entropy=x, **options)
