"""Autograd nodes for a norm and the attention's projections, for a norm and the MLP, and for linear layers with LoRA.
They decide which tensors they save.

torch's linear layers save their inputs. Among these are the norms' outputs and h = silu(gate) * up: in a Llama a third
of the memory that a forward saves. Both are cheap to recompute. The norms' outputs take one pass over the norms'
inputs. The backward of the gated activation reads gate and up anyway, and writes h in place of h's gradient. `memory`
decides which tensors a node saves:

* "fast": all;
* "auto": all but the norm's output and h;
* "low": in the MLP only the norm's input; the matmuls of gate and up run a second time. For long inputs gate, up and
  their gradients exist for a tile of `TILE` elements at a time.

The norm's backward and the matmuls add up the gradients of the residual stream and of a norm's consumers, without
separate kernels. Without LoRA and tiles, the forward has the same bits as the separate ops. Without tiles, the backward
has the same bits at each level; the weights' gradients of tiles are summed in fp32. No saved tensor is overwritten: a
graph may be used twice.

In a checkpoint of the whole layer (`training.checkpoint`) "low" is also the fastest level: the second forward only
recomputes tensors for the backward, and ends before the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from liger_ext import _C
from liger_ext.models.training.graph_ops import differentiable_once, graph_op, without_autocast
from liger_ext.models.training.linear import (
    Parts,
    added_parts,
    base_layer,
    flatten,
    fused_linears,
    may_fit,
)
from liger_ext.models.training.products import (
    Dropout,
    Layer,
    add_adapters,
    input_gradient,
    linears,
    low_gradients,
    parameter_gradients,
    reads_input,
    rows,
    unpack,
)
from liger_ext.ops._checks import CASTING_MODES
from liger_ext.ops._register import applied

_rms_norm = torch.ops.liger_ext.rms_norm.default
_add_rms_norm = torch.ops.liger_ext.add_rms_norm.default
_add_rms_norm_backward = torch.ops.liger_ext.add_rms_norm_backward.default
_glu = torch.ops.liger_ext.glu.default
_glu_backward = torch.ops.liger_ext.glu_backward.default
_glu_backward_with_h_ = torch.ops.liger_ext.glu_backward_with_h_.default
_SWIGLU = (int(_C.Activation.silu), 1.0, 1.0)
_NORM = (0.0, CASTING_MODES["llama"])  # offset, casting mode


def norm_linears(x: Tensor, norm: nn.Module, layers: list[Parts], memory: str) -> tuple[Tensor, ...]:
    """Returns the residual stream, and linear layers of its norm: ``x, *(linear(norm(x)) for linear in linears)``.

    The first result is `x` itself. Code that adds to the stream must use this result: then this node's backward adds up
    the gradients of the stream.

    Args:
        x: (..., hidden_size).
        norm: an RMSNorm, of `liger_ext.models.modules.norms`.
        layers: from `fused_linears`, for layers with hidden_size columns.
        memory: one of the levels above.
    """
    *layers, parameters = flatten(x, layers)
    return applied(_NormLinears, norm.liger_arguments()[1], layers, memory, x, norm.weight, *parameters)


def norm_mlp(
    attention: Tensor, stream: Tensor, norm: nn.Module, mlp: list[Parts], memory: str, is_read: bool = True
) -> Tensor:
    """Computes ``s + down(silu(gate(y)) * up(y))`` with ``s = attention + stream`` and ``y = norm(s)``.

    Args:
        attention, stream: (..., hidden_size), the attention's result, and the residual stream.
        norm: as in `norm_linears`.
        mlp: from `fused_linears`, for the layers gate, up and down.
        memory: one of the levels above.
        is_read: False, with "low": the result is only differentiated, never read, so its values are not computed.
    """
    *layers, parameters = flatten(stream, mlp)
    eps = norm.liger_arguments()[1]
    return applied(_NormMLP, eps, layers, memory, is_read, attention, stream, norm.weight, *parameters)


def adapted(layers: Sequence[nn.Module], x: Tensor, training: bool) -> Sequence[Tensor]:
    """Computes ``layer(x)`` for each layer: in one node if `fused_linears` accepts all, else one by one. Of another
    LoRA layer, the base layer is called, and a node adds the adapters."""
    if not any(map(may_fit, layers)):
        return [layer(x) for layer in layers]
    linears, base = fused_linears(x, layers, training), None
    if linears is None and len(layers) > 1:
        return [out for layer in layers for out in adapted((layer,), x, training)]
    if linears is None:
        linears = fused_linears(x, layers, training, added_parts)
        if linears is None:
            return [layers[0](x)]
        (base,) = adapted((base_layer(layers[0]),), x, training)
    *arguments, parameters = flatten(x, linears)
    return applied(_Adapted, arguments, base, x, *parameters)


_LAYERS = "ScalarType dtype, float[] constants, Tensor?[] parameters"  # from `linear.flatten`
_NORM_LAYERS = "float eps, " + _LAYERS  # the last arguments of each op with a norm


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layers, base, x, *parameters):
        low, factors, *outs = _adapted(x, base, *layers, parameters)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, _some(low), _some(factors), *_detached(parameters))
        ctx.layers = layers
        return tuple(outs)

    @staticmethod
    @differentiable_once
    def backward(ctx, *douts):
        x, low, factors, *parameters = ctx.saved_tensors
        need_base, *needs = ctx.needs_input_grad[1:]
        gradients = _adapted_backward(douts, x, low, factors, needs, *ctx.layers, parameters)
        gradients = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        return None, douts[0] if need_base else None, *gradients


@graph_op("Tensor x, Tensor? base, " + _LAYERS)
def _adapted(x, base, dtype, constants, parameters):
    layers, seed, factors = unpack(dtype, constants, parameters)
    if base is not None:
        out, low = add_adapters(base, x.to(dtype), *layers, Dropout(seed))
        return low, factors, out
    outs, low = linears(x.to(dtype), layers, Dropout(seed))
    return low, factors, *outs


@graph_op("Tensor?[] douts, Tensor x, Tensor? low, Tensor? factors, bool[] needs, " + _LAYERS)
@without_autocast
def _adapted_backward(douts, x, low, factors, needs, dtype, constants, parameters):
    need_x, *needs = needs
    layers, seed, _ = unpack(dtype, constants, parameters, factors)
    douts = [None if dout is None else dout.to(dtype) for dout in douts]
    return _linears_backward(douts, x.to(dtype), low, layers, needs, Dropout(seed), x if need_x else None)


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, layers, memory, x, norm_weight, *parameters):
        y, rstd, low, factors, *outs = _norm_linears(x, norm_weight, memory == "fast", eps, *layers, parameters)
        ctx.set_materialize_grads(False)
        weights = _detached((norm_weight, *parameters))
        ctx.save_for_backward(x, rstd, y if memory == "fast" else None, _some(low), _some(factors), *weights)
        ctx.eps, ctx.layers = eps, layers
        return x, *outs

    @staticmethod
    @differentiable_once
    def backward(ctx, *douts):
        x, rstd, y, low, factors, norm_weight, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        saved, layers = (y, low, factors), (*ctx.layers, parameters)
        gradients = _norm_linears_backward(douts, x, norm_weight, rstd, saved, needs, ctx.eps, *layers)
        return None, None, None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


@graph_op("Tensor x, Tensor norm_weight, bool keeps_y, " + _NORM_LAYERS)
def _norm_linears(x, norm_weight, keeps_y, eps, dtype, constants, parameters):
    layers, seed, factors = unpack(dtype, constants, parameters)
    y, rstd = _norm(x, norm_weight, eps, dtype)
    outs, low = linears(y, layers, Dropout(seed))
    return y if keeps_y else None, rstd, low, factors, *outs


_NORM_BACKWARD = "Tensor norm_weight, Tensor rstd, Tensor?[] saved, bool[] needs, " + _NORM_LAYERS


@graph_op("Tensor?[] douts, Tensor x, " + _NORM_BACKWARD)
@without_autocast
def _norm_linears_backward(douts, x, norm_weight, rstd, saved, needs, eps, dtype, constants, parameters):
    y, low, factors = saved
    layers, seed, _ = unpack(dtype, constants, parameters, factors)
    dstream, *douts = douts
    need_x, need_norm, *needs = needs
    if y is None and reads_input(layers, needs, low is not None):
        y, _ = _norm(x, norm_weight, eps, dtype)
    like = x if need_x or need_norm else None
    dy, *gradients = _linears_backward(douts, y, low, layers, needs, Dropout(seed), like)
    return *_norm_backward(dy, dstream, x, norm_weight, rstd, need_x, need_norm), *gradients


def _linears_backward(douts, y, low, layers, needs, dropout, like):
    """Computes the gradients of linear layers with the same input y: of y, in the shape and dtype of `like` (None: not
    computed), and of the parameters that need one."""
    douts, dy = [rows(dout) for dout in douts], None
    low_douts = low_gradients(douts, layers, needs, like is not None)
    if like is not None:
        dy = input_gradient(douts, low_douts, layers, dropout, like.shape[-1], like.dtype)
    gradients = [None] * len(needs)
    parameter_gradients(gradients, douts, low_douts, rows(y), low, layers, needs, dropout)
    return None if dy is None else dy.view(like.shape), *gradients


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, layers, memory, is_read, attention, stream, norm_weight, *parameters):
        arguments = eps, *layers, parameters
        out, total, rstd, *saved = _norm_mlp(attention, stream, norm_weight, memory, is_read, *arguments)
        *saved, low, low_h, factors = _only(saved, _SAVED[memory])
        weights = _detached((norm_weight, *parameters))
        ctx.save_for_backward(total, rstd, *saved, _some(low), _some(low_h), _some(factors), *weights)
        ctx.eps, ctx.layers, ctx.dtypes = eps, layers, (attention.dtype, stream.dtype)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        total, rstd, y, gate, up, h, low, low_h, factors, norm_weight, *parameters = ctx.saved_tensors
        saved = y, gate, up, h, low, low_h, factors
        need_attention, need_stream, *needs = ctx.needs_input_grad[4:]
        needs = [need_attention or need_stream, *needs]
        arguments = ctx.eps, *ctx.layers, parameters
        gradients = _norm_mlp_backward(dout, total, norm_weight, rstd, saved, needs, *arguments)
        dtotal, *others = (g if need else None for g, need in zip(gradients, needs, strict=True))
        dattention = dtotal.to(ctx.dtypes[0]) if need_attention else None
        dstream = dtotal.to(ctx.dtypes[1]) if need_stream else None
        return None, None, None, None, dattention, dstream, *others


# The tensors that are saved for the backward at each level, of: the norm's output, gate, up, h, the low-rank products
# of the adapters of gate and up, and of down, and the factors of `unpack`.
_SAVED = {
    "fast": (True,) * 7,
    "auto": (False, True, True, False, True, True, True),
    "low": (False,) * 6 + (True,),
}


def _some(t: Tensor | None) -> Tensor | None:
    """Returns a tensor to be saved; None for the empty tensor that a graph's op returns in place of None."""
    return None if t is None or not t.shape[0] else t


