"""Decoding of bitsandbytes' 4-bit weights: the public function, and the op's fake implementation. The op has no
derivative, since the weights are constants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from liger_ext.ops._checks import check_constants, check_integer, check_tensors, mode_code
from liger_ext.ops._register import register_without_derivative

__all__ = ["dequantize_4bit"]

_OP = "dequantize_4bit"
CODES_4BIT = {"nf4": 0, "fp4": 1}


def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    shape: Sequence[int],
    *,
    quant_type: str = "nf4",
    blocksize: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    absmax_code: Tensor | None = None,
    absmax_scales: Tensor | None = None,
    absmax_offset: Tensor | None = None,
    absmax_blocksize: int = 256,
) -> Tensor:
    """Decodes a weight that bitsandbytes has quantised to 4 bits (Dettmers et al., QLoRA, arXiv:2305.14314).

    Value ``i`` is ``code[nibble i] * scale[i // blocksize]``, computed in float32 and rounded once to ``dtype``. The
    scales are ``absmax``, or, for compressed statistics ("double quantisation"),
    ``absmax_code[absmax[b]] * absmax_scales[b // absmax_blocksize] + absmax_offset`` with product and sum rounded
    separately. The result has the same bits on every device, and equals that of bitsandbytes 0.50 on a GPU. (On CPUs
    bitsandbytes rounds float16 ties away from zero, and with AVX-512 uses wrong scales for rows that are not whole
    blocks.)

    With a ``Params4bit`` or its ``quant_state`` ``s``: ``absmax=s.absmax``, ``shape=s.shape``,
    ``quant_type=s.quant_type``, ``blocksize=s.blocksize``; if ``s.nested``, ``absmax_code=s.state2.code``,
    ``absmax_scales=s.state2.absmax``, ``absmax_offset=s.offset``, ``absmax_blocksize=s.state2.blocksize``.

    Args:
        packed: the packed values, two per byte, the first in the upper half: a contiguous tensor of any dtype
            (bitsandbytes' ``quant_storage``) and shape, of ``(n + 1) // 2`` bytes for ``n`` values.
        absmax: ``(blocks,)``, with ``blocks = ceil(n / blocksize)``, float32; uint8 for compressed statistics.
        shape: of the weight.
        quant_type: the code, "nf4" or "fp4".
        blocksize: the number of values that share a scale, a power of two from 32 to 4096.
        dtype: of the result: float32, bfloat16 or float16.
        absmax_code: ``(256,)``, float32: compressed statistics. None: ``absmax`` has the scales.
        absmax_scales: ``(ceil(blocks / absmax_blocksize),)``, float32; requires absmax_code.
        absmax_offset: one float32 value; requires absmax_code.
        absmax_blocksize: the number of scales that share a value of absmax_scales, a power of two up to 4096.

    Returns:
        The weight with this shape and dtype, contiguous. It has no gradient.

    Raises:
        TypeError: an argument of another type.
        ValueError: a size, dtype, device or option that does not fit, or a tensor that requires a gradient.
    """
    statistics = {"absmax_code": absmax_code, "absmax_scales": absmax_scales, "absmax_offset": absmax_offset}
    statistics = {"absmax": absmax} | {name: t for name, t in statistics.items() if t is not None}
    check_tensors(_OP, packed=packed, **statistics)
    check_constants(_OP, packed=packed, **statistics)
    check_integer(_OP, blocksize=blocksize, absmax_blocksize=absmax_blocksize)
    code = mode_code(_OP, "quant_type", quant_type, CODES_4BIT)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_OP}: dtype is {dtype!r}, expected a torch.dtype")
    try:
        numel = math.prod(shape)
        fits = all(size >= 0 for size in shape) and type(numel) is not float
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(f"{_OP}: shape is {shape!r}, expected a sequence of sizes")
    if not packed.is_contiguous():
        raise ValueError(f"{_OP}: packed has strides {packed.stride()}, expected a contiguous tensor")
    if (found := packed.numel() * packed.itemsize) != (numel + 1) // 2:
        raise ValueError(f"{_OP}: packed has {found} bytes, expected {(numel + 1) // 2} for shape {tuple(shape)}")
    weight = torch.ops.liger_ext.dequantize_4bit(
        packed.view(torch.uint8) if packed.dim() else packed.view(1).view(torch.uint8),
        absmax,
        absmax_code,
        absmax_scales,
        absmax_offset,
        numel,
        code,
        blocksize,
        absmax_blocksize,
        dtype,
    )
    return weight.view(torch.Size(shape))


def _fake(packed, numel, dtype):
    return packed.new_empty(numel, dtype=dtype)


register_without_derivative("dequantize_4bit", _fake)
register_without_derivative("dequantize_4bit_to_", lambda: None)
