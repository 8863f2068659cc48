"""Calls and settings that once failed in a user's training, with a wrong result or an error: each must now work, or
raise an error that explains what is not supported."""

import warnings

import pytest
import torch
import torch.utils.checkpoint
from cases import differentiable_outputs, gradients, host_target, normal, random_targets, tensor_leaves
from ops import DEFAULT_EXAMPLES, EXAMPLES, IDS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from liger_ext import functional as F
from liger_ext.ops._loss_plan import SMALLEST

each_op = pytest.mark.parametrize("example", DEFAULT_EXAMPLES, ids=[e.op for e in DEFAULT_EXAMPLES])
MODES = {"one chunk": "auto", "several chunks": SMALLEST}
each_mode = pytest.mark.parametrize("memory", MODES.values(), ids=MODES)


def torch_loss(x, weight, target, **options):
    return torch.nn.functional.cross_entropy((x @ weight.T).double(), target, **options)


def test_rope_of_heads_that_are_transposed(device):
    """The gradient of k in attention with matmul and softmax has this layout, if there are as many key as query
    heads."""
    q = normal(2, 3, 5, 8, device=device)
    k = normal(2, 3, 8, 5, device=device, seed=1).transpose(2, 3)
    angle = normal(1, 5, 8, device=device, seed=2)
    for found, same in zip(F.rope(q, k, angle, angle), F.rope(q, k.contiguous(), angle, angle), strict=True):
        assert torch.equal(found, same)
        assert found.stride(-1) == 1


def test_rows_of_a_matmul_that_are_one_row(device):
    x, weight = normal(1, 16, device=device).expand(9, 16), normal(80, device=device).as_strided((40, 16), (1, 1))
    target = random_targets(9, 40, device=device)
    found = F.fused_linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(found.double(), torch_loss(x, weight, target))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_what_stands_beside_a_matrix_is_not_read(device, dtype):
    """On CPUs with AMX, a matmul multiplies memory behind a row by zero: NaN in that memory makes the result NaN."""
    for rows, hidden, vocab in ((33, 70, 1000), (64, 64, 71), (33, 64, 1001)):
        memory = torch.full((rows, hidden + 60), torch.nan, device=device, dtype=dtype)
        memory[:, :hidden] = normal(rows, hidden, device=device, dtype=dtype)
        x, weight = memory[:, :hidden].requires_grad_(), normal(vocab, hidden, device=device, dtype=dtype, seed=1)
        weight.requires_grad_()
        target = random_targets(rows, vocab, device=device)
        for _ in range(3):  # the logits reuse this freed buffer
            torch.full((rows, -(-vocab // 64) * 64), torch.nan, device=device, dtype=dtype)
            loss = F.fused_linear_cross_entropy(x, weight, target)
            for result in (loss, *torch.autograd.grad(loss, (x, weight))):
                assert result.isfinite().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype, huge", [(torch.bfloat16, 8e37), (torch.float16, 6e4), (torch.float32, 3e38)])
def test_huge_logits(device, dtype, huge, smoothing):
    """One largest logit, two of them, and rows of one value; rows of 1,000 columns are held in registers, 20,000 are
    not. With label smoothing rows have one value, because the loss of other huge logits would overflow."""
    for vocab in (1000, 20_000):
        logits = normal(4, vocab, device=device).to(dtype)
        logits[:, 7] = huge
        logits[1, 9] = huge
        logits[2] = -huge
        logits = logits[2:3].expand(4, vocab).contiguous() if smoothing else logits
        target = torch.tensor([7, 7, 7, 3], device=device)
        exact, ours = logits.double().requires_grad_(), logits.clone().requires_grad_()
        options = {"reduction": "none", "label_smoothing": smoothing}
        expected = torch.nn.functional.cross_entropy(exact, target, **options)
        found = F.cross_entropy(ours, target, **options)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
        (expected_grad,) = torch.autograd.grad(expected.sum(), exact)
        (found_grad,) = torch.autograd.grad(found.sum(), ours)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(found_grad.double(), expected_grad, rtol=rounding, atol=1e-6)


@each_mode
def test_a_scaled_loss_of_each_row_in_fp16(device, memory):
    """GradScaler's factor 65,536 over a few tokens exceeds a stored gradient times its storage factor."""
    x = normal(200, 16, device=device, dtype=torch.float16, scale=4).requires_grad_()
    weight = normal(50, 16, device=device, dtype=torch.float16, scale=0.05, seed=1).requires_grad_()
    bias = normal(50, device=device, dtype=torch.float16, seed=2).requires_grad_()
    target = random_targets(200, 50, device=device)
    row_grad = torch.zeros(200, device=device)
    row_grad[:4] = torch.tensor([2048.0, 1024.0, -2048.0, 1.0])
    loss = F.fused_linear_cross_entropy(x, weight, target, bias, reduction="none", memory=memory)
    found = torch.autograd.grad(loss, (x, weight, bias), row_grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    logits = exact[0] @ exact[1].T + exact[2]
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits, target, reduction="none"), exact, row_grad.double()
    )
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs).abs().max() / theirs.abs().max()
        assert error < 8 * torch.finfo(torch.float16).eps


@each_mode
def test_z_loss_where_class_weights_are_0(device, memory):
    x, weight = (normal(*s, device=device, seed=i).requires_grad_() for i, s in enumerate([(200, 8), (11, 8)]))
    target = torch.arange(200, device=device) % 5
    class_weight = torch.ones(11, device=device)
    class_weight[:5] = 0
    options = {"lse_square_scale": 0.1}
    fused = F.fused_linear_cross_entropy(x, weight, target, ce_weight=class_weight, memory=memory, **options)
    plain = F.cross_entropy(x @ weight.T, target, class_weight, **options)
    torch.testing.assert_close(fused, plain)
    for ours, theirs in zip(*(torch.autograd.grad(t, (x, weight)) for t in (fused, plain)), strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@each_mode
def test_an_ignored_row_counts_for_nothing(device, memory):
    """Even if its gradient is NaN."""
    x, weight = (normal(*s, device=device, seed=i).requires_grad_() for i, s in enumerate([(200, 8), (11, 8)]))
    target = torch.arange(200, device=device) % 11
    target[3] = -100
    row_grad = torch.ones(200, device=device)
    row_grad[3] = torch.nan
    loss = F.fused_linear_cross_entropy(x, weight, target, reduction="none", memory=memory)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (x, weight), row_grad))


