"""The matmuls of linear layers that read the same input, with their LoRA adapters: forward and backward.

With LoRA (arXiv:2106.09685) a layer's result is ``x W^T + b + scaling * (dropout(x) A^T) B^T``. Its second product has
few columns inside (the rank), so its time is that of reading and writing the tensors around it. Therefore

- the matrices A of all adapters of an input are one matmul, and so are their gradients and their part of dX;
- the scaling is applied to ``x A^T`` and to ``dY B``, in the matmul that computes them. In fp16 a product over all rows
  may overflow before it is scaled down, and B would be rounded a second time;
- where the result is much wider than the input, ``[x | x A^T] [W | B]^T`` is one matmul (`_pays`); elsewhere the second
  product is added to the first in place. The backward does the same with ``[dY | dY B] [W; A]``.

Dropout draws a mask for each adapter from the node's seed (`seeded_dropout`): the backward computes the mask again, and
tiles of the rows draw their parts of it. Adapters with the same rate share the passes over their input and its
gradient. A 4-bit weight is decoded in the forward and again in the backward, each time for one matmul.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from liger_ext.ops._checks import accumulator

_dequantize_4bit = torch.ops.liger_ext.dequantize_4bit.default
_dequantize_4bit_to_ = torch.ops.liger_ext.dequantize_4bit_to_.default
_seeded_dropout = torch.ops.liger_ext.seeded_dropout.default
_seeded_dropout_add_ = torch.ops.liger_ext.seeded_dropout_add_.default

# How many parameters (weight, bias, the statistics of a 4-bit weight) and constants a layer has, and an adapter.
LAYER_PARAMETERS, LAYER_CONSTANTS, ADAPTER_PARAMETERS, ADAPTER_CONSTANTS = 6, 4, 3, 2


class Adapter(NamedTuple):
    """``scaling * (dropout(x) A^T + bias) B^T``."""

    a: Tensor  # [rank, columns of x]
    b: Tensor  # [columns of the result, rank]
    bias: Tensor | None
    scaling: float
    dropout: float  # the rate
    dtype: torch.dtype  # of the parameters, and so of their gradients
    at: int  # the index of `a` among the node's parameters; `b` and `bias` follow
    stream: int  # the adapter's number in the node, for its masks


class Layer(NamedTuple):
    weight: Tensor | None
    bias: Tensor | None
    statistics: Sequence[Tensor | None]  # absmax, absmax_code, absmax_scales, absmax_offset of `dequantize_4bit`
    blocks: list[int]  # its code, blocksize (0, -1: the weight is not packed) and absmax_blocksize
    adapters: list[Adapter]
    at: int  # the index of `weight` among the node's parameters

    @property
    def packs(self) -> bool:
        return self.blocks[1] > 0

    def width(self, columns: int) -> int:
        """Returns the number of columns of the result, for an input with this number of columns."""
        weight = self.weight
        return 2 * weight.numel() * weight.element_size() // columns if self.packs else weight.shape[0]

    def total_bias(self) -> Tensor | None:
        """Returns the layer's bias, with those of its adapters, which were scaled."""
        biases = [a.scaling * a.bias.to(accumulator(a.bias.dtype)) for a in self.adapters if a.bias is not None]
        return sum(biases, 0 if self.bias is None else self.bias).to(self.adapters[0].b.dtype) if biases else self.bias

    def decoded(self, columns: int, dtype: torch.dtype) -> Tensor:
        """Returns the weight. A packed weight, of this number of columns, or torchao's is decoded to `dtype`."""
        if self.blocks[1] < 0:
            return self.weight.dequantize().to(dtype)
        if not self.packs:
            return self.weight
        packed = self.weight.view(torch.uint8)
        return _dequantize_4bit(packed, *self.statistics, 2 * packed.numel(), *self.blocks, dtype).view(-1, columns)

    def joined(self, matrices: list[Tensor], columns: int, dim: int, at: int) -> Tensor:
        """Returns these matrices side by side (dim=1) or one below the other (dim=0), with the weight inserted as
        number `at`. A packed weight, of this number of columns, is decoded into the result."""
        if not self.packs:
            return torch.cat([*matrices[:at], self.decoded(columns, matrices[0].dtype), *matrices[at:]], dim)
        shape = [self.width(columns), columns]
        sizes = [m.shape[dim] for m in matrices]
        sizes.insert(at, shape[dim])
        shape[dim] = sum(sizes)
        joined = matrices[0].new_empty(shape)
        (*parts,) = joined.split_with_sizes(sizes, dim)
        _dequantize_4bit_to_(parts.pop(at), self.weight.view(torch.uint8), *self.statistics, *self.blocks)
        for part, matrix in zip(parts, matrices, strict=True):
            part.copy_(matrix)
        return joined


