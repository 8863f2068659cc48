"""Replacements of transformers' functions that apply rotary embeddings: `functional.rope` with their signatures.

Families differ in the columns that form a pair, in the width of the cos and sin tables, and in the arguments of the
function. `liger_ext.models.recognise` has the table of known functions.
"""

import functools
import inspect
from collections.abc import Callable

import torch

from liger_ext import functional
from liger_ext.models.patching.calls import exports_onnx
from liger_ext.models.patching.forwards import stock_function
from liger_ext.models.recognise.known import find_rope


def known_rope(rope: Callable | None) -> Callable | None:
    """Returns our replacement of a function of transformers that applies rotary embeddings; None if it is not known."""
    rope = stock_function(rope)
    entry = find_rope(rope)
    return None if entry is None else rope_for(rope, **entry.options)


def rope_for(stock_rope: Callable, **options: object) -> Callable:
    """Returns `_build_rope(stock_rope, ...)`, cached until somebody edits the code of `stock_rope`."""
    return _build_rope(stock_rope, getattr(stock_rope, "__code__", None), **options)


@functools.cache
def _build_rope(
    stock_rope: Callable,
    code: object,
    layout: str = "halves",
    tables: str = "whole",
    heads: int = 2,
    columns: str = "first",
    turns: int = 1,
) -> Callable:
    """Returns `functional.rope` in this layout, with the arguments of `stock_rope`.

    Args:
        code: a part of the cache's key.
        tables: width of cos and sin: "whole", "half" of that, or whole tables of which only the "first half" is read.
        heads: index of the dimension of heads, if the tables are complex or have no such dimension.
        columns: the columns that are rotated if the tables are narrower than the heads, the "first" or the "last".
        turns: -1 rotates in the opposite direction.
    """

    def needs_stock_rope(*tables):
        """Returns whether `stock_rope` must run: the tables are learned, or the graph is for ONNX."""
        return (torch.is_grad_enabled() and any(t.requires_grad for t in tables)) or exports_onnx()

    def pair(q, k, cos, sin, unsqueeze_dim):
        """Returns q and k rotated. None if `stock_rope` must run, or for tables of another shape (vision towers)."""
        if cos.dim() != 3 or needs_stock_rope(cos, sin):
            return None
        if tables == "first half":
            cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
        sin = sin if turns == 1 else -sin
        return functional.rope(q, k, cos, sin, unsqueeze_dim, layout, tables != "whole")

    def rope(q, k, cos, sin, unsqueeze_dim=1):
        rotated = pair(q, k, cos, sin, unsqueeze_dim)
        return stock_rope(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim) if rotated is None else rotated

    def rope_at_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        return rope(q, k, cos, sin, unsqueeze_dim)

    def rope_single(x, cos, sin, unsqueeze_dim=1):
        rotated = pair(x, None, cos, sin, unsqueeze_dim)
        return stock_rope(x, cos, sin, unsqueeze_dim=unsqueeze_dim) if rotated is None else rotated[0]

    def rope_optional_k(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        rotated = rope(q, k, cos, sin, unsqueeze_dim)
        return rotated[0] if k is None and isinstance(rotated, tuple) else rotated

    def rope_last_columns(x, cos, sin, unsqueeze_dim=1):
        first = x.shape[-1] - cos.shape[-1] * (2 if tables == "half" else 1)
        rotated = pair(x[..., first:], None, cos, sin, unsqueeze_dim)
        if rotated is None:
            return stock_rope(x, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return torch.cat([x[..., :first], rotated[0]], dim=-1)

    def rope_by_sin(tensor, sin, cos):
        if needs_stock_rope(cos, sin):
            return stock_rope(tensor, sin, cos)
        return functional.rope(tensor, None, cos, sin, 2, layout, tables != "whole")[0]

    def rope_patches(q, k, cos, sin):
        """Rotates (patches, heads, head_dim), a batch of these, or (batch, heads, patches, head_dim)."""
        known = ((4, 2),) if heads == 1 else ((3, 2), (4, 2), (4, 3))
        if (q.dim(), cos.dim()) not in known or needs_stock_rope(cos, sin):
            return stock_rope(q, k, cos, sin)
        if q.dim() == 4:
            return functional.rope(q, k, cos, sin, heads, layout)
        return tuple(t[0] for t in functional.rope(q[None], k[None], cos, sin, 2, layout))

    def rope_behind_prefix(q, k, cos, sin, **kwargs):
        """Rotates the last tokens of (batch, heads, tokens, head_dim), the patches of an image; as many as the tables
        have rows."""
        prefix = q.shape[-2] - cos.shape[-2]
        if (q.dim(), cos.dim()) != (4, 2) or needs_stock_rope(cos, sin) or k.shape[-2] != q.shape[-2]:
            return stock_rope(q, k, cos, sin, **kwargs)
        rotated = functional.rope(q[..., prefix:, :], k[..., prefix:, :], cos, sin, 1, layout)
        return tuple(torch.cat([t[..., :prefix, :], r], dim=-2) for t, r in zip((q, k), rotated, strict=True))

    def rope_complex(xq, xk, freqs_cis):
        if freqs_cis.dim() != 3 or needs_stock_rope(freqs_cis):
            return stock_rope(xq, xk, freqs_cis)
        cos, sin = torch.view_as_real(freqs_cis).unbind(-1)
        return functional.rope(xq, xk, cos, sin, heads, layout, tables != "whole")

    arguments = inspect.signature(stock_rope).parameters
    if "freqs_cis" in arguments:
        return rope_complex
    if list(arguments) == ["tensor", "sin", "cos"]:
        return rope_by_sin
    if "kwargs" in arguments:
        return rope_behind_prefix
    if "unsqueeze_dim" not in arguments:
        return rope_patches
    if columns == "last":
        return rope_last_columns
    if "k" not in arguments:
        return rope_single
    if arguments["k"].default is None:
        return rope_optional_k
    return rope_at_positions if "position_ids" in arguments else rope