@each_mode
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_hidden_columns(device, memory, reduction):
    x, weight = torch.zeros(200, 0, device=device), torch.zeros(7, 0, device=device)
    target = random_targets(200, 7, device=device, ignored=0)
    loss = F.fused_linear_cross_entropy(
        x.requires_grad_(), weight.requires_grad_(), target, reduction=reduction, memory=memory
    )
    loss.sum().backward()
    torch.testing.assert_close(loss.mean().item(), torch.tensor(7.0).log().item())


def test_no_rows(device):
    loss = F.cross_entropy(
        torch.zeros(0, 5, device=device, requires_grad=True), torch.zeros(0, device=device, dtype=torch.int64)
    )
    assert loss.item() == 0


@each_op
def test_a_checkpoint_that_starts_with_the_op(device, example):
    """The backward first unpacks the op's saved tensors, whose recomputation records another graph."""
    arguments = example.arguments(device, torch.float32)
    expected = gradients(example, arguments)

    def region(*leaves):
        made = dict(zip((k for k, v in arguments.items() if any(v is t for t in leaves)), leaves, strict=True))
        return tuple(t.sin() for t in differentiable_outputs(example({**arguments, **made})))

    leaves = tensor_leaves(arguments)
    plain = torch.autograd.grad([t.sum() for t in region(*leaves)], leaves)
    again = torch.utils.checkpoint.checkpoint(region, *leaves, use_reentrant=False)
    found = torch.autograd.grad([t.sum() for t in again], leaves)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@each_op
def test_forward_mode_is_refused(device, example):
    """Without the refusal, tangents would be dropped silently."""
    arguments = {
        k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in example.arguments(device, torch.float32).items()
    }
    name = next(k for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.is_floating_point())
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(RuntimeError, match="forward-mode"):
            example(arguments)


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_meta_tensors(example):
    arguments = example.arguments("cpu", torch.float32)
    expected = [(t.shape, t.dtype) for t in gradients(example, arguments)]
    meta = {k: v.detach().to("meta") if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.requires_grad:
            meta[name].requires_grad_()
    outputs = differentiable_outputs(example(meta))
    found = torch.autograd.grad(outputs, tensor_leaves(meta), [torch.empty_like(t) for t in outputs])
    assert [(t.shape, t.dtype) for t in found] == expected


@pytest.mark.slow
@pytest.mark.parametrize("shifted", [False, True])
def test_a_number_of_rows_that_the_compiler_does_not_know(device, shifted):
    """Rows or sequences selected by a mask, as in instruction tuning."""
    x, weight = (normal(*s, device=device, seed=i).requires_grad_() for i, s in enumerate([(40, 16), (30, 16)]))
    labels = random_targets(40, 30, device=device, ignored=0.4)

    def loss(x, weight, labels):
        counted = labels != -100
        if shifted:
            x, labels, counted = x.view(8, 5, 16), labels.view(8, 5), counted.view(8, 5)[:, 0]
        x, labels = x[counted], labels[counted]
        return F.fused_linear_cross_entropy(*(x[:, :-1], weight, labels[:, 1:]) if shifted else (x, weight, labels))

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(loss, fullgraph=True)(x, weight, labels)
    eager = loss(x, weight, labels)
    torch.testing.assert_close(compiled, eager)
    for ours, theirs in zip(*(torch.autograd.grad(t, (x, weight)) for t in (compiled, eager)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(host_target(), reason="the host target's memory is not torch's")
def test_too_little_memory_is_an_error_of_its_own():
    """Batch-size finders catch this error. No machine has 2^58 bytes."""
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory.*liger_ext::softmax tried to allocate \d+ MiB"):
        F.softmax(torch.zeros(1).expand(2**50, 2**6))


def test_nodes_of_the_graph_have_names(device):
    x = normal(3, 8, device=device).requires_grad_()
    assert F.rms_norm(x).grad_fn.name() == "LigerRmsNormBackward"


def test_a_patched_llama_without_data():
    """The patch's ops also accept fake tensors: an exported graph equals the one that runs."""
    from cases import RecordCalls
    from llama_models import build, patched

    model = patched(build()).train()
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        warnings.simplefilter("ignore")
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(mode.from_tensor(parameter))
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        with RecordCalls() as record:
            model(input_ids=tokens, labels=tokens)
    assert {"rms_norm", "add_rms_norm", "rope", "glu", "fused_linear_cross_entropy"} <= set(record.names)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_trace_of_the_fused_loss(device):
    x, weight = normal(9, 16, device=device), normal(40, 16, device=device, seed=1)
    target = random_targets(9, 40, device=device)
    traced = torch.jit.trace(F.fused_linear_cross_entropy, (x, weight, target))
    assert torch.equal(traced(x + 1, weight, target), F.fused_linear_cross_entropy(x + 1, weight, target))