def unpack(
    dtype: torch.dtype, constants: Sequence[float], parameters: Sequence[Tensor | None], factors: Tensor | None = None
) -> tuple[list[Layer], Tensor | None, Tensor | None]:
    """Returns a node's layers, the seed of its dropout, and its factors, from the lists of `linear.flatten`.

    The factors are the matrices of all adapters, cast to `dtype`, in one tensor; None if they have this dtype. A
    backward passes those of the forward."""
    layers, found, at, number = [], [], 0, 0
    while at < len(parameters) - 1:
        *blocks, count = map(int, constants[number : number + LAYER_CONSTANTS])
        weight, bias, *statistics = parameters[at : at + LAYER_PARAMETERS]
        layers.append(Layer(weight, bias, statistics, blocks, [], at))
        at, number = at + LAYER_PARAMETERS, number + LAYER_CONSTANTS
        for _ in range(count):
            found.append((layers[-1].adapters, at, number))
            at, number = at + ADAPTER_PARAMETERS, number + ADAPTER_CONSTANTS
    matrices = [parameters[at + factor] for _, at, _ in found for factor in (0, 1)]
    casts, factors = _cast(matrices, dtype, factors)
    for stream, (adapters, at, number) in enumerate(found):
        a, _, bias = parameters[at : at + ADAPTER_PARAMETERS]
        scaling, rate = constants[number : number + ADAPTER_CONSTANTS]
        adapters.append(Adapter(casts[2 * stream], casts[2 * stream + 1], bias, scaling, rate, a.dtype, at, stream))
    return layers, parameters[-1], factors


def _cast(matrices: list[Tensor], dtype: torch.dtype, factors: Tensor | None) -> tuple[Sequence[Tensor], Tensor | None]:
    """Returns matrices in `dtype`, and the tensor that contains them if they were cast, all by one kernel."""
    if all(matrix.dtype == dtype for matrix in matrices):
        return matrices, None
    is_new = factors is None
    if is_new:
        factors = matrices[0].new_empty(sum(matrix.numel() for matrix in matrices), dtype=dtype)
    casts = torch._C._nn.unflatten_dense_tensors(factors, matrices)
    if is_new:
        torch._foreach_copy_(casts, matrices)
    return casts, factors


class Dropout(NamedTuple):
    """The masks of the adapters' dropout for some rows."""

    seed: Tensor | None
    first_row: int = 0  # the number of the first row in the node's input

    def __call__(self, x: Tensor, adapters: Iterable[Adapter]) -> list[Tensor]:
        """Returns the dropout of x for each adapter."""
        found: list[Tensor] = []
        for first, *rest in _runs(adapters):
            count = 1 + len(rest)
            if first.dropout:
                found += _seeded_dropout(x, self.seed, first.stream, count, self.first_row, first.dropout)
            else:
                found += [x] * count
        return found

    def add_products_(
        self, total: Tensor | None, low: dict, adapters: Iterable[Adapter], dtype: torch.dtype
    ) -> Tensor | None:
        """Adds the dropouts of ``low[stream] @ a`` of the adapters to `total`; None: to zeros in `dtype`."""
        for run in _runs(adapters):
            first, rows = run[0], low[run[0].stream].shape[0]
            parts = first.a.new_empty(len(run), rows, first.a.shape[1])
            for part, adapter in zip(parts, run, strict=True):
                torch.mm(low[adapter.stream], adapter.a, out=part)
            total = parts.new_zeros(parts.shape[1:], dtype=dtype) if total is None else total
            _seeded_dropout_add_(total, parts, self.seed, first.stream, self.first_row, first.dropout)
        return total


def _runs(adapters: Iterable[Adapter]) -> Iterable[list[Adapter]]:
    """Divides adapters into runs with the same rate of dropout and successive streams."""
    numbered = enumerate(adapters)
    for _, run in itertools.groupby(numbered, lambda entry: (entry[1].dropout, entry[1].stream - entry[0])):
        yield [adapter for _, adapter in run]


