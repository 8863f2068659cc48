"""What the records of the norms share."""

from __future__ import annotations

from torch import Tensor

from liger_ext.records._record import Roundings, Size, Timed, sizes
from liger_ext.records._sizes import peak

# Squares and mean 3, reciprocal square root 4 (half of what comes before it: 1.5 and half a sum), times x and weight 3.
NORM = Roundings(9, 0.5)
# g and n with a norm's roundings, their product's mean, the difference, times the norm's factor.
NORM_DX = Roundings(24, 2)
# Sums over rows: a thread's, its block's, the partial rows', the store's; before it n, and its product with dy.
NORM_SUMS = {"dweight": Roundings(16, 1), "dbias": Roundings(4)}

NORM_TIMED = Timed(
    sizes((32768, 512), (32768, 1024), (32768, 2048), (8192, 4096), (32768, 4096), (16384, 8192), (8192, 16384),
          (2048, 65536)),
    sizes((2048, 576), (2048, 4096)),
)  # fmt: skip


def norm_example(tokens: int, hidden: int, vocab: int) -> Size:
    return Size(tokens, hidden)


def gradient_scale(n: Tensor, rstd: Tensor, dy: Tensor, weight: Tensor | None, offset: float) -> Tensor:
    return rstd * peak(dy if weight is None else dy * (weight + offset)) * (1 + peak(n))
