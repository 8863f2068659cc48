"""The functions of transformers that apply rotary embeddings, as `functional.rope`: which are known, and what of them.

Families differ in which columns make a pair, in how wide their tables are, and in what their functions are given. A
function is known by a digest of its code (`liger_ext.models.known_code`).
"""

import functools
import inspect
from collections.abc import Callable

import torch

from liger_ext import functional
from liger_ext.models.calls import exports_onnx
from liger_ext.models.forwards import code_of, written_function

ROPES: dict[str, dict[str, object]] = {  # what `rope_for` makes of them
    "1f557c15b1869342": {},  # Llama's, before 5.0
    "a02205e2c1e0b60a": {},  # 5.0 on
    "4f139855011a1147": {},  # of Qwen3-Next and GPT-NeoX of 5.0 on, which rotate some columns
    "c35f19dd055229f4": {},  # before
    "419f5cb3e6564a11": {},  # Phi 3's, some columns as well
    "7f5c54e23b5a6891": {},
    "3a2ff4d3f5272951": {},  # Nemotron's
    "c449c3300f0043a6": {},
    "6a8b1487318136ec": {},  # OLMo 2's, whose cos and sin are in fp32
    "bcb3ffcf6faffac4": {},
    "81871c62ddd8bef4": {},  # ModernBERT's, in fp32
    "2b17da2e87085737": {},  # HunYuan VL's, in fp32
    "a305c241915156b1": {},  # Gemma 4's, of one tensor
    "edbbfcbe07dd34eb": {},  # of Qwen2 VL's images, in fp32; the same in all supported versions
    "6e07f43b4112ab15": {"tables": "half"},  # GPT-OSS's
    "9b86255152995539": {"tables": "half"},
    "4f65806f19c5b68d": {"layout": "interleaved", "tables": "half"},  # Llama 4's, of complex numbers, in fp32
    "520229fc5d0caba6": {"layout": "interleaved", "tables": "half"},  # OpenAI Privacy Filter's
    "bed8287c9781b4cb": {"layout": "interleaved"},  # Cohere's, in fp32
    "759da264179366d5": {"layout": "interleaved"},
    "89c9e73f8b376c9f": {"layout": "interleaved"},  # BLT's
    "26616013a0ccaa46": {"layout": "interleaved"},
    "d008cb189e436336": {"layout": "interleaved"},  # GLM 4V's, some columns
    "29cdb1638f4ccc1f": {"layout": "interleaved", "tables": "first half"},  # of 5.1
    "fd1834452e3f6204": {"layout": "interleaved"},  # ERNIE 4.5 VL's, in fp32
    "c2a8f30610a30d67": {"layout": "interleaved", "tables": "first half"},  # Helium's
    "fccd740c614c2c59": {"layout": "interleaved", "tables": "first half"},
    "25d595e06d249d2d": {"layout": "interleaved", "tables": "first half"},  # GLM's, some columns
    "814046954c2da224": {"layout": "interleaved", "tables": "first half"},
    "183ea5b2c834a8dc": {"layout": "interleaved", "tables": "first half"},  # ERNIE 4.5's, in fp32
    "97f7a3e36f9c7a32": {"layout": "interleaved", "tables": "first half"},
    "19d3d5714f87d5de": {"layout": "interleaved_to_halves", "tables": "first half"},  # DeepSeek V3's
    "2ae1d4904d83a3e5": {"layout": "interleaved_to_halves"},
    "422c16bc00a17551": {"layout": "interleaved", "tables": "half", "heads": 1},  # DeepSeek V2's, as Llama 4's
    "97c18ff2d9d24092": {"layout": "interleaved", "tables": "half", "columns": "last"},  # DeepSeek V4's, in fp32
    "a52d7df81229ec22": {"layout": "interleaved", "tables": "half"},  # GPT-J's and CodeGen's, of one tensor
    "b3941047b52c52eb": {"layout": "interleaved_to_halves", "tables": "first half"},  # Mistral Large 4's, of one or two
    "0861a73d5f21056f": {},  # Qwen 4's, some columns, of one or two tensors
    "53824b0f10a9b18f": {},  # of MiniMax M3's images, some columns
    "2271985c9ee9dd63": {"layout": "interleaved"},  # of Inkling 2's images, in fp32
    "efc6b8494c762f0b": {"layout": "interleaved", "heads": 1},  # SAM 3's, in fp32
    "c3e6ece845e538a6": {"layout": "interleaved", "heads": 1},  # EdgeTAM's of video, in fp32
    "82f4d93ce8538e1f": {"layout": "interleaved", "tables": "first half"},  # PE Audio's
    "80efb0ff05326854": {},  # DINOv3's, of the patches behind other tokens
    "5ed17c96df72aa62": {"turns": -1},  # NanoChat's, which turns the other way
}


