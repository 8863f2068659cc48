"""Linear layers for the nodes of `liger_ext.models.training.nodes`: plain ones, bitsandbytes' with 4-bit weights, and
PEFT's with a LoRA adapter around one of these.

With LoRA (arXiv:2106.09685) a layer's result is ``x W^T + b + scaling * (x A^T) B^T``. The second product is added to
the first in place. So no further tensor of the result's size is allocated, or scaled, added or cast by separate
kernels, in forward or backward.

A 4-bit weight is decoded in the forward and again in the backward, each time for one matmul.

A layer always has the same number of parameters: weight, bias, A and B, and, for a 4-bit weight, its statistics
(absmax, absmax_code, absmax_scales, absmax_offset of `functional.dequantize_4bit`). All but the weight may be None. Its
constants are the scaling and, for a 4-bit weight, the number of its code, blocksize and absmax_blocksize.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from liger_ext.models.patching.calls import only_forward_runs
from liger_ext.models.patching.swap import is_plain_linear, is_plain_tensor
from liger_ext.ops.dequantize_4bit import CODES_4BIT

PARAMETERS, CONSTANTS, _STATISTICS = 8, 4, 4
_PEFTS = ("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")  # LoRA's layers
_BITSANDBYTES = "bitsandbytes.nn.modules", "Linear4bit"


class Parts(NamedTuple):
    """A layer's parameters and constants (see above)."""

    parameters: tuple[Tensor | None, ...]
    constants: tuple[float, ...]


def fused_parts(layer: nn.Module, x: Tensor) -> Parts | None:
    """Returns the parts of a linear layer, plain, with a 4-bit weight, or with LoRA, whose parameters have the dtype
    and device of `x` (under autocast, any dtype but float64). None for any other layer."""
    parts = _parts(layer, x)
    if parts is None:
        return None
    casts = torch.is_autocast_enabled(x.device.type)
    for index, t in enumerate(parts.parameters):
        if t is None:
            continue
        if not is_plain_tensor(t) or t.device != x.device:
            return None
        differs = torch.float64 in (x.dtype, t.dtype) if casts else t.dtype != x.dtype
        if differs and _is_cast(index, parts.constants):
            return None
    return parts


def _is_cast(index: int, constants: Sequence[float]) -> bool:
    """Returns whether a matmul reads this parameter in its dtype, so that autocast casts it."""
    return index < PARAMETERS - _STATISTICS and not (index == 0 and constants[2] > 0)


