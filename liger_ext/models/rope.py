"""The functions of transformers that apply rotary embeddings, as `functional.rope`: which are known, and what of them.

Families differ in which columns make a pair, in how wide their tables are, and in what their functions are given. A
function is known by a digest of its code (`liger_ext.models.known_code`).
"""

import functools
import inspect
from collections.abc import Callable

import torch

from liger_ext import functional

ROPES: dict[str, dict[str, object]] = {  # what `rope_for` makes of them
    "8d9f48cd1cdefb65": {},  # of Qwen3-Next and GPT-NeoX of 5.0 on, which rotate some columns
    "d055c181c7e77517": {},  # before
    "6fd74a28189c5427": {},  # Phi 3's, some columns as well
    "e4d7f85d1a75dc1a": {},
    "99b095a066854b3a": {},  # Nemotron's
    "e4c8bf8feebf5684": {},
    "2a216d9bcc535aa0": {},  # OLMo 2's, whose cos and sin are in fp32
    "d176ec0b3150922e": {},
    "0497d86610c268f0": {},  # ModernBERT's, in fp32
    "a505c418e0582291": {},  # HunYuan VL's, in fp32
    "b432a70cf8642b25": {},  # Gemma 4's, of one tensor
    "7ecf25a3cdcda69f": {},  # of Qwen2 VL's images, in fp32; the same in all supported versions
    "1754b40407312335": {"tables": "half"},  # GPT-OSS's
    "bbacdb35420c453a": {"tables": "half"},
    "e4af6079bf66ed50": {"layout": "interleaved", "tables": "half"},  # Llama 4's, of complex numbers, in fp32
    "481f1743b09ae6ea": {"layout": "interleaved", "tables": "half"},  # OpenAI Privacy Filter's
    "1b846ef7d94389bb": {"layout": "interleaved"},  # Cohere's, in fp32
    "09f382d4e9971dcd": {"layout": "interleaved"},
    "a29816cc5d6c69ab": {"layout": "interleaved"},  # BLT's
    "7c42f55a5750c3a4": {"layout": "interleaved"},
    "f6b1c4c071e68266": {"layout": "interleaved"},  # GLM 4V's, some columns
    "42ba0cb7d424af54": {"layout": "interleaved", "tables": "first half"},  # of 5.1
    "9069921165a81509": {"layout": "interleaved"},  # ERNIE 4.5 VL's, in fp32
    "8f39d23d147bef38": {"layout": "interleaved", "tables": "first half"},  # Helium's
    "d8411b8f3ff7667a": {"layout": "interleaved", "tables": "first half"},
    "5ee2659c0f9cfe5b": {"layout": "interleaved", "tables": "first half"},  # GLM's, some columns
    "603645c238f5df70": {"layout": "interleaved", "tables": "first half"},
    "5aeb18bc069a5668": {"layout": "interleaved", "tables": "first half"},  # ERNIE 4.5's, in fp32
    "1e4085d03e1b59c6": {"layout": "interleaved", "tables": "first half"},
    "b212a04cb3fffbad": {"layout": "interleaved_to_halves", "tables": "first half"},  # DeepSeek V3's
    "0295a4dd5e3e77a7": {"layout": "interleaved_to_halves"},
    "21c7d9d3911da5df": {"layout": "interleaved", "tables": "half", "heads": 1},  # DeepSeek V2's, as Llama 4's
    "f433ac4f9780f22e": {"layout": "interleaved", "tables": "half", "columns": "last"},  # DeepSeek V4's, in fp32
    "568b149ffabc38a0": {"layout": "interleaved", "tables": "half"},  # GPT-J's and CodeGen's, of one tensor
    "323f8b9254885398": {"layout": "interleaved_to_halves", "tables": "first half"},  # Mistral Large 4's, of one or two
    "c152c8fa986842c8": {},  # Qwen 4's, some columns, of one or two tensors
    "ff5f29c6d9b819ce": {},  # of MiniMax M3's images, some columns
    "9eee6b2064295801": {"layout": "interleaved"},  # of Inkling 2's images, in fp32
    "01ec114e7de30bb3": {"layout": "interleaved", "heads": 1},  # SAM 3's, in fp32
    "9ed3861a0e7f0698": {"layout": "interleaved", "heads": 1},  # EdgeTAM's of video, in fp32
    "8be203684a684070": {"layout": "interleaved", "tables": "first half"},  # PE Audio's
    "85b15f3d5b268488": {},  # DINOv3's, of the patches behind other tokens
    "83ff1be383fe9ad5": {"turns": -1},  # NanoChat's, which turns the other way
}


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

    def is_learned(*tables):
        return torch.is_grad_enabled() and any(t.requires_grad for t in tables)

    def pair(q, k, cos, sin, unsqueeze_dim):
        """None if the tables are of another shape, as of images' towers, or learned."""
        if cos.dim() != 3 or is_learned(cos, sin):
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
        if is_learned(cos, sin):
            return stock_rope(tensor, sin, cos)
        return functional.rope(tensor, None, cos, sin, 2, layout, tables != "whole")[0]

    def rope_of_patches(q, k, cos, sin):
        """Of (patches, heads, head_dim), or a batch of that, or (batch, heads, patches, head_dim)."""
        known = ((4, 2),) if heads == 1 else ((3, 2), (4, 2), (4, 3))
        if (q.dim(), cos.dim()) not in known or is_learned(cos, sin):
            return stock_rope(q, k, cos, sin)
        if q.dim() == 4:
            return functional.rope(q, k, cos, sin, heads, layout)
        return tuple(t[0] for t in functional.rope(q[None], k[None], cos, sin, 2, layout))

    def rope_behind_prefix(q, k, cos, sin, **kwargs):
        """Of the last of (batch, heads, tokens, head_dim), as many as the tables have rows: the patches of an image."""
        prefix = q.shape[-2] - cos.shape[-2]
        if (q.dim(), cos.dim()) != (4, 2) or is_learned(cos, sin) or k.shape[-2] != q.shape[-2]:
            return stock_rope(q, k, cos, sin, **kwargs)
        rotated = functional.rope(q[..., prefix:, :], k[..., prefix:, :], cos, sin, 1, layout)
        return tuple(torch.cat([t[..., :prefix, :], r], dim=-2) for t, r in zip((q, k), rotated, strict=True))

    def rope_of_angles(xq, xk, freqs_cis):
        if freqs_cis.dim() != 3 or is_learned(freqs_cis):
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
