"""The losses' modules with a head, compared with losses of full logits; and the names that other libraries call."""

import sys
import types

import pytest
import torch
from cases import normal, random_targets
from torch.utils.flop_counter import FlopCounterMode

from liger_ext import compat, losses, verl
from liger_ext import functional as F
from liger_ext.losses import preference_heads
from liger_ext.losses.preference import _DPO, CPO_TYPES


def head(answers=4, tokens=7, hidden=16, vocab=50, device="cpu"):
    x = normal(answers, tokens, hidden, device=device, seed=1).requires_grad_()
    weight = normal(vocab, hidden, device=device, seed=2, scale=0.5).requires_grad_()
    bias = normal(vocab, device=device, seed=3).requires_grad_()
    ref = normal(answers, tokens, 8, device=device, seed=4), normal(vocab, 8, device=device, seed=5)
    target = torch.randint(0, vocab, (answers, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    target[0, :3] = target[-1, tokens - 2 :] = -100
    return x, weight, bias, ref, target


def whole(x, weight, target, bias=None):
    """Log-probabilities from full logits, 0 where the target is ignored, and the logits."""
    logits = torch.nn.functional.linear(x, weight, bias)
    log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return torch.where(target == -100, 0.0, log_probs), logits.detach()


def check(loss, expected, *leaves):
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(*(torch.autograd.grad(t, leaves) for t in (loss, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, float(b.abs().max())))


@pytest.mark.parametrize("average, nll", [(False, False), (False, True), (True, False), (True, True)])
def test_preference_modules(device, average, nll):
    x, weight, bias, (ref_x, ref_weight), target = head(device=device)
    log_probs, logits = whole(x, weight, target, bias)
    ref_log_probs, _ = whole(ref_x, ref_weight, target)
    mask = target != -100
    answers, ref = ((t.sum(1) / mask.sum(1) if average else t.sum(1)).chunk(2) for t in (log_probs, ref_log_probs))
    of_chosen = -log_probs[:2].sum() / mask[:2].sum()

    module = losses.LigerFusedLinearDPOLoss(beta=0.3, alpha=0.5, compute_nll_loss=nll, average_log_prob=average)
    loss, aux = module(weight, x, target, bias, ref_x, ref_weight, rows=F.count_rows(target))
    expected = losses.dpo_loss(*answers, *ref, beta=0.3).mean() + (0.5 * of_chosen if nll else 0)
    rewards = [0.3 * (a - r).detach() for a, r in zip(answers, ref, strict=True)]
    means = logits[:2].mean(), logits[2:].mean()
    expected_aux = [*answers, *means, of_chosen if nll else torch.zeros_like(of_chosen), *rewards]
    for a, b in zip(aux, expected_aux, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-4)
    check(loss, expected, x, weight, bias)

    module = losses.LigerFusedLinearCPOLoss(beta=0.3, alpha=0.5, compute_nll_loss=nll, average_log_prob=average)
    log_probs, _ = whole(x, weight, target, bias)
    answers = (log_probs.sum(1) / mask.sum(1) if average else log_probs.sum(1)).chunk(2)
    of_chosen = -log_probs[:2].sum() / mask[:2].sum()
    expected = losses.cpo_loss(*answers, beta=0.3).mean() + (0.5 * of_chosen if nll else 0)
    check(module(weight, x, target, bias)[0], expected, x, weight, bias)


def test_modules_of_averages(device):
    x, weight, bias, _, target = head(device=device)
    mask = target != -100
    nll_target = target.clone()
    nll_target[0, :3] = 5
    for module, function, more in (
        (losses.LigerFusedLinearSimPOLoss(beta=2.0), lambda *a: losses.simpo_loss(*a, beta=2.0), ()),
        (losses.LigerFusedLinearORPOLoss(beta=2.0), lambda *a: losses.orpo_loss(*a, beta=2.0), ()),
        (losses.LigerFusedLinearORPOLoss(beta=2.0), lambda *a: losses.orpo_loss(*a, beta=2.0), (nll_target,)),
    ):
        log_probs, _ = whole(x, weight, target, bias)
        of_nll = whole(x, weight, more[0] if more else target, bias)[0][:2]
        counted = ((more[0] if more else target)[:2] != -100).sum()
        expected = function(*(log_probs.sum(1) / mask.sum(1)).chunk(2)).mean() - of_nll.sum() / counted
        check(module(weight, x, target, bias, *more)[0], expected, x, weight, bias)


def test_kto_module(device):
    x, weight, bias, (ref_x, ref_weight), target = head(device=device)
    desirable = torch.tensor([True, False, False, True], device=device)
    kl = torch.tensor([0.1, 0.2, 0.0, 0.3], device=device)
    log_probs, logits = whole(x, weight, target, bias)
    answers, ref = log_probs.sum(1), whole(ref_x, ref_weight, target)[0].sum(1)
    module = losses.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True)
    loss, aux = module(x, weight, target, bias, desirable, ref_x, ref_weight, kl=kl)
    sums = answers.detach(), logits.sum((1, 2)), 0.3 * (answers.detach() - ref)
    for a, b in zip(aux, [t[w].sum() for t in sums for w in (desirable, ~desirable)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    check(loss, losses.kto_loss(answers, desirable, ref, kl, beta=0.3).mean(), x, weight, bias)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["dapo", "grpo", "vespo"])
def test_grpo_module(device, beta, kind):
    x, weight, bias, (ref_x, ref_weight), target = head(device=device)
    mask, ids = target != -100, target.clamp(min=0)
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0], device=device)
    old = whole(x, weight, target, bias)[0].detach() + 0.1
    log_probs = whole(x / 0.8, weight, target, bias / 0.8)[0]
    ref = whole(ref_x / 0.8, ref_weight, target)[0]
    module = losses.LigerFusedLinearGRPOLoss(beta=beta, loss_type=kind, temperature=0.8)
    rows = F.count_rows(module.targets(ids, mask, advantages))
    loss, aux = module(
        x, weight, ids, mask, advantages, bias, old_per_token_logps=old, ref_input=ref_x, ref_weight=ref_weight,
        rows=rows,
    )  # fmt: skip
    expected, kl, clipped = losses.grpo_loss(
        log_probs, advantages, mask, old_log_probs=old, ref_log_probs=ref, beta=beta, loss_type=kind
    )
    for a, b in zip(aux, (clipped,) if beta == 0 else (kl, clipped), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    check(loss, expected, x, weight, bias)


def test_a_module_of_logits_in_float32():
    x, weight = normal(4, 9, 16, seed=1, dtype=torch.bfloat16), normal(40, 16, seed=2, dtype=torch.bfloat16, scale=8)
    ids, mask = random_targets(36, 40, ignored=0).view(4, 9), torch.ones(4, 9, dtype=torch.bool)
    old = torch.log_softmax(x.double() @ weight.double().T, -1).gather(-1, ids[..., None])[..., 0]
    found = [
        losses.LigerFusedLinearGRPOLoss(beta=0.5, loss_type="grpo", logits_dtype=logits_dtype)(
            x, weight, ids, mask, torch.ones(4), ref_per_token_logps=old
        )[1][0]
        for logits_dtype in (None, torch.float32)
    ]
    assert found[1] < 1e-8 < 1e-4 < found[0]  # the KL divergence from the same model


def test_modules_leave_out_what_has_no_effect():
    """The head's matmul excludes ignored positions, and positions with advantage 0."""
    x, weight, _, _, target = head(answers=4, tokens=32)
    target[:, 8:] = -100
    advantages = torch.tensor([1.0, 0.0, 0.0, 0.0])

    def matmul(call):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call()
        return counter.get_flop_counts()["Global"][torch.ops.liger_ext.fused_linear_cross_entropy] / (2 * 16 * 50)

    dpo = losses.LigerFusedLinearDPOLoss(use_ref_model=False)
    assert matmul(lambda: dpo(weight, x, target)) == 32
    grpo = losses.LigerFusedLinearGRPOLoss(beta=0.0)
    assert matmul(lambda: grpo(x, weight, target.clamp(min=0), target != -100, advantages)) == 8


def test_rows_are_counted_once(monkeypatch):
    """The reference model has the policy's targets. On a GPU each count synchronises with the device."""
    calls = []
    monkeypatch.setattr(preference_heads, "count_rows", lambda *args: calls.append(args) or F.count_rows(*args))
    x, weight, _, (ref_x, ref_weight), target = head()
    labels, ids, mask = torch.ones(4, dtype=torch.bool), target.clamp(min=0), target != -100
    losses.LigerFusedLinearDPOLoss()(weight, x, target, None, ref_x, ref_weight)
    losses.LigerFusedLinearKTOLoss(use_ref_model=True)(x, weight, target, None, labels, ref_x, ref_weight)
    losses.LigerFusedLinearGRPOLoss()(x, weight, ids, mask, torch.ones(4), ref_input=ref_x, ref_weight=ref_weight)
    losses.LigerFusedLinearCPOLoss()(weight, x, target)
    assert len(calls) == 4


def test_modules_of_no_answers():
    """Also answers without tokens: their losses are constants."""
    x, weight, bias, _, target = head()
    none, nothing = x[:0], target[:0]
    for module in (
        *(losses.LigerFusedLinearDPOLoss(loss_type=name, use_ref_model=False, label_smoothing=0.1) for name in _DPO),
        *(losses.LigerFusedLinearCPOLoss(loss_type=name) for name in CPO_TYPES), losses.LigerFusedLinearORPOLoss(),
        losses.LigerFusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True),
    ):  # fmt: skip
        loss, aux = module(weight, none, nothing, bias)
        assert loss == 0 and all(t.isfinite().all() for t in aux)
        loss, aux = module(weight, x, torch.full_like(target, -100), bias)
        assert all(t.isfinite().all() for t in (loss, *aux))
        assert not torch.autograd.grad(loss, x)[0].any()
    labels = torch.zeros(0, dtype=torch.bool)
    assert losses.LigerFusedLinearKTOLoss()(none, weight, nothing, bias, labels)[0] == 0
    assert losses.LigerFusedLinearGRPOLoss(beta=0.0)(none, weight, nothing, nothing, torch.zeros(0))[0] == 0


def test_bad_calls_of_modules():
    x, weight, _, (ref_x, _), target = head()
    dpo = losses.LigerFusedLinearDPOLoss()
    with pytest.raises(ValueError, match="LigerFusedLinearDPOLoss: use_ref_model is True and ref_input is None"):
        dpo(weight, x, target)
    with pytest.raises(ValueError, match="use_ref_model is True and ref_weight is None"):
        dpo(weight, x, target, ref_input=ref_x)
    with pytest.raises(ValueError, match=r"_input has shape \(3, 7, 16\) and target \(3, 7\), expected \(2 \* pairs"):
        losses.LigerFusedLinearCPOLoss()(weight, x[:3], target[:3])
    with pytest.raises(ValueError, match=r"nll_target has shape \(1, 7\), expected that of target, \(4, 7\)"):
        losses.LigerFusedLinearORPOLoss()(weight, x, target, nll_target=target[:1])
    with pytest.raises(ValueError, match=r"preference_labels has shape None, expected \(4,\)"):
        losses.LigerFusedLinearKTOLoss()(x, weight, target)
    with pytest.raises(ValueError, match="ref_per_token_logps is None, and ref_input or ref_weight is None"):
        losses.LigerFusedLinearGRPOLoss()(x, weight, target.clamp(min=0), target != -100, torch.ones(4))
    with pytest.raises(
        ValueError, match=r"grpo_targets: mask has shape \(4, 2\), expected that of token_ids, \(4, 7\)"
    ):
        losses.LigerFusedLinearGRPOLoss()(x, weight, target.clamp(min=0), target[:, :2], torch.ones(4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'ignore_index'"):
        losses.LigerFusedLinearGRPOLoss(ignore_index=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'betta'"):
        losses.LigerFusedLinearDPOLoss(betta=0.1)


def test_functions_of_liger_kernel():
    """Each function takes upstream's positional arguments, and its results equal its module's."""
    x, weight, bias, (ref_x, ref_weight), target = head()
    mask, ids, ones = target != -100, target.clamp(min=0), torch.ones(4, dtype=torch.bool)
    advantages, old = torch.tensor([1.0, -0.5, 0.3, 2.0]), whole(x, weight, target, bias)[0].detach() + 0.1
    with compat.install():
        from liger_kernel import chunked_loss
        from liger_kernel.chunked_loss import functional

        assert chunked_loss.LigerFusedLinearDPOLoss is losses.LigerFusedLinearDPOLoss
        found = [
            functional.liger_fused_linear_dpo(
                x, weight, target, bias, ref_x, ref_weight, None, -100, 0.3, True, False, True, True, 1, "robust", 0.1,
                0.05, 0.5,
            ),
            functional.liger_fused_linear_orpo(x, weight, target, bias, -100, 0.3, True, target, False, 1),
            functional.liger_fused_linear_cpo(x, weight, target, bias, -100, 0.3, 0.5, 0.1, True, False, True, 1),
            functional.liger_fused_linear_simpo(x, weight, target, bias, -100, 0.3, 0.5, 0.1, True, False, 0.2, 1),
            functional.liger_fused_linear_kto(
                x, weight, target, ones, bias, ref_x, ref_weight, None, 0.2, -100, 0.3, False, True, True, 1
            ),
            functional.liger_fused_linear_grpo(
                x, weight, ids, mask, advantages, bias, None, old, ref_x, ref_weight, None, 0.1, 0.1, 0.3, "bnpo", 9,
                "sequence", 1.0, 1.05, 0.8, False, True, 1, None, 1.5, True,
            ),
        ]  # fmt: skip
    expected = [
        losses.LigerFusedLinearDPOLoss(
            beta=0.3, alpha=0.5, compute_nll_loss=True, average_log_prob=True, loss_type="robust", label_smoothing=0.1
        )(weight, x, target, bias, ref_x, ref_weight),
        losses.LigerFusedLinearORPOLoss(beta=0.3)(weight, x, target, bias),
        losses.LigerFusedLinearCPOLoss(beta=0.3, alpha=0.5, label_smoothing=0.1, average_log_prob=True)(
            weight, x, target, bias
        ),
        losses.LigerFusedLinearSimPOLoss(beta=0.3, alpha=0.5, label_smoothing=0.1, gamma=0.2)(weight, x, target, bias),
        losses.LigerFusedLinearKTOLoss(beta=0.3, use_ref_model=True, average_log_prob=True)(
            x, weight, target, bias, ones, ref_x, ref_weight, kl=0.2
        ),
        losses.LigerFusedLinearGRPOLoss(
            beta=0.1, epsilon_low=0.1, epsilon_high=0.3, loss_type="bnpo", importance_sampling_level="sequence",
            temperature=0.8, delta=1.5, use_bias_correction_kl=True,
        )(x, weight, ids, mask, advantages, bias, None, old, ref_x, ref_weight),
    ]  # fmt: skip
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_scaled_cross_entropy_of_liger_kernel():
    """verl calls this function."""
    x, weight, _, _, target = head(answers=1, tokens=20)
    x, target, ids = x[0], target[0], torch.tensor([3, 3, 0, 49])
    with compat.install():
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Function

        alone = Function.apply(x, weight, target, 0.7)
        nll, entropy, selected = Function.apply(x, weight, target, 0.7, -100, 1, True, ids)
    log_p = torch.log_softmax(x @ weight.T / 0.7, -1)
    counts = (target != -100)[:, None]
    torch.testing.assert_close(alone, nll)
    torch.testing.assert_close(nll, -whole(x / 0.7, weight, target)[0])
    torch.testing.assert_close(entropy, (-(log_p.exp() * log_p).sum(-1)).where(counts[:, 0], 0.0))
    check((selected * normal(20, 4)).sum(), (log_p[:, ids].where(counts, 0.0) * normal(20, 4)).sum(), x, weight)


class _VerlFunction(torch.autograd.Function):
    """A function with the signature of verl's, whose results are sums of the hidden states."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None):
        return hidden.sum(-1).reshape(-1), hidden.sum(-1).reshape(-1)


@pytest.fixture
def verl_module(monkeypatch):
    name = "verl.utils.kernel.linear_cross_entropy"
    module = types.ModuleType(name)
    module.LinearCrossEntropy, module.linear_cross_entropy = _VerlFunction, _VerlFunction.apply
    parts = name.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_verl(verl_module):
    x, weight, _, _, target = head(answers=1, tokens=20)
    with verl.install(), verl.install():
        log_probs, entropy = verl_module.linear_cross_entropy(x, weight, target, 0.7, "none")
        assert verl_module.linear_cross_entropy(x, weight, target, 0.7, "sum")[0].equal(x.sum(-1).view(-1))  # unchanged
    expected = whole(x[0] / 0.7, weight, target[0])[0]
    assert log_probs.shape == entropy.shape == (20,)
    check(log_probs.sum(), expected.sum(), x, weight)
    per_token = torch.full((1, 20), 0.7)
    torch.testing.assert_close(verl.linear_cross_entropy(x, weight, target, per_token)[0], log_probs)
    assert verl_module.linear_cross_entropy == _VerlFunction.apply
    with pytest.raises(ValueError, match="reduction is 'mean', expected 'none'"):
        verl.linear_cross_entropy(x, weight, target, reduction="mean")


def test_another_verl(verl_module):
    verl_module.linear_cross_entropy = print
    with pytest.warns(UserWarning, match=r"linear_cross_entropy was replaced by .*print.*; verl runs unchanged"):
        verl.install()
    assert verl_module.linear_cross_entropy is print
    del verl_module.linear_cross_entropy
    with pytest.warns(UserWarning, match="this version of verl has no verl.utils.kernel"):
        verl.install()
