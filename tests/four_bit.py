"""Calls of `dequantize_4bit`, for the tests on a CPU, on the host target and in an emulator, with PyTorch's result."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from liger_ext import functional as F

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The codes of bitsandbytes 0.50, bitsandbytes/functional.py, get_4bit_type.
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3]) / 12


def decode(packed: Tensor, absmax: Tensor, numel: int, blocksize: int, compressed: dict[str, Tensor]) -> Tensor:
    """Decodes fp4 values by PyTorch's ops, in fp32."""
    scales = absmax
    if compressed:
        second = compressed["absmax_scales"].repeat_interleave(compressed["absmax_blocksize"])[: len(absmax)]
        scales = compressed["absmax_code"][absmax.long()] * second + compressed["absmax_offset"]
    nibbles = torch.stack((packed >> 4, packed & 15), -1).flatten()[:numel].long()
    return FP4[nibbles] * scales.repeat_interleave(blocksize)[:numel]


def _into_rows(found: Tensor, expected: Tensor, rows: int, first: int, gap: int, arguments: tuple):
    """Decodes to a matrix of these rows, between other columns that stay as they are. Returns all columns, twice."""
    packed, absmax, options = arguments
    cols = len(expected) // rows
    whole = expected.new_full((rows, cols + gap), 7)
    mine = found.new_full(whole.shape, 7)
    whole[:, first : first + cols] = expected.view(rows, cols)
    statistics = [options.get(f"absmax_{name}") for name in ("code", "scales", "offset")]
    blocks = 1, options["blocksize"], options.get("absmax_blocksize", 256)  # fp4
    torch.ops.liger_ext.dequantize_4bit_to_(mine[:, first : first + cols], packed, absmax, *statistics, *blocks)
    return mine, whole


def cases(place: Callable[[Tensor], Tensor] = lambda t: t) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name of a call, its result, and PyTorch's. The sizes have whole and cut vectors, a half byte at the
    end, cut blocks, and one value; packed values that begin at an odd address are read one by one."""
    generator = torch.Generator().manual_seed(0)
    for numel, blocksize, first in (
        (4096, 64, 0),
        (2048, 64, 1),
        (3001, 32, 0),
        (66, 64, 0),
        (1, 64, 0),
        (20480, 4096, 0),
    ):
        for dtype in DTYPES:
            packed = torch.randint(256, (first + (numel + 1) // 2,), dtype=torch.uint8, generator=generator)
            blocks = -(-numel // blocksize)
            for compressed in (False, True):
                absmax = torch.randn(blocks, generator=generator)
                rest = {}
                if compressed:
                    absmax = torch.randint(256, (blocks,), dtype=torch.uint8, generator=generator)
                    rest = {"absmax_code": torch.randn(256, generator=generator), "absmax_offset": torch.tensor([0.3])}
                    rest |= {
                        "absmax_scales": torch.randn(-(-blocks // 16), generator=generator),
                        "absmax_blocksize": 16,
                    }
                expected = decode(packed[first:], absmax, numel, blocksize, rest).to(dtype)
                tensors = {name: place(t) if isinstance(t, Tensor) else t for name, t in rest.items()}
                options = {"quant_type": "fp4", "blocksize": blocksize, "dtype": dtype, **tensors}
                arguments = place(packed)[first:], place(absmax), options
                found = F.dequantize_4bit(*arguments[:2], (numel,), **options)
                name = f"{numel} values, blocks of {blocksize}, {dtype}, compressed {compressed}"
                yield name, found, expected
                for rows, column, gap in ((32, 0, 0), (32, 8, 16), (3, 1, 5), (11, 0, 8)):
                    if numel % rows == 0:
                        yield f"{name}, {rows} rows", *_into_rows(found, expected, rows, column, gap, arguments)