def _only(tensors, keeps):
    return [t if keep else None for t, keep in zip(tensors, keeps, strict=True)]


@graph_op("Tensor attention, Tensor stream, Tensor norm_weight, str memory, bool is_read, " + _NORM_LAYERS)
def _norm_mlp(attention, stream, norm_weight, memory, is_read, eps, dtype, constants, parameters):
    y, total, rstd = _add_rms_norm(attention, stream, norm_weight, eps, *_NORM)
    layers, seed, factors = unpack(dtype, constants, parameters)
    if not is_read:
        return total.new_empty(()).expand(total.shape), total, rstd, *(None,) * 6, factors
    y, keeps = y.to(dtype), _SAVED[memory][:-1]
    tiles = _tiles(total, layers[0]) if memory == "low" else []
    if not tiles:
        out, *saved = _mlp(y, total, keeps, layers, Dropout(seed))
        return out, total, rstd, *saved, factors
    out = torch.empty_like(total)
    for tile in tiles:
        dropout = Dropout(seed, tile.start)
        rows(out)[tile], *saved = _mlp(rows(y)[tile], rows(total)[tile], keeps, layers, dropout)
    return out, total, rstd, *saved, factors


def _mlp(y, total, keeps, layers, dropout):
    (gate, up), low = linears(y, layers[:2], dropout)
    h = _glu(gate, up, *_SWIGLU)
    (out,), low_h = linears(h, layers[2:], dropout)
    saved = _only((y, gate, up, h, low, low_h), keeps)
    del y, gate, up, h  # frees their memory before more is allocated
    # Not in place: selective checkpoints store a matmul's result, and return it a second time.
    return out + total, *saved


