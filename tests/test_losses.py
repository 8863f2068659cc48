"""Preference and RL losses: values and gradients compared with their definitions, written out per element in float64,
and edge cases that upstream computes wrongly. tests/test_losses_heads.py tests the modules with a head, and
tests/test_losses_trl.py the types that TRL has."""

import itertools
import math

import numpy as np
import pytest
import torch
from cases import normal

from liger_ext import losses
from liger_ext.losses.preference import _DPO

BETA = 0.7


def s(x):
    return torch.sigmoid(x)


def log_s(x):
    return torch.nn.functional.logsigmoid(x)


def judge(found, expected, *leaves):
    """Compares values, and the gradients of a weighted sum with weights of both signs."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    up = normal(*found.shape, dtype=torch.float64, seed=9)
    both = (torch.autograd.grad(t, leaves, up, retain_graph=True) for t in (found, expected))
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def pairs(scale=2.0, n=9):
    return [(-scale * normal(n, dtype=torch.float64, seed=i).abs()).requires_grad_(i < 3) for i in (1, 2, 3, 4)]


DEFINITIONS = {
    "sigmoid": lambda c, r, e, tau: -(1 - e) * torch.log(s(c - r)) - e * torch.log(s(r - c)),
    "hinge": lambda c, r, e, tau: torch.maximum(torch.zeros_like(c), 1 - (c - r)),
    "exo_pair": lambda c, r, e, tau: (
        s(c - r) * (torch.log(s(c - r)) - math.log(1 - e)) + s(r - c) * (torch.log(s(r - c)) - math.log(e))
    ),
    "nca_pair": lambda c, r, e, tau: -torch.log(s(c)) - torch.log(s(-c)) / 2 - torch.log(s(-r)) / 2,
    "robust": lambda c, r, e, tau: (-(1 - e) * torch.log(s(c - r)) + e * torch.log(s(r - c))) / (1 - 2 * e),
    "bco_pair": lambda c, r, e, tau: -torch.log(s(c)) - torch.log(s(-r)),
    "sppo_hard": lambda c, r, e, tau: (c / BETA - 1 / (2 * BETA)) ** 2 + (r / BETA + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda c, r, e, tau: 1 - s(c) + s(r),
    "apo_down": lambda c, r, e, tau: s(c) + 1 - s(c - r),
    "discopop": lambda c, r, e, tau: (
        -torch.log(s(c - r)) * (1 - s((c - r) / tau)) + torch.exp(r - c) * s((c - r) / tau)
    ),
}


@pytest.mark.parametrize("loss_type", DEFINITIONS)
@pytest.mark.parametrize("reference", [True, False])
def test_dpo(loss_type, reference):
    chosen, rejected, ref_chosen, ref_rejected = pairs()
    refs = (ref_chosen.detach(), ref_rejected) if reference else (None, None)
    options = {"beta": BETA, "loss_type": loss_type, "label_smoothing": 0.2, "discopop_tau": 0.3}
    c, r = (BETA * (t - ref if reference else t) for t, ref in zip((chosen, rejected), refs, strict=True))
    found = losses.dpo_loss(chosen, rejected, *refs, **options)
    judge(found, DEFINITIONS[loss_type](c, r, 0.2, 0.3), chosen, rejected)


@pytest.mark.parametrize("loss_type", _DPO)
def test_dpo_far_from_the_reference(loss_type):
    """Differences whose exponential overflows."""
    chosen = torch.tensor([0.0, -3e4, -1.0, -4e3], requires_grad=True)
    rejected = torch.tensor([-3e4, 0.0, -1.0, -2e3], requires_grad=True)
    loss = losses.dpo_loss(chosen, rejected, beta=1.0, loss_type=loss_type, label_smoothing=0.1)
    for t in (loss, *torch.autograd.grad(loss.sum(), (chosen, rejected))):
        assert t.isfinite().all(), t


def test_a_reference_has_no_gradient():
    chosen, rejected, ref, _ = pairs()
    ref.requires_grad_()
    loss = losses.dpo_loss(chosen, rejected, ref, ref).sum() + losses.kto_loss(chosen, rejected > -1, ref, ref).sum()
    assert torch.autograd.grad(loss, ref, allow_unused=True) == (None,)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cpo_and_simpo(smoothing):
    chosen, rejected, *_ = pairs()
    d = BETA * (chosen - rejected)
    found = losses.cpo_loss(chosen, rejected, beta=BETA, label_smoothing=smoothing)
    judge(found, -(1 - smoothing) * torch.log(s(d)) - smoothing * torch.log(s(-d)), chosen, rejected)
    found = losses.simpo_loss(chosen, rejected, beta=BETA, gamma=0.4, label_smoothing=smoothing)
    d = d - 0.4
    judge(found, -(1 - smoothing) * torch.log(s(d)) - smoothing * torch.log(s(-d)), chosen, rejected)


def test_orpo():
    chosen, rejected, *_ = pairs()
    odds = [p.exp() / (1 - p.exp()) for p in (chosen, rejected)]
    found = losses.orpo_loss(chosen, rejected, beta=BETA)
    judge(found, -BETA * torch.log(s(torch.log(odds[0] / odds[1]))), chosen, rejected)
    with torch.no_grad():  # probabilities that round to 1, and a log-probability of 0 (no tokens)
        for edge in (-1e-37, -1e-9, 0.0):
            close = torch.tensor([edge], requires_grad=True)
            with torch.enable_grad():
                loss = losses.orpo_loss(close, torch.tensor([-1.0]))
                gradient = torch.autograd.grad(loss, close)[0]
            assert loss.isfinite() and gradient.isfinite()


@pytest.mark.parametrize(
    "kl",
    [
        0.3,
        torch.tensor(0.3, dtype=torch.float64),
        torch.full((1,), 0.3, dtype=torch.float64),
        normal(9, dtype=torch.float64, seed=7),
    ],
)
def test_kto(kl):
    answers, other, ref, _ = pairs()
    desirable = other > -1.5
    assert desirable.any() and not desirable.all()
    found = losses.kto_loss(answers, desirable, ref, kl, beta=BETA, desirable_weight=1.5, undesirable_weight=0.5)
    reward, kl = answers - ref.detach(), torch.as_tensor(kl, dtype=torch.float64)
    expected = torch.where(desirable, 1.5 * (1 - s(BETA * (reward - kl))), 0.5 * (1 - s(BETA * (kl - reward))))
    judge(found, expected, answers)


def test_numbers_of_numpy():
    chosen, rejected, *_ = pairs()
    found = losses.dpo_loss(chosen, rejected, beta=np.float64(BETA), label_smoothing=np.float64(0.1))
    assert torch.equal(found, losses.dpo_loss(chosen, rejected, beta=BETA, label_smoothing=0.1))


def test_answer_log_probs():
    many = torch.full((1, 3000), -30.0, dtype=torch.float16)
    assert losses.answer_log_probs(many) == losses.answer_log_probs(many, many != 0) == -90_000
    log_probs = -normal(3, 5, dtype=torch.float64).abs()
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]])
    total = losses.answer_log_probs(log_probs, mask)
    torch.testing.assert_close(total, (log_probs * mask).sum(1))
    average = losses.answer_log_probs(log_probs, mask, average=True)
    torch.testing.assert_close(average, torch.stack([total[0] / 3, total[1] * 0, total[2] / 5]))
    padded = torch.where(mask == 0, torch.nan, log_probs)
    torch.testing.assert_close(losses.answer_log_probs(padded, mask), total)
    with pytest.raises(ValueError, match="average is True and mask is None"):
        losses.answer_log_probs(log_probs, average=True)


SHAPE = 4, 6
LENGTHS = 6, 3, 1, 4


def rollout():
    """log_probs, old, ref, advantages of both signs and zero, mask."""
    log_probs, old, ref = (-normal(*SHAPE, dtype=torch.float64, seed=i).abs() for i in (1, 2, 3))
    mask = torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]
    return log_probs.requires_grad_(), old, ref, torch.tensor([1.3, -0.7, 0.0, -1.1]).double(), mask


def grpo_by_hand(log_probs, advantages, old, ref, sampling, kind, level, beta, delta, bias_correction, policy):
    """grpo_loss, computed sequence by sequence and token by token."""
    low, high, total, each_sequence, n_all = 0.2, 0.3, 0.0, [], sum(LENGTHS)
    for b, n in enumerate(LENGTHS):
        log_ratios = [log_probs[b, t] - (old[b, t] if old is not None else log_probs[b, t].detach()) for t in range(n)]
        tokens = []
        for t in range(n):
            a = advantages[b] if advantages.dim() == 1 else advantages[b, t]
            log_ratio = sum(log_ratios) / n if level == "sequence" else log_ratios[t]
            r = log_ratio.exp()
            if kind == "cispo":
                loss = -min(r.item(), high) * a * log_probs[b, t]
            elif kind == "sapo":
                tau = 1.0 if a > 0 else 1.05
                loss = -4 / tau * s(tau * (r - 1)) * a
            elif kind == "vespo":
                k, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                log_w = sum(x.item() for x in log_ratios)
                log_w += 0 if sampling is None else sampling[b, :n].log().sum().item()
                loss = -math.exp(rate + k * log_w - rate * math.exp(log_w)) * a * log_probs[b, t]
            else:
                bounded = r if delta is None else torch.minimum(r, torch.tensor(delta, dtype=torch.float64))
                clipped = torch.minimum(
                    torch.maximum(r, torch.tensor(1 - low, dtype=torch.float64)),
                    torch.tensor(1 + high, dtype=torch.float64),
                )
                loss = -torch.minimum(bounded * a, clipped * a)
            if policy is not None:
                loss = loss * policy[b, t]
            if sampling is not None and kind != "vespo":
                loss = loss * sampling[b, t]
            if beta:
                q = ref[b, t] - log_probs[b, t]
                kl = q.exp() - q - 1
                loss = loss + beta * (kl * log_ratio.exp() if bias_correction else kl)
            tokens.append(loss)
        each_sequence.append(sum(tokens) / n)
        total = total + sum(tokens)
    mean = sum(each_sequence) / len(LENGTHS)
    scales = {"bnpo": n_all, "dapo": n_all, "cispo": n_all, "vespo": n_all, "luspo": len(LENGTHS)}
    scales["dr_grpo"] = len(LENGTHS) * 10
    return mean if kind in ("grpo", "sapo") else total / scales[kind]


KINDS = "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"


SEQUENCE_VARIANT = 4  # the variant with one ratio per sequence


@pytest.mark.parametrize(
    "kind, variant",
    [
        (kind, variant)
        for kind, variant in itertools.product(KINDS, range(8))
        if variant != SEQUENCE_VARIANT or kind not in ("cispo", "sapo", "vespo")
    ],
)
def test_grpo(kind, variant):
    log_probs, old, ref, advantages, mask = rollout()
    options = [
        {}, {"old": old}, {"old": old, "beta": 0.2}, {"old": old, "beta": 0.2, "bias_correction": True},
        {"old": old, "level": "sequence", "beta": 0.1}, {"old": old, "delta": 1.1, "sampling": ref.exp() + 0.5},
        {"old": old, "policy": old > old.median(), "beta": 0.2}, {"old": old, "advantages": advantages[:, None] + ref},
    ][variant]  # fmt: skip
    beta, level, delta = options.get("beta", 0.0), options.get("level", "token"), options.get("delta")
    sampling, policy, bias = options.get("sampling"), options.get("policy"), options.get("bias_correction", False)
    advantages, old = options.get("advantages", advantages), options.get("old")
    found = losses.grpo_loss(
        log_probs, advantages, mask, old_log_probs=old, ref_log_probs=ref if beta else None, loss_type=kind, beta=beta,
        epsilon_high=0.3, delta=delta, importance_sampling_level=level, sampling_ratio=sampling,
        use_bias_correction_kl=bias, max_completion_length=10, policy_mask=policy,
    )  # fmt: skip
    expected = grpo_by_hand(log_probs, advantages, old, ref, sampling, kind, level, beta, delta, bias, policy)
    judge(found.loss, expected, log_probs)
    assert (found.kl is None) == (beta == 0) and 0 <= found.clip_ratio <= 1
    assert not found.clip_ratio.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_padding_has_no_effect(kind):
    """NaN and infinities in masked positions, and extreme ratios where the advantage is 0, leave values and gradients
    finite and equal."""
    log_probs, old, ref, advantages, mask = rollout()
    options = {"loss_type": kind, "max_completion_length": 10}
    given = {"old_log_probs": old, "ref_log_probs": ref, "beta": 0.1, "sampling_ratio": ref.exp() + 0.5}
    clean = losses.grpo_loss(log_probs, advantages, mask, **given, **options)
    expected = torch.autograd.grad(clean.loss, log_probs)[0]
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = [torch.where(mask, t.detach(), bad) for t in (log_probs, old, ref, given["sampling_ratio"])]
        leaf = spoiled[0].requires_grad_()
        found = losses.grpo_loss(
            leaf, advantages, mask, old_log_probs=spoiled[1], ref_log_probs=spoiled[2], sampling_ratio=spoiled[3],
            beta=0.1, **options,
        )  # fmt: skip
        torch.testing.assert_close(found, clean)
        torch.testing.assert_close(torch.autograd.grad(found.loss, leaf)[0], expected)
    old = torch.where(advantages[:, None] == 0, -1e5, old)
    found = losses.grpo_loss(log_probs, advantages, mask, old_log_probs=old, **options).loss
    assert found.isfinite() and torch.autograd.grad(found, log_probs)[0].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [False, True])
def test_padding_of_constants_has_no_effect(kind, sequences):
    """Padding in advantages, sampling ratio and policy mask; of a whole sequence, or of single tokens."""
    log_probs, old, ref, advantages, mask = rollout()
    if sequences:
        mask = mask & torch.tensor([True, True, False, True])[:, None]
        shown, given = mask.any(1, keepdim=True), (advantages[:, None], ref[:, :1].exp(), torch.ones(4, 1).double())
    else:
        shown, given = mask, ((advantages[:, None] + ref), ref.exp(), (ref > ref.median()).double())
    found = []
    for bad in (1.0, torch.nan, torch.inf):
        a, ratio, policy = (torch.where(shown, t, bad) for t in given)
        loss = losses.grpo_loss(
            log_probs, a, mask, old_log_probs=old, loss_type=kind, sampling_ratio=ratio, policy_mask=policy,
            max_completion_length=10,
        )  # fmt: skip
        found.append((*loss[::2], *torch.autograd.grad(loss.loss, log_probs)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_that_overflows(kind, advantage):
    log_probs = torch.tensor([[-1.0]], requires_grad=True)
    found = losses.grpo_loss(
        log_probs, torch.tensor([advantage]), torch.ones(1, 1), old_log_probs=torch.tensor([[-100.0]]), beta=0.1,
        ref_log_probs=torch.tensor([[200.0]]), loss_type=kind, delta=2.0, max_completion_length=1,
    )  # fmt: skip
    assert found.loss.isfinite() and torch.autograd.grad(found.loss, log_probs)[0].isfinite()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each_token", [False, True])
def test_grpo_targets(kind, each_token):
    """Ignored tokens change neither the loss nor its gradient."""
    log_probs, old, _, advantages, mask = rollout()
    if each_token:
        advantages = advantages[:, None] * torch.tensor([1.0, 0, 1, 0, 0, 1]).double()
    options = {"loss_type": kind, "max_completion_length": 10}
    ids = torch.arange(24).view(SHAPE)
    targets = losses.grpo_targets(ids, mask, advantages, loss_type=kind)
    kept = targets != -100
    assert torch.equal(targets[kept], ids[kept]) and 0 < kept.sum() < mask.sum()
    both = []
    for t in (log_probs, torch.where(kept, log_probs, 0.0)):
        loss = losses.grpo_loss(t, advantages, mask, old_log_probs=old, **options).loss
        both.append((loss, *torch.autograd.grad(loss, log_probs)))
    torch.testing.assert_close(*both)
    assert torch.equal(losses.grpo_targets(ids, mask, advantages, every_token=True) != -100, mask)
    assert torch.equal(losses.grpo_targets(ids.byte(), mask, advantages, loss_type=kind), targets)


def test_entropy_bonus_and_mask():
    log_probs, old, _, advantages, mask = rollout()
    entropy = normal(*SHAPE, dtype=torch.float64, seed=5).abs().requires_grad_()
    chosen = losses.high_entropy_mask(entropy, mask, 0.4)
    least = torch.quantile(entropy[mask], 0.6)
    assert torch.equal(chosen, mask & (entropy >= least)) and 0 < chosen.sum() < mask.sum()
    assert torch.equal(losses.high_entropy_mask(entropy, mask, 1.0), mask)
    assert not losses.high_entropy_mask(entropy, mask & False, 0.5).any()
    plain = losses.grpo_loss(log_probs, advantages, mask, old_log_probs=old, policy_mask=chosen).loss
    found = losses.grpo_loss(
        log_probs, advantages, mask, old_log_probs=old, policy_mask=chosen, entropy=entropy, entropy_coef=0.3
    )
    judge(found.loss, plain - 0.3 * entropy[chosen].mean(), log_probs, entropy)


def test_empty_sequences():
    log_probs, old, ref, advantages, _ = rollout()
    nothing = torch.zeros(SHAPE)
    for kind in KINDS:
        found = losses.grpo_loss(
            log_probs, advantages, nothing, old_log_probs=old, ref_log_probs=ref, beta=0.1, loss_type=kind,
            max_completion_length=10,
        )  # fmt: skip
        assert found.loss == 0 and not torch.autograd.grad(found.loss, log_probs)[0].any()
        none = torch.zeros(0, 6, requires_grad=True)
        found = losses.grpo_loss(none, torch.zeros(0), none, loss_type=kind, max_completion_length=10)
        assert found.loss == 0 and losses.grpo_targets(none.long(), none, torch.zeros(0)).shape == (0, 6)


BAD = [
    (lambda x: losses.answer_log_probs(x, x[:1]), r"mask has shape \(1,\), expected that of log_probs, \(3,\)"),
    (lambda x: losses.cpo_loss(x, x, beta="a"), "cpo_loss: beta is 'a', expected a number more than 0"),
    (lambda x: losses.kto_loss(x, x > 0, kl=math.nan), "kl is nan, expected a number, or a tensor"),
    (lambda x: losses.grpo_targets(x[None], x[None], x[:1]), "token_ids has dtype torch.float32, expected torch.int64"),
    (lambda x: losses.grpo_targets(x[None].long(), x, x[:1]), r"mask has shape \(3,\), expected that of token_ids"),
    (lambda x: losses.grpo_loss(x[None], x[:1], x[None], policy_mask=x[None, :2]), r"policy_mask has shape \(1, 2\)"),
    (
        lambda x: losses.grpo_loss(x[None], x[:1], x[None], epsilon_low=-1),
        "epsilon_low is -1, expected a number, at le",
    ),
    (lambda x: losses.dpo_loss(x, x, loss_type="sft"), "Unsupported loss_type: 'sft', expected one of sigmoid"),
    (lambda x: losses.dpo_loss(x, x, beta=0), "beta is 0, expected a number more than 0"),
    (lambda x: losses.dpo_loss(x, x, x), "ref_chosen and ref_rejected go together"),
    (lambda x: losses.dpo_loss(x, x[:1]), r"rejected has shape \(1,\), expected that of chosen, \(3,\)"),
    (lambda x: losses.dpo_loss(x, x, loss_type="exo_pair"), "label_smoothing must be > 0 for loss_type='exo_pair'"),
    (lambda x: losses.dpo_loss(x, x, label_smoothing=0.5), r"label_smoothing must lie in \[0.0, 0.5\)"),
    (lambda x: losses.simpo_loss(x, x, label_smoothing=-1.0), "label_smoothing is -1.0"),
    (lambda x: losses.kto_loss(x, x > 0, kl=x[:2]), r"kl has shape \(2,\), expected that of log_probs, \(3,\)"),
    (lambda x: losses.high_entropy_mask(x, x, 0), r"share is 0, expected a number in \(0, 1\]"),
    (lambda x: losses.grpo_loss(x, x, x), r"log_probs has shape \(3,\), expected \(sequences, tokens\)"),
    (lambda x: losses.grpo_loss(x[None], x, x[None]), r"advantages has shape \(3,\), expected \(1,\) or \(1, 1\) or"),
    (lambda x: losses.grpo_loss(x[None], x[:1], x), r"mask has shape \(3,\), expected that of log_probs, \(1, 3\)"),
    (lambda x: losses.grpo_loss(x[None], x[:1], x[None], loss_type="ppo"), "Unknown loss type: 'ppo', expected one of"),
    (lambda x: losses.grpo_loss(x[None], x[:1], x[None], beta=0.1), "beta is 0.1 and ref_log_probs is None"),
    (lambda x: losses.grpo_loss(x[None], x[:1], x[None], entropy_coef=1.0), "entropy_coef is 1.0 and entropy is None"),
    (
        lambda x: losses.grpo_loss(x[None], x[:1], x[None], loss_type="sapo", importance_sampling_level="sequence"),
        "Sequence-level importance sampling is not supported for loss_type='sapo'",
    ),
]


@pytest.mark.parametrize("call, message", BAD, ids=[message for _, message in BAD])
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.tensor([-1.0, -2.0, -3.0]))