def matmul_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def flatten_parameters(x: Tensor, linears: Iterable[Parts]) -> tuple[torch.dtype, list[float], list[Tensor | None]]:
    """Returns the dtype of the matmuls, and the constants and the parameters of all layers, under autocast cast to its
    dtype."""
    constants = [constant for parts in linears for constant in parts.constants]
    parameters = [parameter for parts in linears for parameter in parts.parameters]
    dtype = matmul_dtype(x)
    if torch.is_autocast_enabled(x.device.type):
        for i, parameter in enumerate(parameters):
            if parameter is not None and _is_cast(i % PARAMETERS, linears[i // PARAMETERS].constants):
                parameters[i] = parameter.to(dtype)
    return dtype, constants, parameters


def _parts(layer: nn.Module, x: Tensor) -> Parts | None:
    """Returns a layer's parts; None if its call computes more."""
    if (type(layer).__module__, type(layer).__name__) not in _PEFTS:
        return _base_parts(layer, x)
    if not only_forward_runs(layer):
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1:
        return None
    base = _base_parts(layer.base_layer, x)
    if base is None:
        return None
    (name,) = active
    # DoRA and other variants; they are flags of the layer before PEFT 0.15.
    if name in getattr(layer, "lora_variant", ()) or getattr(layer, "use_dora", {}).get(name, False):
        return None
    a, b, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
    if not (is_plain_linear(a) and is_plain_linear(b) and a.bias is None and b.bias is None):
        return None
    if not (isinstance(scaling, (int, float)) and _does_nothing(layer.lora_dropout[name])):
        return None
    weight, bias, _, _, *statistics = base.parameters
    return Parts((weight, bias, a.weight, b.weight, *statistics), (float(scaling), *base.constants[1:]))


def _base_parts(layer: nn.Module, x: Tensor) -> Parts | None:
    """Returns the parts of a linear layer without an adapter; None if its call computes more."""
    if is_plain_linear(layer):
        return Parts((layer.weight, layer.bias, *(None,) * (PARAMETERS - 2)), (1.0, 0.0, 0.0, 0.0))
    if (type(layer).__module__, type(layer).__name__) != _BITSANDBYTES or not only_forward_runs(layer):
        return None
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state  # FSDP's gathered weight has none
    if state is None or getattr(state, "packing_format_for_cpu", False) or state.quant_type not in CODES_4BIT:
        return None
    if tuple(state.shape) != (layer.out_features, layer.in_features) or state.shape.numel() % 2:
        return None
    # The first call of a layer without a compute dtype sets it.
    computes_in = layer.compute_dtype if layer.compute_type_is_set or x.dtype == torch.float16 else x.dtype
    if (computes_in or x.dtype) != matmul_dtype(x) or (layer.bias is not None and layer.bias.requires_grad):
        return None
    statistics = [state.absmax, None, None, None]
    if state.nested:
        statistics[1:] = state.state2.code, state.state2.absmax, state.offset
    bias = None if layer.bias is None else layer.bias.to(matmul_dtype(x))
    constants = 1.0, CODES_4BIT[state.quant_type], state.blocksize, state.state2.blocksize if state.nested else 256
    return Parts((layer.weight.data, bias, None, None, *statistics), tuple(map(float, constants)))


def _does_nothing(dropout: nn.Module) -> bool:
    """Returns whether a call of `dropout` returns its argument."""
    idle = type(dropout) is nn.Dropout and (dropout.p == 0 or not dropout.training)
    return (idle or type(dropout) is nn.Identity) and only_forward_runs(dropout)


def by_layer(values: Sequence, per_layer: int = PARAMETERS) -> list[Sequence]:
    """Splits a sequence over the parameters (or constants) of all layers into one sequence for each layer."""
    return [values[i : i + per_layer] for i in range(0, len(values), per_layer)]


def each_layer(parameters: Sequence, constants: Sequence) -> Iterable[tuple[Sequence, Sequence]]:
    """Yields the parameters and the constants of each layer."""
    return zip(by_layer(parameters), by_layer(constants, CONSTANTS), strict=True)


def reads_input(needs: Sequence[bool]) -> bool:
    """Returns whether a gradient of a layer's parameters that `needs` requests depends on the layer's input."""
    weight, _, a, b, *_ = needs
    return weight or a or b


def _weight(
    parameters: Sequence[Tensor | None], constants: Sequence[float], columns: int, dtype: torch.dtype
) -> Tensor:
    """Returns a layer's weight. A 4-bit weight, of this number of columns, is decoded to `dtype`."""
    weight, (_, code, blocksize, absmax_blocksize) = parameters[0], constants
    if not blocksize:
        return weight
    packed = weight.reshape(-1).view(torch.uint8)
    absmax, absmax_code, absmax_scales, absmax_offset = parameters[-_STATISTICS:]
    offset = None if absmax_offset is None else absmax_offset.reshape(-1)
    statistics = absmax, absmax_code, absmax_scales, offset
    blocks = int(code), int(blocksize), int(absmax_blocksize)
    return _dequantize_4bit(packed, *statistics, 2 * packed.numel(), *blocks, dtype).view(-1, columns)


_dequantize_4bit = torch.ops.liger_ext.dequantize_4bit.default


def linear(x: Tensor, parameters: Sequence[Tensor | None], constants: Sequence[float]) -> Tensor:
    _, bias, a, b, *_ = parameters
    out = nn.functional.linear(x, _weight(parameters, constants, x.shape[-1], x.dtype), bias)
    if a is None:
        return out
    low, rows = _rows(x) @ a.t(), _rows(out)
    # Selective checkpoints store a matmul's result, and return it a second time: it must not be overwritten.
    add = Tensor.addmm_ if _get_current_dispatch_mode() is None else torch.addmm
    return add(rows, low, b.t(), alpha=constants[0]).view(out.shape)


def linears_backward(
    douts: Sequence[Tensor | None],
    y: Tensor | None,
    parameters: Sequence[Tensor | None],
    constants: Sequence[float],
    needs: Sequence[bool],
    like: Tensor | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Computes the gradients of linear layers with the same input y, [rows, columns]: of y, in the shape and dtype of
    `like` (None: not computed), and of the parameters that need one."""
    dy, gradients = None, []
    layers = zip(douts, each_layer(parameters, constants), by_layer(needs), strict=True)
    for dout, (layer, layer_constants), wanted in layers:
        _, _, a, b, *_ = layer
        scaling = layer_constants[0]
        need_weight, need_bias, need_a, need_b, *_ = wanted
        if dout is None:
            gradients += [None] * PARAMETERS
            continue
        d = _rows(dout)
        # In fp16 a product over all rows may overflow before it is scaled down, so one of its factors is scaled.
        dlow = d @ (b * scaling) if a is not None and (need_a or like is not None) else None
        gradients.append(d.t() @ y if need_weight else None)
        gradients.append(d.sum(0) if need_bias else None)
        gradients.append(dlow.t() @ y if need_a else None)
        gradients.append(d.t() @ ((y @ a.t()) * scaling) if need_b else None)
        gradients += [None] * _STATISTICS
        if like is not None:
            dy = _add_product(dy, d, _weight(layer, layer_constants, like.shape[-1], d.dtype), like.dtype)
            if dlow is not None:
                dy = _add_product(dy, dlow, a, like.dtype)
    return (None if dy is None else dy.view(like.shape)), gradients


def _add_product(total: Tensor | None, t: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `total + t @ factor`, in place; without a total, the product in `dtype`."""
    if total is None:
        return (t @ factor).to(dtype)
    return total.addmm_(t, factor) if total.dtype == t.dtype else total.add_(t @ factor)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])
