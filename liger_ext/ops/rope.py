"""Rotary position embedding of queries and keys: functions, fake implementation and autograd formula."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import ROPE_LAYOUTS, check_integer, check_tensors, mode_code, shape_text
from liger_ext.ops._register import register

__all__ = [
    "liger_rope",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
    "rope",
]

_rope_backward = torch.ops.liger_ext.rope_backward.default


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    layout: str = "halves",
    half_tables: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Applies the rotary position embedding to queries and keys (Su et al., 2021, arXiv:2104.09864).

    The first R columns of a head are R / 2 pairs and are rotated; the other columns are copied (partial rotary
    embedding). In the layout ``"halves"`` of GPT-NeoX and of most models of Hugging Face, pair p is in columns p and
    p + R / 2::

        out[p]         = x[p]         * cos[p]         - x[p + R / 2] * sin[p]              for p < R / 2
        out[p + R / 2] = x[p + R / 2] * cos[p + R / 2] + x[p]         * sin[p + R / 2]

    In ``"interleaved"`` (GPT-J, GLM, Cohere) pair p is in columns 2p and 2p + 1 of x, of the result and of the tables.
    In ``"interleaved_to_halves"`` (DeepSeek V3) it is in these columns of x, and in columns p and p + R / 2 of the
    result and of the tables.

    The arithmetic is in float32 (float64 for float64), whatever the dtypes, with one rounding at the end.

    Args:
        q, k: ``(batch, heads, seq, head_dim)``, in any strides; the number of heads may differ. One dtype: float32,
            bfloat16 or float16 (float64 on the CPU). k may be None.
        cos, sin: ``(1 or batch, seq, R)`` or ``(seq, R)``, R even and at most head_dim, both of one of these dtypes.
            Constants: they must not require a gradient.
        unsqueeze_dim: 1, or 2 where q and k are ``(batch, seq, heads, head_dim)``.
        layout: ``"halves"``, ``"interleaved"`` or ``"interleaved_to_halves"``.
        half_tables: cos and sin have R / 2 columns; column p is for both elements of pair p, in any layout.

    Returns:
        ``(q', k')`` with the shapes and dtypes of q and k. They have the strides of q and k if these leave no gaps and
        head_dim is contiguous; otherwise they are contiguous. k' is None if k is None.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, another ``unsqueeze_dim`` or ``layout``, or cos
            or sin that requires a gradient.
    """
    check_tensors("rope", q=q, k=q if k is None else k, cos=cos, sin=sin)
    check_integer("rope", unsqueeze_dim=unsqueeze_dim)
    code = mode_code("rope", "layout", layout, ROPE_LAYOUTS)
    cos = cos.unsqueeze(0) if cos.dim() == 2 else cos
    sin = sin.unsqueeze(0) if sin.dim() == 2 else sin
    if unsqueeze_dim == 1:
        rotated = _rope(q, k, cos, sin, code, half_tables)
        return rotated if k is not None else (rotated[0], None)
    if unsqueeze_dim != 2:
        raise ValueError(
            f"rope: unsqueeze_dim is {unsqueeze_dim}, expected 1 for (batch, heads, seq, head_dim) "
            "or 2 for (batch, seq, heads, head_dim)"
        )
    for name, t in (("q", q), ("k", k)):
        if t is not None and t.dim() != 4:
            raise ValueError(f"rope: {name} has shape {shape_text(t)}, expected (batch, seq, heads, head_dim)")
    q_out, k_out = _rope(q.transpose(1, 2), None if k is None else k.transpose(1, 2), cos, sin, code, half_tables)
    return q_out.transpose(1, 2), None if k is None else k_out.transpose(1, 2)


def liger_rotary_pos_emb(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Calls :func:`liger_ext.functional.rope`.

    Args:
        position_ids: without effect: cos and sin are already those of the positions, as in Hugging Face.
        rotary_dim: the number of rotated elements of a head: the number of columns of cos and sin, or twice this number
            for ``half_tables``. None: the number of columns.

    Raises:
        ValueError: another ``rotary_dim``.
    """
    columns = cos.shape[-1]
    if rotary_dim not in (None, columns, 2 * columns):
        raise ValueError(f"rope: rotary_dim is {rotary_dim}, expected the columns of cos, {columns}, or twice as many")
    return rope(q, k, cos, sin, unsqueeze_dim, half_tables=rotary_dim == 2 * columns)


def liger_rotary_pos_emb_gpt_oss(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Calls :func:`liger_ext.functional.rope` with ``half_tables`` for GPT-OSS, which rotates whole heads."""
    return rope(q, k, cos, sin, half_tables=True)


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Calls :func:`liger_ext.functional.rope` for images in Qwen-VL: q and k are ``(seq, heads, head_dim)``, cos and
    sin ``(seq, head_dim)``."""
    q, k = rope(q.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=2)
    return q.squeeze(0), k.squeeze(0)


liger_rope = liger_rotary_pos_emb


def _fake(q, k):
    return _output_like(q), q.new_empty(0) if k is None else _output_like(k)


def _fake_backward(dq, dk):
    return _fake(dq, dk)


def _output_like(t):
    return t.new_empty_strided(t.shape, t.stride()) if _C.rope_keeps_strides(t) else t.new_empty(t.shape)


def _setup_context(ctx, k, cos, sin, layout, half_tables, k_out):
    ctx.has_k, ctx.options = k is not None, (layout, half_tables)
    if not ctx.has_k:
        ctx.mark_non_differentiable(k_out)
    ctx.save_for_backward(cos, sin)


def _backward(ctx, saved, dq_out, dk_out):
    dq, dk = _rope_backward(dq_out, dk_out if ctx.has_k else None, *saved, *ctx.options)
    need_dq, need_dk = ctx.needs_input_grad[:2]
    return {"q": dq if need_dq else None, "k": dk if need_dk else None}


_rope = register(
    "rope",
    fake=_fake,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
    differentiable=2,
)
