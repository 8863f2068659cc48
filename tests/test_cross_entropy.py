"""Tests of cross_entropy under liger_ext.rule: every option, and the defined results in edge cases."""

import pytest
import torch
from cases import LOW, device_dtypes, draw_tensor, normal, random_targets, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import liger_ext
from liger_ext import functional as F
from liger_ext.testing import judge

vocabularies = st.integers(1, 70) | st.sampled_from([127, 128, 129, 1000, 1023, 1025, 4097])
loss_options = st.fixed_dictionaries(
    {
        "reduction": st.sampled_from(["mean", "sum", "none"]),
        "label_smoothing": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "lse_square_scale": st.sampled_from([0.0, 0.0, 1e-4, 1e-2]),
        "softcap": st.sampled_from([None, None, 30.0, 3.0]),
        "return_z_loss": st.booleans(),
        "return_token_accuracy": st.booleans(),
        "return_predicted_tokens": st.booleans(),
    }
)


def draw_weight(data, vocab, device, dtype):
    if data.draw(st.integers(0, 2)):
        return None
    return (normal(vocab, device=device, seed=3).abs() + 0.1).to(
        torch.float64 if dtype == torch.float64 else torch.float32
    )


def draw_target(data, rows, vocab, device):
    ignore_index = data.draw(st.sampled_from([-100, -1, 0, vocab - 1]))
    ignored = data.draw(st.sampled_from([0.0, 0.2, 1.0]))
    target = random_targets(
        rows, vocab, device=device, seed=data.draw(seeds), ignored=ignored, ignore_index=ignore_index
    )
    return {"target": target, "ignore_index": ignore_index}


