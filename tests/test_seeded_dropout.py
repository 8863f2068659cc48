"""LoRA's dropout with a seed: the bits of an independent Philox, in tiles of rows; statistics, derivatives, graphs,
errors."""

import math

import numpy as np
import pytest
import torch
from cases import device_dtypes, host_target, normal
from dropout_mask import KINDS, cases, mask, philox, scale
from torch._subclasses.fake_tensor import FakeTensorMode

seeded_dropout = torch.ops.liger_ext.seeded_dropout.default
add_ = torch.ops.liger_ext.seeded_dropout_add_.default
SEED = torch.tensor([2**40 + 17])


def one(x, seed, stream, *options):
    """The dropout with one mask."""
    return seeded_dropout(x, seed, stream, 1, *options)[0]


def add_one_(total, x, *options):
    add_(total, x[None], *options)


def test_philox_has_the_published_numbers():
    """The known answers that Salmon et al. publish with their library Random123."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    for numbers, expected in (
        ((0,) * 6, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ones,) * 6, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (pi, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ):
        assert tuple(map(int, philox(list(numbers[:4]), numbers[4:]))) == expected


def test_the_op_has_the_published_numbers(device):
    """The threshold p * 65536 of each of the eight numbers keeps it, and the next larger one drops it."""
    words = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
    x, seed = torch.ones(1, 8, device=device), torch.tensor([0], device=device)
    for column, number in enumerate(n for w in words for n in (w & 0xFFFF, w >> 16)):
        keeps, after = (bool(one(x, seed, 0, 0, n / 65536)[0, column]) for n in (number, number + 1))
        assert keeps and not after, column


def test_the_bits(device):
    kinds = KINDS + [(torch.float64, torch.float64)] * (torch.float64 in device_dtypes(device))
    for name, found, expected in cases(lambda t: t.to(device), kinds):
        assert torch.equal(found.cpu(), expected) and found.dtype == expected.dtype, name


def test_tiles_of_rows(device):
    """Tiles have the bits of the whole matrix, however its rows are divided."""
    x, seed = normal(100, 72, device=device), SEED.to(device)
    whole = one(x, seed, 3, 2**32 - 50, 0.5)
    for step in (1, 7, 64):
        tiles = [one(x[i : i + step], seed, 3, 2**32 - 50 + i, 0.5) for i in range(0, 100, step)]
        assert torch.equal(torch.cat(tiles), whole)
    expanded = one(x[:1].expand(100, 72), seed, 3, 2**32 - 50, 0.5)
    assert torch.equal(expanded, one(x[:1].repeat(100, 1), seed, 3, 2**32 - 50, 0.5))
    assert torch.equal(one(x.t().contiguous().t(), seed, 3, 2**32 - 50, 0.5), whole)


def correlation(a, b, p):
    """The correlation of two masks, in standard deviations of that of independent ones."""
    rate = 1 - p
    return abs(float(((a.double() - rate) * (b.double() - rate)).sum())) / (p * rate * math.sqrt(a.numel()))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_statistics(device, p):
    """Rates of the matrix, of each row and of each column, and correlations of masks, are within 5.5 standard
    deviations of those of independent numbers, which a normal variable exceeds with a probability of 4 * 10^-8."""
    rows, columns = 512, 1024
    x = torch.ones(rows, columns, device=device)

    def drawn(seed, stream, first_row=0):
        return one(x, torch.tensor([seed], device=device), stream, first_row, p).cpu() != 0

    first = drawn(1, 0)
    for dim in ((0, 1), 0, 1):
        count = first.numel() // first.sum(dim).numel()
        deviation = (first.double().mean(dim) - (1 - p)).abs().max()
        assert deviation <= 5.5 * math.sqrt(p * (1 - p) / count) + 2**-17, dim
    others = [drawn(2, 0), drawn(1 + 2**32, 0), drawn(1, 1), drawn(1, 0, rows), drawn(1, 0, 2**32)]
    others += [first.roll(n, dim) for n in (1, 2, 4, 8, 64) for dim in (0, 1)]
    assert max(correlation(first, other, p) for other in others) <= 5.5
    outputs = one(x, torch.tensor([1], device=device), 0, 0, p).double()
    assert abs(float(outputs.mean()) - 1) <= 5.5 * math.sqrt(p / (1 - p) / x.numel())
    assert set(outputs.unique().tolist()) == {0.0, float(np.float32(scale(p)))}


def test_no_and_full_dropout(device):
    x, seed = normal(9, 40, device=device), SEED.to(device)
    x[0, 0], x[1, 1] = math.nan, math.inf
    zeros = torch.zeros_like(x)
    torch.testing.assert_close(one(x, seed, 0, 0, 0.0), x, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(one(x, seed, 0, 0, 1.0), zeros)
    add_one_(zeros, x, seed, 0, 0, 1.0)
    assert not zeros.any()


def test_a_dropped_nan_is_zero(device):
    x, seed = torch.full((16, 64), math.nan, device=device), SEED.to(device)
    found = one(x, seed, 1, 5, 0.4).cpu()
    assert torch.equal(found.isnan(), mask(int(SEED), 1, 16, 64, 5, 0.4)) and not found.nan_to_num().any()


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_nothing(device, shape):
    x = torch.empty(shape, device=device)
    add_one_(x, x.clone(), SEED.to(device), 0, 0, 0.1)
    assert one(x, SEED.to(device), 0, 0, 0.1).shape == shape


@pytest.mark.skipif(host_target(), reason="GPU kernels do not take float64")
def test_derivatives_of_any_order():
    x, total = (normal(4, 12, dtype=torch.float64, seed=i).requires_grad_() for i in range(2))
    parts = normal(2, 4, 12, dtype=torch.float64, seed=2).requires_grad_()

    def dropped(x):
        return seeded_dropout(x, SEED, 0, 2, 0, 0.4)

    def added(total, x):
        add_(out := total * 1, x, SEED, 0, 0, 0.4)
        return out.sin()

    for f, leaves in ((dropped, (x,)), (added, (total, parts))):
        assert torch.autograd.gradcheck(f, leaves) and torch.autograd.gradgradcheck(f, leaves)


@pytest.mark.parametrize("dtypes", KINDS, ids=str)
def test_recorded_sums_have_the_same_bits(device, dtypes):
    total, x = (normal(*n, 33, 40, dtype=t, device=device) for n, t in zip(((), (3,)), dtypes, strict=True))
    add_(expected := total.clone(), x, SEED.to(device), 0, 0, 0.3)
    add_(found := total.clone(), x.requires_grad_(), SEED.to(device), 0, 0, 0.3)
    assert torch.equal(found, expected) and found.requires_grad


def test_who_has_saved_total_is_told(device):
    total = normal(3, 8, device=device).requires_grad_() * 1
    y = total.sin()
    with torch.no_grad():
        add_one_(total, normal(3, 8, device=device), SEED.to(device), 0, 0, 0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


GOOD = {"total": torch.zeros(4, 6), "x": torch.ones(2, 4, 6), "seed": SEED, "stream": 0, "first_row": 0, "p": 0.1}
BAD = [
    ("x", torch.ones(4), ["x has shape (4)", "rows, columns)"]),
    ("x", torch.ones(2, 4, 6, dtype=torch.int64), ["x has dtype torch.int64", "expected float32"]),
    ("seed", torch.tensor([1, 2]), ["seed has shape (2)", "one element"]),
    ("seed", torch.tensor([1], dtype=torch.int32), ["seed has dtype torch.int32", "torch.int64"]),
    ("seed", torch.tensor([1], device="meta"), ["seed is on another device than x"]),
    ("stream", -1, ["stream is -1", "0 or more"]),
    ("stream", 2**31, ["stream is 2147483648", "less than 2**31"]),
    ("stream", 2**31 - 1, ["count is 2", "streams below 2**31"]),
    ("count", 0, ["count is 0", "1 or more"]),
    ("x", torch.ones(0, 4, 6), ["count is 0"]),
    ("first_row", -3, ["first_row is -3", "0 or more"]),
    ("p", -0.1, ["p is -0.1", "from 0 to 1"]),
    ("p", 1.5, ["p is 1.5"]),
    ("p", math.nan, ["p is nan"]),
    ("total", torch.zeros(4, 7), ["total has shape (4, 7)", "(4, 6)"]),
    ("total", torch.zeros(4, 6, dtype=torch.float64), ["total has dtype torch.float64", "both or neither"]),
    ("total", torch.zeros(6, 4).t(), ["total has strides (1, 4)", "contiguous rows"]),
    ("total", torch.zeros(1, 6).expand(4, 6), ["total has strides (0, 1)"]),
    ("total", GOOD["x"][1], ["total shares memory with x"]),
]


@pytest.mark.parametrize(("name", "value", "parts"), BAD, ids=[f"{n}-{p[0]}" for n, _, p in BAD])
def test_an_error_names_the_argument(name, value, parts):
    arguments = GOOD | {"count": 2} | {name: value}

    def drop(total, x, seed, stream, first_row, p, count):
        seeded_dropout(x[0] if x.dim() == 3 and len(x) else x, seed, stream, count, first_row, p)

    def add(total, x, seed, stream, first_row, p, count):
        add_(total, x, seed, stream, first_row, p)

    of_add = name == "total" or (name == "x" and value.numel() == 0)
    for call in [add] if of_add else [drop] if name == "count" else [add, drop]:
        with pytest.raises(ValueError) as raised:
            call(**arguments)
        assert all(part in str(raised.value) for part in parts), str(raised.value)
        if "shares memory" not in parts[0] and "another device" not in parts[0]:  # fake tensors have no memory
            with FakeTensorMode() as mode, pytest.raises(ValueError, match="seeded_dropout"):
                call(**{n: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
    assert not GOOD["total"].any() and GOOD["x"].all()


def test_opcheck(device):
    x, total = (normal(5, 24, device=device, seed=i) for i in range(2))
    torch.library.opcheck(seeded_dropout, (x.clone().requires_grad_(), SEED.to(device), 1, 3, 2, 0.25))
    torch.library.opcheck(add_, (total, x.bfloat16().repeat(2, 1, 1), SEED.to(device), 1, 2, 0.25))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_compiles(device, requires_grad):
    def step(x, seed):
        y = seeded_dropout(x, seed, 0, 2, 0, 0.3)
        add_(total := x.float().sin(), y, seed, 1, 0, 0.3)
        return total

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (6, 10):
        x, seed = normal(rows, 24, device=device, dtype=torch.bfloat16), SEED.to(device) + rows
        leaves = [x.clone().requires_grad_(requires_grad) for _ in range(2)]
        outputs = [f(leaf, seed) for f, leaf in zip((compiled, step), leaves, strict=True)]
        assert torch.equal(*outputs)
        if requires_grad:
            gradients = [torch.autograd.grad(y.sum(), leaf)[0] for y, leaf in zip(outputs, leaves, strict=True)]
            assert torch.equal(*gradients)
