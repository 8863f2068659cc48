"""The generalised Jensen-Shannon divergence, against a float64 reference (the accuracy rule of liger_ext/rule.py), and
in edge cases."""

import copy
import math

import pytest
import torch
from cases import LOW, device_dtypes, laid_out, layouts, random_targets, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.jsd import BETAS, log_probabilities

import liger_ext
from liger_ext import functional as F
from liger_ext.testing import judge

INF = math.inf
vocabularies = st.integers(1, 70) | st.sampled_from([127, 128, 129, 1000, 1023, 1025, 4097])
each_beta = pytest.mark.parametrize("beta", BETAS)


@settings(max_examples=80)
@given(data=st.data(), beta=st.sampled_from(BETAS) | st.floats(0, 1), labelled=st.booleans())
def test_jsd(device, data, beta, labelled):
    rows, vocab = data.draw(st.sampled_from([0, 1, 2, 3, 7, 40])), data.draw(vocabularies)
    dtype, scale = data.draw(st.sampled_from(device_dtypes(device))), data.draw(st.sampled_from([0.1, 2, 8]))

    def log(masked):
        made = log_probabilities(rows, vocab, dtype=dtype, seed=data.draw(seeds), scale=scale, masked=masked)
        return laid_out(made.to(device), data.draw(layouts))

    # Both KL divergences are finite where both distributions exclude the same classes.
    masked = data.draw(st.sampled_from([0, 0, 3]))
    inputs = {"log_q": log(masked).requires_grad_(), "log_p": log(masked), "beta": beta}
    if labelled:
        ignored = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
        inputs["shift_labels"] = random_targets(rows, vocab, device=device, seed=data.draw(seeds), ignored=ignored)
    judge("jsd", inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab", [(3, 32_000), (2, 128_256), (2, 262_147), (1, 65_537)])
def test_large_vocabularies(device, dtype, rows, vocab):
    log_q, log_p = (log_probabilities(rows, vocab, dtype=dtype, seed=s, device=device) for s in (0, 1))
    judge("jsd", {"log_q": log_q.requires_grad_(), "log_p": log_p})
    judge("jsd", {"log_q": log_q, "log_p": log_p, "beta": 0.1})


@each_beta
@pytest.mark.parametrize("dtype", LOW)
def test_equal_distributions(device, dtype, beta):
    log = log_probabilities(5, 1003, dtype=dtype, seed=0, masked=7, device=device)
    log_q = log.clone().requires_grad_()
    loss = F.jsd(log_q, log, beta=beta)
    loss.backward()
    assert loss == 0
    if 0 < beta < 1:
        assert not log_q.grad.any()


@pytest.mark.parametrize("beta", [0.5, 0.1, 0.9])
def test_nearly_equal_distributions_keep_their_digits(device, beta):
    """Student and teacher are nearly equal, so x - log M is the difference of two numbers that agree in nearly all
    digits."""
    log_p = log_probabilities(4, 500, dtype=torch.float32, seed=0, device=device)
    shift = torch.linspace(-1e-3, 1e-3, 500, device=device)
    log_q = (log_p + shift).requires_grad_()
    (grad,) = torch.autograd.grad(F.jsd(log_q, log_p, beta=beta), log_q)
    x, y = log_q.detach().double(), log_p.double()
    excess = -torch.log1p(beta * torch.expm1(y - x))  # x - log M
    exact = (1 - beta) * x.exp() * excess / 4
    torch.testing.assert_close(grad.double(), exact, rtol=3e-6, atol=1e-38)


@each_beta
@pytest.mark.parametrize("dtype", LOW)
def test_zero_probabilities(device, dtype, beta):
    """0 * log 0 is 0; a KL divergence is infinite where only its second distribution excludes a class."""
    rows = {  # student and teacher; class 1 is excluded by one or both
        "both": ([-0.5, -INF, -1.0], [-0.7, -INF, -0.9]),
        "student": ([-0.5, -INF, -1.0], [-0.7, -2.0, -0.9]),
        "teacher": ([-0.5, -2.0, -1.0], [-0.7, -INF, -0.9]),
        "all but one": ([-INF, -INF, 0.0], [0.0, -INF, -INF]),
    }
    infinite = {0.0: ("student", "all but one"), 1.0: ("teacher", "all but one")}.get(beta, ())
    for name, (q, p) in rows.items():
        log_q = torch.tensor([q], dtype=dtype, device=device).requires_grad_()
        loss = F.jsd(log_q, torch.tensor([p], dtype=dtype, device=device), beta=beta)
        loss.backward()
        assert loss == INF if name in infinite else loss.isfinite(), name
        if beta == 1 and name in infinite:  # only where the teacher excludes what the student does not
            assert (log_q.grad == INF).tolist() == [[a > -INF and b == -INF for a, b in zip(q, p, strict=True)]]
        else:
            assert log_q.grad.isfinite().all(), name
    if 0 < beta < 1:  # disjoint distributions have the largest divergence
        assert loss.item() == pytest.approx(-beta * math.log(beta) - (1 - beta) * math.log1p(-beta), rel=1e-5)


@pytest.mark.parametrize("beta", [1e-3, 1e-15, 1e-17, 1e-30])
def test_a_weight_that_vanishes_beside_the_other(beta):
    """In float64, where the student excludes a class: 1 - beta may round to 1, and M is beta * P there."""
    log_q, log_p = (torch.tensor([p], dtype=torch.float64).log() for p in ([0.5, 0.5, 0.0], [0.5, 0.0, 0.5]))
    loss = F.jsd(log_q.requires_grad_(), log_p, beta=beta)
    (grad,) = torch.autograd.grad(loss, log_q)
    # Columns: equal probabilities; only the student's; only the teacher's.
    assert loss.item() == pytest.approx(-0.5 * (1 - beta) * math.log1p(-beta) - 0.5 * beta * math.log(beta), rel=1e-12)
    assert grad[0].tolist() == pytest.approx([0, -0.5 * (1 - beta) * math.log1p(-beta), 0], rel=1e-12, abs=1e-300)


@each_beta
def test_nan_is_not_lost(device, beta):
    for which in range(2):
        logs = [log_probabilities(3, 40, dtype=torch.float32, seed=s, device=device) for s in range(2)]
        logs[which][1, 5] = math.nan
        assert F.jsd(*logs, beta=beta).isnan()


@each_beta
@pytest.mark.parametrize("vocab", [33, 512])
def test_ignored_rows_are_not_read(device, vocab, beta):
    logs = [log_probabilities(6, vocab, dtype=torch.float32, seed=s, device=device) for s in range(2)]
    labels = torch.tensor([5, -100, 2**40, -1, -100, 0], device=device)  # any number but -100 is a label
    kept = labels != -100
    log_q = logs[0][kept].requires_grad_()
    expected = F.jsd(log_q, logs[1][kept], beta=beta)
    expected.backward()
    for log in logs:
        log[~kept] = math.nan
    logs[0].requires_grad_()
    loss = F.jsd(logs[0], logs[1], labels, beta)
    loss.backward()
    torch.testing.assert_close(loss, expected)  # rows start at other addresses, so a GPU sums in another order
    assert torch.equal(logs[0].grad[kept], log_q.grad)
    assert not logs[0].grad[~kept].any()


def test_nothing_to_count(device):
    log = torch.full((3, 8), math.nan, device=device, requires_grad=True)
    loss = F.jsd(log, log.detach(), torch.full((3,), 7, device=device), ignore_index=7)
    loss.backward()
    assert loss == 0 and not log.grad.any()
    for labels in (None, torch.zeros(0, dtype=torch.int64, device=device)):
        empty = torch.zeros(0, 8, device=device, requires_grad=True)
        loss = F.jsd(empty, empty.detach(), labels)
        loss.backward()
        assert loss == 0 and empty.grad.shape == (0, 8)


def test_any_number_of_leading_dimensions(device):
    log_q, log_p = (log_probabilities(2, 3, 9, dtype=torch.float32, seed=s, device=device) for s in range(2))
    labels = torch.tensor([[1, -100, 2], [3, 4, -100]], device=device)
    expected = F.jsd(log_q.view(6, 9), log_p.view(6, 9), labels.view(6))
    assert F.jsd(log_q, log_p, labels) == expected
    assert F.jsd(log_q[0, 0], log_p[0, 0]) == F.jsd(log_q[0, :1], log_p[0, :1])


def test_the_divergence_of_equal_weights_is_symmetric(device):
    log_q, log_p = (log_probabilities(5, 1000, dtype=torch.float32, seed=s, device=device) for s in range(2))
    torch.testing.assert_close(F.jsd(log_q, log_p), F.jsd(log_p, log_q))
    torch.testing.assert_close(F.jsd(log_q, log_p, beta=0.0), F.jsd(log_p, log_q, beta=1.0))


@each_beta
def test_the_same_bits_again(device, beta):
    log_q, log_p = (log_probabilities(40, 5003, dtype=torch.bfloat16, seed=s, device=device) for s in range(2))
    runs = []
    for _ in range(3):
        leaf = log_q.clone().requires_grad_()
        loss = F.jsd(leaf, log_p, beta=beta)
        runs.append((loss, *torch.autograd.grad(loss, leaf)))
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.cuda
@pytest.mark.large
def test_more_than_2_31_elements():
    few = [log_probabilities(64, 4096, dtype=torch.bfloat16, seed=s, device="cuda") for s in range(2)]
    many = [log.repeat(2**14, 1) for log in few]
    found = []
    for log_q, log_p in (few, many):
        loss = F.jsd(log_q.requires_grad_(), log_p)
        found += [loss, *torch.autograd.grad(loss, log_q)]
    torch.testing.assert_close(found[2], found[0])
    for rows in found[3].view(2**14, 64, 4096)[:: 2**14 - 1]:  # the first and the last
        assert torch.equal(rows * 2**14, found[1])


def test_upstream_names(device):
    log_q, log_p = (log_probabilities(4, 33, dtype=torch.float32, seed=s, device=device) for s in range(2))
    labels = torch.tensor([3, 7, 7, 1], device=device)
    expected = F.jsd(log_q, log_p, labels, 0.1, 7)
    assert liger_ext.liger_jsd(log_q, log_p, labels, 0.1, 7) == expected
    assert liger_ext.liger_jsd(input=log_q, target=log_p, shift_labels=labels, beta=0.1, ignore_index=7) == expected
    module = copy.deepcopy(liger_ext.LigerJSD(beta=0.1, ignore_index=7))
    assert module(log_q, log_p, labels) == expected and "beta=0.1" in repr(module)
    assert liger_ext.LigerJSD()(log_q, log_p) == F.jsd(log_q, log_p)
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        liger_ext.LigerJSD(beta=1.5)


# Bad input ------------------------------------------------------------------------------------------------------------

X = torch.zeros(3, 8)


def test_the_backward_op_checks_what_it_is_given(device):
    log = X.to(device)
    counts = torch.ops.liger_ext.jsd(log, log, None, 0.5, -100)[1]
    for dloss, saved in ((log[0], counts), (log[0, 0], counts[:2]), (log[0, 0], counts.half())):
        with pytest.raises(ValueError, match=r"dloss|counts"):
            torch.ops.liger_ext.jsd_backward(dloss, log, log, None, saved, 0.5, -100)