@graph_op("Tensor dout, Tensor total, " + _NORM_BACKWARD)
@without_autocast
def _norm_mlp_backward(dout, total, norm_weight, rstd, saved, needs, eps, dtype, constants, parameters):
    need_total, need_norm, *needs = needs
    need_dy = need_total or need_norm
    *saved, factors = saved
    layers, seed, _ = unpack(dtype, constants, parameters, factors)
    arguments = norm_weight, need_dy, needs, eps, dtype, layers
    tiles = _tiles(total, layers[0]) if saved[1] is None else []
    if not tiles:
        dy, gradients = _mlp_backward(dout, total, saved, *arguments, Dropout(seed))
    else:
        dy = torch.empty_like(total) if need_dy else None
        dout, sums = dout.contiguous(), None
        for tile in tiles:
            dropout = Dropout(seed, tile.start)
            tile_dy, gradients = _mlp_backward(rows(dout)[tile], rows(total)[tile], saved, *arguments, dropout)
            if need_dy:
                rows(dy)[tile] = tile_dy
            sums = _added(sums, gradients)
        gradients = [None if s is None else s.to(g.dtype) for s, g in zip(sums, gradients, strict=True)]
    return *_norm_backward(dy, dout, total, norm_weight, rstd, need_total, need_norm), *gradients