@settings(max_examples=80)
@given(data=st.data(), options=loss_options)
def test_cross_entropy(device, data, options):
    rows, vocab = data.draw(st.sampled_from([0, 1, 2, 3, 7, 40])), data.draw(vocabularies)
    dtype = data.draw(st.sampled_from(device_dtypes(device)))
    logits = draw_tensor(data, device, rows, vocab, dtype=dtype, scale=data.draw(st.sampled_from([1, 4])))
    inputs = {"logits": logits.requires_grad_(), **draw_target(data, rows, vocab, device)}
    judge("cross_entropy", inputs | options | {"weight": draw_weight(data, vocab, device, dtype)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab", [(3, 32_000), (2, 128_256), (2, 262_147), (1, 65_537)])
def test_large_vocabularies(device, dtype, rows, vocab):
    logits = normal(rows, vocab, dtype=dtype, device=device, scale=3).requires_grad_()
    judge("cross_entropy", {"logits": logits, "target": random_targets(rows, vocab, device=device, ignored=0)})
    last = torch.full((rows,), vocab - 1, device=device)
    judge("cross_entropy", {"logits": logits, "target": last, "label_smoothing": 0.1, "softcap": 30.0})


@pytest.mark.parametrize("dtype", LOW)
def test_the_gradient_of_a_confident_target_keeps_its_digits(device, dtype):
    """The gradient p - 1 of a target with p near 1 stays exact; if p were rounded to 16 bits first, nothing would
    remain."""
    logits = torch.zeros(4, 100, dtype=dtype, device=device)
    logits[:, 7] = 12.0
    target = torch.full((4,), 7, device=device)
    judge("cross_entropy", {"logits": logits.requires_grad_(), "target": target, "reduction": "sum"}, grad=1.0)


def test_agrees_with_pytorch_to_the_last_digits_in_fp32(device):
    logits, target = normal(32, 1000, device=device, scale=2), random_targets(32, 1000, device=device)
    for options in (
        {},
        {"label_smoothing": 0.1},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"weight": torch.rand(1000, device=device)},
    ):
        expected = torch.nn.functional.cross_entropy(logits, target, **options)
        torch.testing.assert_close(F.cross_entropy(logits, target, **options), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_targets_ignored(device, reduction, smoothing):
    logits = normal(5, 33, device=device).requires_grad_()
    target = torch.full((5,), -100, device=device)
    wanted = {"return_z_loss": True, "return_token_accuracy": True, "return_predicted_tokens": True}
    out = F.cross_entropy(
        logits, target, reduction=reduction, label_smoothing=smoothing, lse_square_scale=0.1, **wanted
    )
    (dlogits,) = torch.autograd.grad(out.loss.sum(), logits)
    assert not out.loss.any() and not out.z_loss.any() and not out.token_accuracy.any() and not dlogits.any()
    assert (out.predicted_tokens == -1).all()


def test_an_ignored_row_may_hold_anything(device):
    logits = normal(3, 20, device=device)
    logits[1] = float("nan")
    logits.requires_grad_()
    target = torch.tensor([4, -100, 5], device=device)
    loss = F.cross_entropy(logits, target)
    (dlogits,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[::2], target[::2]))
    assert dlogits.isfinite().all() and not dlogits[1].any()


def test_ignore_index_may_be_a_class(device):
    logits, target = normal(6, 5, device=device).requires_grad_(), torch.tensor([0, 1, 2, 0, 4, 3], device=device)
    expected = torch.nn.functional.cross_entropy(logits, target, ignore_index=0)
    torch.testing.assert_close(F.cross_entropy(logits, target, ignore_index=0), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_special_logits_as_in_pytorch(device, smoothing):
    inf, nan = float("inf"), float("nan")
    rows = [[0.0, 1.0, -inf], [0.0, 1.0, -inf], [inf, 0.0, 1.0], [nan, 0.0, 1.0], [-inf, -inf, -inf]]
    target = torch.tensor([0, 2, 1, 1, 0], device=device)
    ours, theirs = (torch.tensor(rows, device=device).requires_grad_() for _ in range(2))
    a = F.cross_entropy(ours, target, reduction="none", label_smoothing=smoothing)
    b = torch.nn.functional.cross_entropy(theirs, target, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(a, b, equal_nan=True)
    (da,), (db,) = torch.autograd.grad(a, ours, torch.ones_like(a)), torch.autograd.grad(b, theirs, torch.ones_like(b))
    if not smoothing:
        torch.testing.assert_close(da, db, equal_nan=True)
    torch.testing.assert_close(da[0, :2], db[0, :2], equal_nan=bool(smoothing))


def test_leading_dimensions_and_strided_targets(device):
    logits, target = normal(2, 3, 11, device=device), random_targets(6, 11, device=device).view(2, 3)
    flat = F.cross_entropy(logits.view(6, 11), target.view(6), reduction="none")
    assert torch.equal(F.cross_entropy(logits, target, reduction="none"), flat.view(2, 3))
    spread = torch.zeros(12, dtype=torch.int64, device=device)
    spread[::2] = target.view(6)
    assert torch.equal(F.cross_entropy(logits.view(6, 11), spread[::2], reduction="none"), flat)


def test_logits_that_fit_target_in_two_ways(device):
    """The error names both readings, classes last (as in liger_ext) and classes in dimension 1 (as in torch), and how
    to pass each."""
    logits, target = normal(2, 5, 5, device=device), random_targets(10, 5, device=device, ignored=0).view(2, 5)
    for loss in (F.cross_entropy, liger_ext.liger_cross_entropy, liger_ext.LigerCrossEntropyLoss()):
        with pytest.raises(ValueError, match=r"classes are the last dimension, as here, or dimension 1, as in torch"):
            loss(logits, target)
    theirs = torch.nn.functional.cross_entropy
    last = F.cross_entropy(logits.flatten(0, -2), target.flatten())
    torch.testing.assert_close(last, theirs(logits.transpose(1, 2), target))
    first = F.cross_entropy(logits.movedim(1, -1).flatten(0, -2), target.flatten())
    torch.testing.assert_close(first, theirs(logits, target))
    with pytest.raises(ValueError, match="as here"):
        F.cross_entropy(normal(2, 5, 5, 5, device=device), target[..., None].expand(2, 5, 5))


def test_a_graph_makes_no_guard_of_logits_that_fit_in_two_ways(device):
    torch._dynamo.reset()
    counter = CompileCounter()
    loss = torch.compile(F.cross_entropy, fullgraph=True, dynamic=True, backend=counter)
    for length in (7, 12, 33):
        logits, target = normal(2, length, 33, device=device), random_targets(2 * length, 33, device=device)
        expected = F.cross_entropy(logits.flatten(0, 1), target)
        torch.testing.assert_close(loss(logits, target.view(2, length)), expected)
    assert counter.frame_count == 1


def test_targets_of_uint8(device):
    """uint8 targets work as in torch. An ignore_index outside of uint8 matches no target; it is not wrapped."""
    logits, target = normal(6, 200, device=device), torch.tensor([3, 156, 0, 255, 199, 255], device=device)
    weight = normal(200, 8, device=device)
    for ignore_index, rows in ((255, 6), (-100, 3)):
        short = target[:rows].to(torch.uint8)
        found = F.cross_entropy(logits[:rows], short, ignore_index=ignore_index)
        torch.testing.assert_close(
            found, torch.nn.functional.cross_entropy(logits[:rows], short, ignore_index=ignore_index)
        )
        for counted in (None, F.count_rows(short, ignore_index)):
            x, options = weight[:rows], {"ignore_index": ignore_index, "rows": counted}
            fused = F.fused_linear_cross_entropy(x, weight, short, **options)
            assert torch.equal(fused, F.fused_linear_cross_entropy(x, weight, short.long(), **options))


def test_predictions_take_the_first_of_equals(device):
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0], [0.0, 0.0, 0.0, 1.0]], device=device)
    wanted = {"return_predicted_tokens": True, "return_token_accuracy": True}
    target = torch.tensor([1, 0, 4], device=device)
    out = F.cross_entropy(logits.repeat(1, 40), target, reduction="none", **wanted)
    assert out.predicted_tokens.tolist() == [1, 0, 3] and out.token_accuracy.tolist() == [1, 1, 0]


