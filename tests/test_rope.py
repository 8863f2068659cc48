"""Rotary position embedding, against a float64 reference (the accuracy rule of liger_ext/rule.py): any strides, tables
of cos and sin with and without a batch dimension, and partial rotation."""

import functools

import pytest
import torch
from cases import device_dtypes, normal, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_ext import functional as F
from liger_ext.ops._checks import ROPE_LAYOUTS
from liger_ext.testing import judge

LAYOUTS = tuple(ROPE_LAYOUTS)


def tables(batch, seq, rotary, dtype, device, seed=0, layout="contiguous"):
    angle = normal(batch, seq, rotary, device=device, seed=seed, scale=3)
    if layout == "transposed":
        angle = angle.transpose(0, 1).contiguous().transpose(0, 1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    if layout == "columns":  # the first columns of a wider table
        cos, sin = (torch.cat((t, t), -1)[..., :rotary] for t in (cos, sin))
    return {"cos": cos, "sin": sin}


def heads(batch, count, seq, dim, dtype, device, seed, layout):
    """[batch, heads, seq, dim] in the layouts that models use."""
    made = functools.partial(normal, dtype=dtype, device=device, seed=seed)
    if layout == "hf":  # a projection's output, viewed as heads
        return made(batch, seq, count, dim).transpose(1, 2)
    if layout == "packed":  # a slice of a fused q, k, v projection
        return made(batch, seq, count + 3, dim)[:, :, 2 : 2 + count].transpose(1, 2)
    if layout == "columns":
        return made(batch, count, seq, 2 * dim)[..., ::2]
    if layout == "expanded":
        return made(batch, 1, seq, dim).expand(batch, count, seq, dim)
    return made(batch, count, seq, dim)


layouts = st.sampled_from(["contiguous", "hf", "packed", "columns", "expanded"])


@settings(max_examples=100)
@given(data=st.data())
def test_rope(device, data):
    batch, seq = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9) | st.sampled_from([130]))
    dim = data.draw(st.sampled_from([2, 4, 6, 8, 10, 16, 20, 64, 80, 96, 128, 130, 256]))
    rotary = data.draw(st.sampled_from(sorted({dim, dim // 2 // 2 * 2 or 2, 2})))
    dtype, seed = data.draw(st.sampled_from(device_dtypes(device))), data.draw(seeds)
    q, k = (
        heads(batch, data.draw(st.integers(1, most)), seq, dim, dtype, device, seed + most, data.draw(layouts))
        for most in (5, 3)
    )
    of, table_dtype = data.draw(st.sampled_from([1, batch or 1])), data.draw(st.sampled_from(device_dtypes(device)))
    memory, half = data.draw(st.sampled_from(["contiguous", "transposed", "columns"])), data.draw(st.booleans())
    options = {"layout": data.draw(st.sampled_from(LAYOUTS)), "half_tables": half}
    table = tables(of, seq, rotary // 2 if half else rotary, table_dtype, device, seed + 2, memory)
    k = data.draw(st.sampled_from([k.requires_grad_(data.draw(st.booleans())), None]))
    judge("rope", {"q": q.requires_grad_(), "k": k, **table, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_shape(device, dtype):
    q = heads(2, 8, 40, 64, dtype, device, 0, "hf").requires_grad_()
    k = heads(2, 2, 40, 64, dtype, device, 1, "hf").requires_grad_()
    judge("rope", {"q": q, "k": k, **tables(1, 40, 64, torch.float32, device)})


def test_batch_seq_heads_layout(device):
    q, k = normal(2, 7, 4, 16, device=device), normal(2, 7, 2, 16, device=device, seed=1)
    table = tables(2, 7, 16, torch.float32, device)
    out = F.rope(q, k, **table, unsqueeze_dim=2)
    expected = F.rope(q.transpose(1, 2), k.transpose(1, 2), **table)
    for a, b in zip(out, expected, strict=True):
        assert torch.equal(a, b.transpose(1, 2))


def test_a_dense_layout_is_kept(device):
    """The outputs keep the layout of Hugging Face's transposed q and k: the next op needs no copy."""
    q = heads(2, 4, 6, 16, torch.float32, device, 0, "hf")
    k = heads(2, 2, 6, 16, torch.float32, device, 1, "contiguous")
    q_out, k_out = F.rope(q, k, **tables(1, 6, 16, torch.float32, device))
    assert q_out.stride() == q.stride() and k_out.stride() == k.stride()


def test_what_is_not_rotated_is_copied_exactly(device):
    q, k = (normal(2, count, 5, 24, dtype=torch.bfloat16, device=device) for count in (3, 1))
    q[0, 0, 0, 20] = float("nan")
    q_out, _ = F.rope(q, k, **tables(1, 5, 16, torch.bfloat16, device))
    torch.testing.assert_close(q_out[..., 16:], q[..., 16:], rtol=0, atol=0, equal_nan=True)
    assert q_out[..., :16].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_and_its_backward_are_inverse(device, layout):
    q, k = normal(1, 2, 5, 32, device=device).requires_grad_(), normal(1, 2, 5, 32, device=device)
    angle = normal(1, 5, 16, device=device)
    q_out, _ = F.rope(q, k, angle.cos(), angle.sin(), layout=layout, half_tables=True)
    (dq,) = torch.autograd.grad(q_out, q, q_out.detach())
    torch.testing.assert_close(dq, q.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_are_permutations_of_columns(device, dtype):
    """Bits equal those of the layout "halves", for other positions of the pairs and widths of the tables: with whole
    vectors, single elements, and partial rotation."""
    for dim, rotary in ((128, 128), (64, 32), (20, 12)):
        q, k = (normal(2, count, 5, dim, dtype=dtype, device=device, seed=count) for count in (3, 1))
        half = tables(1, 5, rotary // 2, dtype, device)
        whole = {name: torch.cat((t, t), -1) for name, t in half.items()}

        def woven(t, rotary=rotary):
            """Permutes columns from halves to interleaved."""
            mixed = torch.stack(t[..., :rotary].chunk(2, -1), -1).flatten(-2)
            return torch.cat((mixed, t[..., rotary:]), -1)

        def same(found, expected):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

        expected = F.rope(q, k, **whole)
        same(F.rope(q, k, **half, half_tables=True), expected)
        for tables_, wide in ((whole, False), (half, True)):
            options = {"layout": "interleaved_to_halves", "half_tables": wide}
            same(F.rope(woven(q), woven(k), **tables_, **options), expected)
            tables_ = tables_ if wide else {name: woven(t) for name, t in tables_.items()}
            options["layout"] = "interleaved"
            same(F.rope(woven(q), woven(k), **tables_, **options), map(woven, expected))


def test_one_tensor(device):
    q, k = normal(2, 7, 4, 16, device=device).requires_grad_(), normal(2, 7, 2, 16, device=device)
    table = tables(2, 7, 16, torch.float32, device)
    expected, _ = F.rope(q, k, **table, unsqueeze_dim=2)
    found, nothing = F.rope(q, None, **table, unsqueeze_dim=2)
    assert nothing is None and torch.equal(found, expected)
    dout = normal(*q.shape, device=device, seed=3)
    assert torch.equal(*(torch.autograd.grad(out, q, dout)[0] for out in (found, expected)))