def _mlp_backward(dout, total, saved, norm_weight, need_dy, needs, eps, dtype, layers, dropout):
    y, gate, up, h, low, low_h = saved
    first, down, gradients = layers[:2], layers[2:], [None] * len(needs)
    if gate is None:
        y, _ = _norm(total, norm_weight, eps, dtype)
        (gate, up), low = linears(y, first, dropout)
    d = [rows(dout.to(dtype))]
    low_d = low_gradients(d, down, needs, need_x=True)
    dh = input_gradient(d, low_d, down, dropout, gate.shape[-1], gate.dtype).view(gate.shape)
    needs_h = reads_input(down, needs, low_h is not None)
    if h is None and needs_h:
        dgate, dup = _glu_backward_with_h_(dh, gate, up, *_SWIGLU)
        h = dh
    else:
        dgate, dup = _glu_backward(dh, gate, up, *_SWIGLU)
    del gate, up, dh  # before more is allocated
    parameter_gradients(gradients, d, low_d, rows(h), low_h, down, needs, dropout)
    del h
    if y is None and reads_input(first, needs, low is not None):
        y, _ = _norm(total, norm_weight, eps, dtype)
    like = total if need_dy else None
    dy, *others = _linears_backward((dgate, dup), y, low, first, needs, dropout, like)
    return dy, [g if g is not None else other for g, other in zip(gradients, others, strict=True)]


# The elements of one of the MLP's intermediate tensors that exist at a time if the backward recomputes them: enough to
# keep a GPU's matrix units busy, and little memory beside one layer's attention over a very long sequence.
TILE = 2**27


def _tiles(x: Tensor, gate: Layer) -> list[slice]:
    """Returns tiles of the rows of `x`, of about equal sizes. Returns none if one tile holds all rows, or if `x` has no
    size yet because a graph is traced."""
    rows = x.numel() // x.shape[-1] if type(x) is Tensor else 0
    count = -(-rows * gate.width(x.shape[-1]) // TILE)
    size = -(-rows // max(count, 1))
    return [slice(first, first + size) for first in range(0, rows, size)] if count > 1 else []


def _added(sums: list[Tensor | None] | None, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Adds gradients to sums in fp32, which the caller rounds after the last tile."""
    if sums is None:
        return [None if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return [None if g is None else s.add_(g) for s, g in zip(sums, gradients, strict=True)]


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm(x, weight, eps, *_NORM)
    return y.to(dtype), rstd


def _detached(parameters: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Returns detached parameters to be saved. Like torch's own linear layers, which save views, they keep the present
    values if the user assigns another `.data`, which changes no version counter."""
    return [None if p is None else p.detach() for p in parameters]


def _norm_backward(dy, dstream, x, weight, rstd, need_x, need_weight) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of a norm's input, with `dstream` added, and of its weight."""
    if dy is None:  # the norm's output was not used, or needs no gradient
        return (dstream if need_x else None), None
    dx, dweight = _add_rms_norm_backward(dy, dstream, x, weight, rstd, _NORM[0], need_x, need_weight)
    return (dx if need_x else None), (dweight if need_weight else None)
