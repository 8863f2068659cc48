"""The mask of `seeded_dropout`, computed independently of it by NumPy, and calls of the op for the tests on a CPU, on
the host target and in an emulator."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

KINDS = [(t, t) for t in (torch.float32, torch.bfloat16, torch.float16)]
KINDS += [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-7 (Salmon et al., 2011): four words of 32 bits, in uint64."""
    words, low32 = [np.asarray(c, dtype=np.uint64) for c in counter], np.uint64(0xFFFFFFFF)
    for i in range(7):
        keys = [np.uint64((k + i * w) % 2**32) for k, w in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)]
        a, b = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (b >> np.uint64(32)) ^ words[1] ^ keys[0],
            b & low32,
            (a >> np.uint64(32)) ^ words[3] ^ keys[1],
            a & low32,
        ]
    return words


def threshold(p: float) -> int:
    return int(p * 65536 + 0.5)


def scale(p: float) -> float:
    """The factor of the elements that dropout with rate ``p`` keeps; 0 if it keeps none."""
    return 65536 / (65536 - threshold(p)) if threshold(p) < 65536 else 0.0


def mask(seed: int, stream: int, rows: int, columns: int, first_row: int, p: float) -> Tensor:
    """Returns a bool tensor ``(rows, columns)``: True where ``seeded_dropout`` keeps the element."""
    groups = -(-columns // 8)
    row = (np.arange(rows, dtype=np.uint64) + np.uint64(first_row))[:, None].repeat(groups, 1)
    group = np.arange(groups, dtype=np.uint64)[None].repeat(rows, 0)
    seed %= 2**64
    counter = [group, row & np.uint64(0xFFFFFFFF), row >> np.uint64(32), np.full_like(row, stream)]
    words = np.stack(philox(counter, (seed % 2**32, seed >> 32)), -1)
    numbers = np.stack((words & np.uint64(0xFFFF), words >> np.uint64(16)), -1).reshape(rows, 8 * groups)
    return torch.from_numpy(numbers[:, :columns] >= threshold(p))


def dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """The dropout of ``x`` with its mask, in fp32, or float64 for float64."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.where(keep, x * scale(p), torch.zeros_like(x))


def cases(place: Callable[[Tensor], Tensor] = lambda t: t, kinds=KINDS) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name of a call, its result, and the expected one, for both ops. Shapes have whole vectors, odd and few
    columns, several tiles of columns, and rows with gaps, also at odd addresses, with one to three masks."""
    ops, generator = torch.ops.liger_ext, torch.Generator().manual_seed(0)
    for number, (rows, columns, gap, first) in enumerate(
        ((5, 64, 0, 0), (3, 37, 0, 0), (9, 3, 0, 0), (2, 9000, 0, 0), (4, 136, 8, 8), (4, 80, 5, 1), (1, 1, 0, 0))
    ):
        for total_dtype, dtype in kinds:
            count = 1 + number % 3
            odd = (-1, 2**31 - count, 2**33 + 5, 0.3)
            seed, stream, first_row, p = odd if number % 2 else (12345, 2, 7, 0.05)
            keeps = [mask(seed, stream + i, rows, columns, first_row, p) for i in range(count)]
            view, wide = slice(first, first + columns), torch.randn(count, rows, columns + gap, generator=generator)
            total = torch.randn(rows, columns + gap, generator=generator).to(total_dtype)
            parts = wide.to(dtype)[..., view]
            there, placed, seeds = place(wide.to(dtype)), place(total.clone()), place(torch.tensor([seed]))
            name = f"{count} of {rows} x {columns}, gap {gap} at {first}, {dtype}, total {total_dtype}"
            found = ops.seeded_dropout(there[0][:, view], seeds, stream, count, first_row, p)
            yield name, found, torch.stack([dropped(parts[0], keep, p) for keep in keeps]).to(dtype)
            ops.seeded_dropout_add_(placed[:, view], there[..., view], seeds, stream, first_row, p)
            added = total[:, view].to(torch.promote_types(total_dtype, torch.float32))
            for x, keep in zip(parts, keeps, strict=True):
                added = added + dropped(x, keep, p)
            total[:, view] = added.to(total_dtype)
            yield f"add, {name}", placed, total
