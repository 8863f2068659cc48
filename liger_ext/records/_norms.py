"""Constants and functions that the records of all norms share: counts of roundings, sizes to time, and the scale of dx
(the magnitude of the intermediate values from which dx is computed)."""

from __future__ import annotations

from torch import Tensor

from liger_ext.records._record import Roundings, Size, Timed, sizes
from liger_ext.records._sizes import peak

# Squares and mean 3, reciprocal square root 4, products with x and weight 3. The root halves the relative error of its
# argument: of the first 3 roundings and of the sum, 1.5 and half a sum remain.
NORM = Roundings(9, 0.5)
# g and n with a norm's roundings, the mean of their product, the difference, the product with the norm's factor.
NORM_DX = Roundings(24, 2)
# n and its product with dy; then the sums over rows: of a thread, of its block, over partial rows; and the store.
NORM_SUMS = {"dweight": Roundings(16, 1), "dbias": Roundings(4)}

NORM_TIMED = Timed(
    sizes((32768, 512), (32768, 1024), (32768, 2048), (8192, 4096), (32768, 4096), (12288, 5120), (3072, 8192),
          (16384, 8192), (700, 16384), (8192, 16384), (2048, 65536)),
    sizes((2048, 576), (2048, 4096)),
)  # fmt: skip


def norm_example(tokens: int, hidden: int, vocab: int) -> Size:
    return Size(tokens, hidden)


def gradient_scale(n: Tensor, rstd: Tensor, dy: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    return rstd * peak(dy if weight is None else dy * (weight + offset)) * (1 + peak(n))