def known_rope(rope: Callable | None) -> Callable | None:
    """Returns our replacement of a function of transformers that applies rotary embeddings; None if it is not known."""
    rope = written_function(rope)
    how = ROPES.get(code_of(rope))
    return None if how is None else rope_for(rope, **how)


@functools.cache
def rope_for(
    stock_rope: Callable,
    layout: str = "halves",
    tables: str = "whole",
    heads: int = 2,
    columns: str = "first",
    turns: int = 1,
) -> Callable:
    """`functional.rope` in this layout, with the arguments of `stock_rope`.

    Args:
        tables: "whole", "half" of that width, or whole ones of which the "first half" is read.
        heads: their dimension, where tables are of complex numbers or have none for heads.
        columns: which are rotated if the tables are narrower than the heads, the "first" or the "last".
        turns: -1 turns the other way.
    """

    def is_stocks(*tables):
        """Whether the tables are learned, or the graph is for ONNX."""
        return (torch.is_grad_enabled() and any(t.requires_grad for t in tables)) or exports_onnx()

    def pair(q, k, cos, sin, unsqueeze_dim):
        """None if `stock_rope` is to run, or the tables are of another shape, as of images' towers."""
        if cos.dim() != 3 or is_stocks(cos, sin):
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

    def rope_of_one(x, cos, sin, unsqueeze_dim=1):
        rotated = pair(x, None, cos, sin, unsqueeze_dim)
        return stock_rope(x, cos, sin, unsqueeze_dim=unsqueeze_dim) if rotated is None else rotated[0]

    def rope_of_one_or_two(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
        rotated = rope(q, k, cos, sin, unsqueeze_dim)
        return rotated[0] if k is None and isinstance(rotated, tuple) else rotated

    def rope_of_last(x, cos, sin, unsqueeze_dim=1):
        first = x.shape[-1] - cos.shape[-1] * (2 if tables == "half" else 1)
        rotated = pair(x[..., first:], None, cos, sin, unsqueeze_dim)
        if rotated is None:
            return stock_rope(x, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return torch.cat([x[..., :first], rotated[0]], dim=-1)

    def rope_by_sin(tensor, sin, cos):
        if is_stocks(cos, sin):
            return stock_rope(tensor, sin, cos)
        return functional.rope(tensor, None, cos, sin, 2, layout, tables != "whole")[0]

    def rope_of_patches(q, k, cos, sin):
        """Of (patches, heads, head_dim), or a batch of that, or (batch, heads, patches, head_dim)."""
        known = ((4, 2),) if heads == 1 else ((3, 2), (4, 2), (4, 3))
        if (q.dim(), cos.dim()) not in known or is_stocks(cos, sin):
            return stock_rope(q, k, cos, sin)
        if q.dim() == 4:
            return functional.rope(q, k, cos, sin, heads, layout)
        return tuple(t[0] for t in functional.rope(q[None], k[None], cos, sin, 2, layout))

    def rope_behind_prefix(q, k, cos, sin, **kwargs):
        """Of the last of (batch, heads, tokens, head_dim), as many as the tables have rows: the patches of an image."""
        prefix = q.shape[-2] - cos.shape[-2]
        if (q.dim(), cos.dim()) != (4, 2) or is_stocks(cos, sin) or k.shape[-2] != q.shape[-2]:
            return stock_rope(q, k, cos, sin, **kwargs)
        rotated = functional.rope(q[..., prefix:, :], k[..., prefix:, :], cos, sin, 1, layout)
        return tuple(torch.cat([t[..., :prefix, :], r], dim=-2) for t, r in zip((q, k), rotated, strict=True))

    def rope_of_angles(xq, xk, freqs_cis):
        if freqs_cis.dim() != 3 or is_stocks(freqs_cis):
            return stock_rope(xq, xk, freqs_cis)
        cos, sin = torch.view_as_real(freqs_cis).unbind(-1)
        return functional.rope(xq, xk, cos, sin, heads, layout, tables != "whole")

    arguments = inspect.signature(stock_rope).parameters
    if "freqs_cis" in arguments:
        return rope_of_angles
    if list(arguments) == ["tensor", "sin", "cos"]:
        return rope_by_sin
    if "kwargs" in arguments:
        return rope_behind_prefix
    if "unsqueeze_dim" not in arguments:
        return rope_of_patches
    if columns == "last":
        return rope_of_last
    if "k" not in arguments:
        return rope_of_one
    if arguments["k"].default is None:
        return rope_of_one_or_two
    return rope_at_positions if "position_ids" in arguments else rope
