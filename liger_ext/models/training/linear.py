"""Linear layers for the nodes of `liger_ext.models.training.nodes`: plain ones, and PEFT's with a LoRA adapter.

With LoRA (arXiv:2106.09685) a layer's result is ``x W^T + b + scaling * (x A^T) B^T``. The second product is added to
the first in place. So no further tensor of the result's size is allocated, or scaled, added or cast by separate
kernels, in forward or backward.

A layer always has four parameters: weight, bias, A and B. The last three may be None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from liger_ext.models.patching.calls import only_forward_runs
from liger_ext.models.patching.swap import is_plain_linear, is_plain_tensor

PARAMETERS = 4
_PEFTS = "peft.tuners.lora.layer"  # the module of LoRA's layers

Parts = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float]  # a layer's parameters, and its scaling


def fused_parts(layer: nn.Module, x: Tensor) -> Parts | None:
    """Returns the parameters and the scaling of a linear layer, plain or with LoRA, of the dtype and device of `x`
    (under autocast, of any dtype but float64). None for any other layer. The scaling is the adapter's, or 1."""
    parts = _parts(layer)
    if parts is None:
        return None
    casts = torch.is_autocast_enabled(x.device.type)
    for t in parts[:-1]:
        if t is None:
            continue
        if not is_plain_tensor(t) or t.device != x.device:
            return None
        if torch.float64 in (x.dtype, t.dtype) if casts else t.dtype != x.dtype:
            return None
    return parts


def flatten_parameters(x: Tensor, linears: Iterable[Parts]) -> tuple[list[float], list[Tensor | None]]:
    """Returns the scalings of all layers, and their parameters, under autocast cast to its dtype."""
    scalings = [scaling for *_, scaling in linears]
    parameters = [parameter for *layer_parameters, _ in linears for parameter in layer_parameters]
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        parameters = [None if parameter is None else parameter.to(dtype) for parameter in parameters]
    return scalings, parameters


def _parts(layer: nn.Module) -> Parts | None:
    """Returns a layer's parameters and scaling; None if its call computes more."""
    if is_plain_linear(layer):
        return layer.weight, layer.bias, None, None, 1.0
    if (type(layer).__module__, type(layer).__name__) != (_PEFTS, "Linear"):
        return None
    if not only_forward_runs(layer):
        return None
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(active) != 1 or not is_plain_linear(layer.base_layer):
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
    return layer.base_layer.weight, layer.base_layer.bias, a.weight, b.weight, float(scaling)


def _does_nothing(dropout: nn.Module) -> bool:
    """Returns whether a call of `dropout` returns its argument."""
    idle = type(dropout) is nn.Dropout and (dropout.p == 0 or not dropout.training)
    return (idle or type(dropout) is nn.Identity) and only_forward_runs(dropout)


def by_layer(per_parameter: Sequence) -> list[Sequence]:
    """Splits a sequence over the parameters of all layers into one sequence for each layer."""
    return [per_parameter[i : i + PARAMETERS] for i in range(0, len(per_parameter), PARAMETERS)]


def reads_input(needs: Sequence[bool]) -> bool:
    """Returns whether a gradient of a layer's parameters that `needs` requests depends on the layer's input."""
    weight, _, a, b = needs
    return weight or a or b


def linear(x: Tensor, parameters: Sequence[Tensor | None], scaling: float) -> Tensor:
    weight, bias, a, b = parameters
    out = nn.functional.linear(x, weight, bias)
    if a is None:
        return out
    low, rows = _rows(x) @ a.t(), _rows(out)
    # Selective checkpoints store a matmul's result, and return it a second time: it must not be overwritten.
    add = Tensor.addmm_ if _get_current_dispatch_mode() is None else torch.addmm
    return add(rows, low, b.t(), alpha=scaling).view(out.shape)


def linears_backward(
    douts: Sequence[Tensor | None],
    y: Tensor | None,
    parameters: Sequence[Tensor | None],
    scalings: Sequence[float],
    needs: Sequence[bool],
    like: Tensor | None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Computes the gradients of linear layers with the same input y, [rows, columns]: of y, in the shape and dtype of
    `like` (None: not computed), and of the parameters that need one."""
    dy, gradients = None, []
    for dout, layer, scaling, wanted in zip(douts, by_layer(parameters), scalings, by_layer(needs), strict=True):
        weight, _, a, b = layer
        need_weight, need_bias, need_a, need_b = wanted
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
        if like is not None:
            for t, factor in ((d, weight), (dlow, a)):
                if t is None:
                    continue
                if dy is None:
                    dy = (t @ factor).to(like.dtype)
                elif dy.dtype == t.dtype:
                    dy.addmm_(t, factor)
                else:
                    dy += t @ factor
    return (None if dy is None else dy.view(like.shape)), gradients


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])