def linears(x: Tensor, layers: Sequence[Layer], dropout: Dropout) -> tuple[list[Tensor], Tensor | None]:
    """Computes linear layers of the input x, [..., columns].

    Returns their results, and the low-rank products of all adapters (`low_products`).
    """
    y = rows(x)
    low = low_products(y, layers, dropout)
    parts = _by_layer(low, layers)
    joint = [i for i, layer in enumerate(layers) if _pays(layer, *y.shape, layer.width(y.shape[1]))][:2]
    # Two such layers (gate and up) read one copy of the input, between their low-rank products.
    left, right = (joint[0] if len(joint) == 2 else None), (joint[-1] if joint else None)
    before = parts[left] if left is not None else []
    extended = torch.cat([*before, y, *parts[right]], 1) if joint else None
    outs = []
    for i, (layer, low_parts) in enumerate(zip(layers, parts, strict=True)):
        factors, bias = [adapter.b for adapter in layer.adapters], layer.total_bias()
        columns = y.shape[1] + sum(part.shape[1] for part in low_parts)
        if i == right:
            out = nn.functional.linear(extended[:, -columns:], layer.joined(factors, y.shape[1], 1, 0), bias)
        elif i == left:
            out = nn.functional.linear(extended[:, :columns], layer.joined(factors, y.shape[1], 1, len(factors)), bias)
        else:
            out = nn.functional.linear(y, layer.decoded(y.shape[1], y.dtype), bias)
            for part, factor in zip(low_parts, factors, strict=True):
                out = _addmm(out, part, factor.t())
        outs.append(out.view(*x.shape[:-1], out.shape[1]))
    return outs, low


def add_adapters(base: Tensor, x: Tensor, layer: Layer, dropout: Dropout) -> tuple[Tensor, Tensor]:
    """Adds the adapters' products with the input x, [..., columns], to the result of the base layer's own call. Returns
    the sum in new memory, since that result may be a view, or saved; and `low_products`."""
    low = low_products(rows(x), [layer], dropout)
    bias, factor = layer.total_bias(), _joined([a.b for a in layer.adapters], 1).t()
    total = rows(base) if bias is None else rows(base) + bias
    total = torch.addmm(total, low, factor) if total.dtype == low.dtype else total + low @ factor
    return total.to(base.dtype).view(base.shape), low


def _pays(layer: Layer, count: int, narrow: int, wide: int) -> bool:
    """Returns whether one matmul should compute the product of a layer and those of its adapters, for `count` rows.

    The input, of `narrow` columns, and the weight, unless it is decoded, are then copied. Separate products would read
    and write the result, of `wide` columns. Matmuls read rows of a multiple of 16 bytes.
    """
    is_aligned = all(adapter.a.shape[0] % 8 == 0 for adapter in layer.adapters)
    least = narrow // 2 if layer.packs else 2 * narrow
    return bool(layer.adapters) and is_aligned and wide >= 2 * narrow and count >= least


def low_products(y: Tensor, layers: Sequence[Layer], dropout: Dropout) -> Tensor | None:
    """Returns ``scaling * dropout(y) A^T`` of all adapters, side by side: [rows, sum of ranks]. None: no adapters."""
    adapters = _adapters(layers)
    if not adapters:
        return None
    if len({a.scaling for a in adapters}) == 1 and not any(a.dropout for a in adapters):
        return _scaled(y, _joined([a.a for a in adapters]).t(), adapters[0].scaling)
    dropped = zip(dropout(y, adapters), adapters, strict=True)
    return _joined([_scaled(t, a.a.t(), a.scaling) for t, a in dropped], 1)


def low_gradients(douts: Sequence[Tensor | None], layers: Sequence[Layer], needs: Sequence[bool], need_x: bool) -> dict:
    """Returns ``scaling * dout B`` of the adapters that need it for the gradient of A or of the input, by their
    stream."""
    return {
        adapter.stream: _scaled(dout, adapter.b, adapter.scaling)
        for dout, layer in zip(douts, layers, strict=True)
        for adapter in layer.adapters
        if dout is not None and (need_x or needs[adapter.at])
    }