def test_only_the_loss_is_differentiable(device):
    logits = normal(4, 9, device=device).requires_grad_()
    out = F.cross_entropy(logits, random_targets(4, 9, device=device), return_z_loss=True, return_token_accuracy=True)
    assert out.loss.requires_grad and not out.z_loss.requires_grad and not out.token_accuracy.requires_grad
    assert out.predicted_tokens is None


@pytest.mark.parametrize("op", ["cross_entropy", "fused_linear_cross_entropy"])
@pytest.mark.parametrize("value", [33, -1, 2**40, -(2**62)])
def test_target_out_of_range_on_a_cpu(op, value):
    target = torch.tensor([3, 4, value, 5])
    with pytest.raises(IndexError) as error:
        if op == "cross_entropy":
            F.cross_entropy(normal(4, 33), target)
        else:
            F.fused_linear_cross_entropy(normal(4, 8), normal(33, 8), target)
    for part in (op, "target", "target[2]", str(value), "33"):
        assert part in str(error.value)


@pytest.mark.cuda
@pytest.mark.parametrize("op", ["cross_entropy", "fused_linear_cross_entropy"])
@pytest.mark.parametrize("value", [33, -1, 2**40, -(2**62)])
def test_target_out_of_range_on_a_gpu(op, value):
    """The GPU does not synchronise and accesses no memory out of bounds; the next call or check_errors() raises the
    error."""
    target = torch.tensor([3, 4, value, 5], device="cuda")
    x = normal(4, 33 if op == "cross_entropy" else 8, device="cuda").requires_grad_()
    head = () if op == "cross_entropy" else (normal(33, 8, device="cuda"),)

    def call(target):
        return getattr(F, op)(x, *head, target, reduction="none")

    loss = call(target)
    torch.cuda.synchronize()
    assert loss.isnan().tolist() == [False, False, True, False]
    with pytest.raises(IndexError) as error:
        liger_ext.check_errors()
    for part in (op, "target[2]", str(value)):
        assert part in str(error.value)
    liger_ext.check_errors()  # reported once
    call(target)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"target\[2\]"):
        F.softmax(torch.zeros(1, device="cuda"))
    assert call(target.clamp(0, 32)).isfinite().all()  # the CUDA context stays usable


@pytest.mark.cuda
def test_gradient_of_a_target_out_of_range_is_nan_in_its_row():
    logits = normal(3, 33, device="cuda").requires_grad_()
    loss = F.cross_entropy(logits, torch.tensor([1, 99, 2], device="cuda"), reduction="sum")
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"target\[1\]"):
        torch.autograd.grad(loss, logits, retain_graph=True)
    (dlogits,) = torch.autograd.grad(loss, logits)
    torch.cuda.synchronize()
    assert dlogits[1].isnan().any() and dlogits[::2].isfinite().all()
    with pytest.raises(IndexError, match=r"target\[1\]"):
        liger_ext.check_errors()
