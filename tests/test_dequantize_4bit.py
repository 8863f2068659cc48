"""Decoding of 4-bit weights: the bits of bitsandbytes' dequantize_4bit, in every format, and errors."""

import itertools

import pytest
import torch
from bitsandbytes import functional as bnb
from cases import normal
from four_bit import DTYPES, cases

from liger_ext import functional as F

STORAGES = (torch.uint8, torch.bfloat16, torch.float32)
# Whole vectors, the odd sizes with half a byte at the end, blocks that cross rows, less than a block, several blocks of
# compressed statistics.
SHAPES = ((64, 96), (33, 47), (5, 37), (1, 7), (130, 640), (3, 7, 8))


def quantized(shape, **options):
    """A packed weight, and the arguments with which `dequantize_4bit` decodes it."""
    weight = normal(*shape, dtype=torch.float32)
    weight[..., 0] = 0
    packed, state = bnb.quantize_4bit(weight, **options)
    arguments = {"absmax": state.absmax, "shape": state.shape}
    arguments |= {"quant_type": state.quant_type, "blocksize": state.blocksize}
    if state.nested:
        second = state.state2
        arguments |= {"absmax_code": second.code, "absmax_scales": second.absmax, "absmax_offset": state.offset}
        arguments |= {"absmax_blocksize": second.blocksize}
    return packed, state, arguments


def placed(device, packed, arguments):
    return packed.to(device), {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}


def expected(packed, state, dtype):
    """The weight as bitsandbytes decodes it. It decodes one long row in fp32, because on CPUs bitsandbytes 0.50 uses
    wrong scales for several rows that are not whole blocks, and rounds fp16 ties away from zero."""
    absmax = state.absmax
    if state.nested:
        absmax = bnb.dequantize_blockwise(absmax, state.state2) + state.offset
    options = state.blocksize, state.quant_type, [state.shape.numel()], torch.float32
    return torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, *options).view(state.shape).to(dtype)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_bits_of_bitsandbytes(device, quant_type, nested):
    for shape, blocksize, storage in itertools.product(SHAPES, (32, 64, 256, 4096), STORAGES):
        if torch.Size(shape).numel() % (2 * storage.itemsize) and storage.itemsize > 1:
            continue
        options = {"quant_type": quant_type, "compress_statistics": nested, "quant_storage": storage}
        packed, state, arguments = quantized(shape, blocksize=blocksize, **options)
        there, arguments = placed(device, packed, arguments)
        for dtype in DTYPES:
            found = F.dequantize_4bit(there, dtype=dtype, **arguments)
            assert found.dtype == dtype and found.shape == torch.Size(shape)
            assert torch.equal(found.cpu(), expected(packed, state, dtype)), (shape, blocksize, storage, dtype)


def test_sizes_and_addresses(device):
    for name, found, expected in cases(lambda t: t.to(device)):
        assert torch.equal(found.cpu(), expected), name


def test_every_code_and_scale(device):
    """Each code times scales over the whole range of fp32, 0, infinities and NaN among them."""
    scales = torch.tensor([1e-45, 1e-38, 6e-8, 0.1, 1.0, 3e38, 0.0, -2.5, float("inf"), float("nan")])
    packed = torch.arange(16, dtype=torch.uint8)
    packed = (packed * 16 + packed.flip(0)).repeat(2 * len(scales))
    for quant_type, dtype in itertools.product(("nf4", "fp4"), DTYPES):
        absmax, shape = scales, (len(scales), 64)
        found = F.dequantize_4bit(packed.to(device), absmax.to(device), shape, quant_type=quant_type, dtype=dtype)
        codes = bnb.get_4bit_type(quant_type, device="cpu")
        nibbles = torch.stack((packed >> 4, packed & 15), -1).view(shape).long()
        torch.testing.assert_close(
            found.cpu(), (codes[nibbles] * absmax[:, None]).to(dtype), rtol=0, atol=0, equal_nan=True
        )


def call(**changed):
    packed, _, arguments = quantized((64, 96), quant_type="nf4")
    arguments = {"packed": packed, **arguments, "dtype": torch.float32, **changed}
    return F.dequantize_4bit(**arguments)