def input_gradient(
    douts: Sequence[Tensor | None],
    low: dict,
    layers: Sequence[Layer],
    dropout: Dropout,
    columns: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Returns the gradient of the layers' input, [rows, columns], in `dtype`; None without a gradient of a result. A
    layer without a weight has only its adapters' part."""
    total, rest = None, []
    for dout, layer in zip(douts, layers, strict=True):
        if dout is None:
            continue
        plain = [a for a in layer.adapters if not a.dropout]
        if layer.weight is None:
            rest += plain
        elif total is None and len(plain) == len(layer.adapters) and _pays(layer, *dout.shape, columns):
            wide = torch.cat([dout, *(low[a.stream] for a in plain)], 1)
            total = (wide @ layer.joined([a.a for a in plain], columns, 0, 0)).to(dtype)
        else:
            total = _add_product(total, dout, layer.decoded(columns, dout.dtype), dtype)
            rest += plain
    if rest:
        total = _add_product(total, _joined([low[a.stream] for a in rest], 1), _joined([a.a for a in rest]), dtype)
    dropping = [a for a in _adapters(layers) if a.dropout and a.stream in low]
    return dropout.add_products_(total, low, dropping, dtype)


def parameter_gradients(
    gradients: list[Tensor | None],
    douts: Sequence[Tensor | None],
    low: dict,
    y: Tensor | None,
    low_y: Tensor | None,
    layers: Sequence[Layer],
    needs: Sequence[bool],
    dropout: Dropout,
) -> None:
    """Stores the gradients of the layers' parameters that need one in `gradients`, by their numbers in the node.

    `low` is from `low_gradients`. `y`, the layers' input, may be None where `reads_input` returns False. `low_y` is
    `low_products(y)`; None: not saved.
    """
    if low_y is None and any(needs[a.at + 1] for a in _adapters(layers)):
        low_y = low_products(y, layers, dropout)
    for dout, layer, parts in zip(douts, layers, _by_layer(low_y, layers), strict=True):
        if dout is None:
            continue
        gradients[layer.at] = dout.t() @ y if needs[layer.at] else None
        gradients[layer.at + 1] = dout.sum(0) if needs[layer.at + 1] else None
        for adapter, part in zip(layer.adapters, parts or layer.adapters, strict=True):
            if needs[adapter.at + 1]:
                gradients[adapter.at + 1] = _product(dout.t(), part, adapter)
            if needs[adapter.at + 2]:
                gradients[adapter.at + 2] = dout.sum(0, dtype=adapter.dtype) * adapter.scaling
    trained = [a for a in _adapters(layers) if needs[a.at] and a.stream in low]
    plain = [a for a in trained if not a.dropout]
    if plain:
        joined = _product(_joined([low[a.stream] for a in plain], 1).t(), y, plain[0])
        for adapter, part in zip(plain, joined.split_with_sizes([a.a.shape[0] for a in plain]), strict=True):
            gradients[adapter.at] = part
    dropping = [a for a in trained if a.dropout]
    for adapter, dropped in zip(dropping, dropout(y, dropping), strict=True):
        gradients[adapter.at] = _product(low[adapter.stream].t(), dropped, adapter)


def reads_input(layers: Sequence[Layer], needs: Sequence[bool], has_low: bool) -> bool:
    """Returns whether a gradient of the layers' parameters depends on their input. `has_low`: `low_products` of it are
    saved."""
    numbers = [layer.at for layer in layers] + [a.at for a in _adapters(layers)]
    numbers += [] if has_low else [a.at + 1 for a in _adapters(layers)]
    return any(needs[number] for number in numbers)


def rows(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1, t.shape[-1])


def _adapters(layers: Iterable[Layer]) -> list[Adapter]:
    return [adapter for layer in layers for adapter in layer.adapters]


def _by_layer(low: Tensor | None, layers: Sequence[Layer]) -> list[list[Tensor]]:
    """Splits the low-rank products of all adapters by layer and adapter."""
    parts = iter(() if low is None else low.split_with_sizes([a.a.shape[0] for a in _adapters(layers)], 1))
    return [[part for _, part in zip(layer.adapters, parts, strict=False)] for layer in layers]


def _joined(tensors: list[Tensor], dim: int = 0) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _scaled(t: Tensor, factor: Tensor, scaling: float) -> Tensor:
    """Returns ``scaling * (t @ factor)``, rounded once."""
    if scaling == 1:
        return t @ factor
    return _addmm(
        t.new_empty(t.shape[0], factor.shape[1]), t, factor, beta=0, alpha=scaling
    )  # does not read the result


def _addmm(total: Tensor, t: Tensor, factor: Tensor, **factors: float) -> Tensor:
    """Returns `total + t @ factor`, in place. Selective checkpoints store a matmul's result, and return it again, so
    with them it is not overwritten."""
    return (Tensor.addmm_ if _get_current_dispatch_mode() is None else torch.addmm)(total, t, factor, **factors)


def _product(t: Tensor, factor: Tensor, adapter: Adapter) -> Tensor:
    """Returns ``t @ factor``, the gradient of a parameter of `adapter`, rounded once to the parameter's dtype."""
    if adapter.dtype == t.dtype:
        return t @ factor
    if type(t) is Tensor and t.is_cuda and adapter.dtype == torch.float32 and torch.version.hip is None:
        return torch.mm(t, factor, out_dtype=torch.float32)
    return t.to(adapter.dtype) @ factor.to(adapter.dtype)


def _add_product(total: Tensor | None, t: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `total + t @ factor`, in place; without a total, the product in `dtype`."""
    if total is None:
        return (t @ factor).to(dtype)
    return total.addmm_(t, factor) if total.dtype == t.dtype else total.add_(t @ factor)
