"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_ext import _C
from liger_ext.ops._checks import check_integer, check_tensors, shape_text
from liger_ext.ops._register import register

__all__ = ["liger_rope", "liger_rotary_pos_emb", "rope"]

_rope_backward = torch.ops.liger_ext.rope_backward.default


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary position embedding of queries and keys, in the half-split layout of GPT-NeoX and Hugging Face
    (Su et al., 2021, arXiv:2104.09864).

    With ``R = cos.shape[-1]`` the first R columns of a head are rotated, the others copied (partial rotary embedding)::

        out[i]         = x[i]         * cos[i]         - x[i + R / 2] * sin[i]              for i < R / 2
        out[i + R / 2] = x[i + R / 2] * cos[i + R / 2] + x[i]         * sin[i + R / 2]

    The arithmetic is in float32 (float64 for float64) whatever the dtypes, with one rounding at the end.

    Args:
        q, k: ``(batch, heads, seq, head_dim)``, in any strides; the number of heads may differ. One dtype: float32,
            bfloat16 or float16 (float64 on the CPU).
        cos, sin: ``(1 or batch, seq, R)`` or ``(seq, R)``, R even and at most head_dim, of any of these dtypes.
            Constants: they must not require a gradient.
        unsqueeze_dim: 1, or 2 where q and k are ``(batch, seq, heads, head_dim)``.

    Returns:
        ``(q', k')`` with the shapes and dtypes of q and k, and their strides where these leave no gaps and head_dim is
        contiguous; contiguous otherwise.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or another ``unsqueeze_dim``.
        RuntimeError: cos or sin requires a gradient.
    """
    check_tensors("rope", q=q, k=k, cos=cos, sin=sin)
    check_integer("rope", unsqueeze_dim=unsqueeze_dim)
    cos = cos.unsqueeze(0) if cos.dim() == 2 else cos
    sin = sin.unsqueeze(0) if sin.dim() == 2 else sin
    if unsqueeze_dim == 1:
        return _rope(q, k, cos, sin)
    if unsqueeze_dim != 2:
        raise ValueError(
            f"rope: unsqueeze_dim is {unsqueeze_dim}, expected 1 for (batch, heads, seq, head_dim) "
            "or 2 for (batch, seq, heads, head_dim)"
        )
    for name, t in (("q", q), ("k", k)):
        if t.dim() != 4:
            raise ValueError(f"rope: {name} has shape {shape_text(t)}, expected (batch, seq, heads, head_dim)")
    q_out, k_out = _rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """:func:`liger_ext.functional.rope`.

    ``position_ids`` has no effect: cos and sin are those of the positions already, as in Hugging Face.
    """
    return rope(q, k, cos, sin, unsqueeze_dim)


liger_rope = liger_rotary_pos_emb


def _fake(q, k, cos, sin):
    return tuple(
        t.new_empty_strided(t.shape, t.stride()) if _C.rope_keeps_strides(t) else t.new_empty(t.shape) for t in (q, k)
    )


def _setup_context(ctx, inputs, output):
    if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
        raise RuntimeError("liger_ext::rope has no gradient for cos and sin: pass cos.detach() and sin.detach()")
    ctx.save_for_backward(*inputs[2:])


def _backward(ctx, saved, dq, dk):
    dq, dk = _rope_backward(dq, dk, *saved)
    need_dq, need_dk = ctx.needs_input_grad[:2]
    return dq if need_dq else None, dk if need_dk else None, None, None


_rope = register("rope", fake=_fake, fake_backward=_fake, setup_context=_setup_context, backward=_backward)