BAD = [
    ({"packed": torch.zeros(3071, 1, dtype=torch.uint8)}, ["packed has 3071 bytes", "3072"]),
    ({"packed": torch.zeros(3072, 2, dtype=torch.uint8)[:, :1]}, ["packed has strides (2, 1)", "contiguous"]),
    ({"packed": [1]}, ["packed must be a Tensor"]),
    ({"absmax": torch.zeros(95)}, ["absmax has shape (95)", "(96)"]),
    ({"absmax": torch.zeros(96, dtype=torch.bfloat16)}, ["absmax has dtype torch.bfloat16", "torch.float32"]),
    ({"absmax": torch.zeros(96, device="meta")}, ["absmax is on another device than packed"]),
    ({"shape": (64, 97)}, ["packed has 3072 bytes", "3104"]),
    ({"shape": (64, -1)}, ["shape is (64, -1)", "a sequence of sizes"]),
    ({"shape": 4096}, ["shape is 4096"]),
    ({"shape": (64.0, 96.0)}, ["shape is (64.0, 96.0)"]),
    ({"shape": (2**40, 2**40)}, ["packed has 3072 bytes"]),
    ({"blocksize": 64.0}, ["blocksize is 64.0"]),
    ({"dtype": "float32"}, ["dtype is 'float32'"]),
    ({"absmax_offset": 0.5}, ["absmax_offset must be a Tensor"]),
    ({"blocksize": 48}, ["blocksize is 48", "power of two from 32 to 4096"]),
    ({"blocksize": 128}, ["absmax has shape (96)", "(48)"]),
    ({"quant_type": "int4"}, ["quant_type is 'int4'", "'nf4' or 'fp4'"]),
    ({"dtype": torch.float64}, ["dtype is torch.float64", "float32, bfloat16 or float16"]),
    ({"absmax_code": torch.zeros(256)}, ["absmax_code, absmax_scales and absmax_offset"]),
]


@pytest.mark.parametrize(("changed", "parts"), BAD, ids=[next(iter(changed)) for changed, _ in BAD])
def test_an_error_names_the_argument(changed, parts):
    with pytest.raises((ValueError, TypeError)) as raised:
        call(**changed)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def test_errors_of_compressed_statistics():
    _, _, arguments = quantized((64, 96), compress_statistics=True)
    for name, wrong in (("absmax_code", 255), ("absmax_scales", 2), ("absmax_offset", 2)):
        with pytest.raises(ValueError, match=rf"{name} has shape \({wrong}\)"):
            call(**{**arguments, "quant_type": "nf4", name: torch.zeros(wrong)})
    with pytest.raises(ValueError, match=r"absmax has dtype torch\.float32, expected torch\.uint8"):
        call(**{**arguments, "absmax": torch.zeros(96)})


def test_opcheck(device):
    packed, arguments = placed(device, *quantized((8, 96), compress_statistics=True)[::2])
    op = torch.ops.liger_ext.dequantize_4bit.default
    rest = [arguments[name] for name in ("absmax", "absmax_code", "absmax_scales")]
    torch.library.opcheck(
        op, (packed.view(-1), *rest, arguments["absmax_offset"].view(1), 768, 0, 64, 256, torch.bfloat16)
    )


def test_decoding_to_a_matrix_checks_it(device):
    packed, arguments = placed(device, *quantized((8, 96))[::2])
    op, bf16 = torch.ops.liger_ext.dequantize_4bit_to_.default, torch.bfloat16
    rest = packed, arguments["absmax"], None, None, None, 1, 64, 256
    scratch = torch.zeros(8, 128, dtype=bf16, device=device)
    torch.library.opcheck(op, (scratch[:, :96], *rest))
    for out, message in (
        (scratch.view(-1)[:768], r"out has shape \(768\), expected \(rows, columns\)"),
        (scratch[:, :95], r"packed has shape \(384, 1\), expected \(380\)"),
        (scratch[:, :96].double(), "dtype is torch.float64"),
        (scratch.view(-1).as_strided((8, 96), (90, 1)), r"out has strides \(90, 1\)"),
        (scratch.view(-1).as_strided((8, 96), (1, 8)), r"out has strides \(1, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            op(out, *rest)


def test_compiles(device):
    packed, arguments = placed(device, *quantized((8, 96), compress_statistics=True)[::2])
    decode = torch.compile(
        lambda packed: 2 * F.dequantize_4bit(packed, **arguments), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(decode(packed), 2 * F.dequantize_4bit(packed, **arguments))
