"""A decoder layer's two halves, each as one node of the autograd graph, which decides what it keeps.

Linear layers keep their inputs: of a Llama the norms' outputs and h = silu(gate) * up, a third of what the forward of a
training step keeps. Both cost little to make again: the norms' outputs one pass over the norms' inputs, and h is
written by the backward of the gated linear unit, which reads gate and up anyway, over h's gradient. What a node keeps,
by the level of `memory`:

* "fast": all of it;
* "auto": neither the norm's output nor h;
* "low": of the MLP the norm's input alone; the matmuls of gate and up run a second time. Of long inputs gate, up and
  their gradients exist for `TILE` rows at a time.

The gradients of the residual stream and of a norm's consumers are summed on the way, by the norm's backward and by the
matmuls, not by kernels of their own. The forward's results have the bits that the separate ops give, and those of the
backward are the same at each level, but for the weights' gradients of tiles, which are summed in fp32. No saved tensor
is written: a graph may be used twice.

In a checkpoint of the whole layer (`liger_ext.models.checkpoint`) "low" is also the fastest: the second forward, which
is there for what the backward needs, ends before the MLP.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from liger_ext import _C
from liger_ext.models.graph_ops import op_of_graphs, without_autocast
from liger_ext.models.patch import is_plain_linear, is_plain_tensor
from liger_ext.models.recompute import is_exported
from liger_ext.ops._checks import CASTING_MODES

_rms_norm = torch.ops.liger_ext.rms_norm.default
_add_rms_norm = torch.ops.liger_ext.add_rms_norm.default
_add_rms_norm_backward = torch.ops.liger_ext.add_rms_norm_backward.default
_glu = torch.ops.liger_ext.glu.default
_glu_backward = torch.ops.liger_ext.glu_backward.default
_glu_backward_with_h_ = torch.ops.liger_ext.glu_backward_with_h_.default
_SWIGLU = (int(_C.Activation.silu), 1.0, 1.0)
_NORM = (0.0, CASTING_MODES["llama"])  # offset, casting mode


def norm_linears(x: Tensor, norm: nn.Module, linears: list[nn.Linear], memory: str) -> tuple[Tensor, ...]:
    """The residual stream, and what `linears` make of its norm: ``x, *(linear(norm(x)) for linear in linears)``.

    The first result is `x` itself; who adds to the stream takes it from here, so that its gradient is summed here.

    Args:
        x: (..., hidden_size).
        norm: an RMSNorm, of `liger_ext.models.norms`.
        linears: plain linear layers of hidden_size columns, in the dtype of `x`, or of autocast.
        memory: one of the levels above.
    """
    return _NormLinears.apply(norm.liger_arguments()[1], memory, x, norm.weight, *_parameters(x, linears))


def norm_mlp(
    attention: Tensor, stream: Tensor, norm: nn.Module, mlp: nn.Module, memory: str, is_read: bool = True
) -> Tensor:
    """``s + down(silu(gate(y)) * up(y))`` with ``s = attention + stream`` and ``y = norm(s)``.

    Args:
        attention, stream: (..., hidden_size), what the attention adds to the residual stream, and the stream.
        norm: as in `norm_linears`.
        mlp: has the plain linear layers `gate_proj`, `up_proj` and `down_proj`.
        memory: one of the levels above.
        is_read: False with "low" says that the result will only be differentiated: what it holds is not computed.
    """
    parameters = _parameters(stream, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return _NormMLP.apply(norm.liger_arguments()[1], memory, is_read, attention, stream, norm.weight, *parameters)


_CONSTANTS = "float eps, Tensor?[] parameters"  # the last arguments of each


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, memory, x, norm_weight, *parameters):
        y, rstd, *outs = _norm_linears(x, norm_weight, memory == "fast", eps, parameters)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, norm_weight, rstd, y if memory == "fast" else None, *parameters)
        ctx.eps = eps
        return x, *outs

    @staticmethod
    def backward(ctx, *douts):
        x, norm_weight, rstd, y, *parameters = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        gradients = _norm_linears_backward(douts, x, norm_weight, rstd, y, needs, ctx.eps, parameters)
        return None, None, *(g if need else None for g, need in zip(gradients, needs, strict=True))


@op_of_graphs("Tensor x, Tensor norm_weight, bool keeps_y, " + _CONSTANTS)
def _norm_linears(x, norm_weight, keeps_y, eps, parameters):
    y, rstd = _norm(x, norm_weight, eps, parameters[0].dtype)
    return y if keeps_y else None, rstd, *(F.linear(y, *linear) for linear in _pairs(parameters))


@op_of_graphs("Tensor?[] douts, Tensor x, Tensor norm_weight, Tensor rstd, Tensor? y, bool[] needs, " + _CONSTANTS)
@without_autocast
def _norm_linears_backward(douts, x, norm_weight, rstd, y, needs, eps, parameters):
    dstream, *douts = douts
    need_x, need_norm, *needs = needs
    if y is None and any(needs[::2]):
        y, _ = _norm(x, norm_weight, eps, parameters[0].dtype)
    dy, gradients = _linears_backward(douts, _rows(y), parameters, needs, x if need_x or need_norm else None)
    return *_norm_backward(dy, dstream, x, norm_weight, rstd, need_x, need_norm), *gradients


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, memory, is_read, attention, stream, norm_weight, *parameters):
        out, total, rstd, *kept = _norm_mlp(attention, stream, norm_weight, memory, is_read, eps, parameters)
        kept = [t if keep else None for t, keep in zip(kept, _KEPT[memory], strict=True)]
        ctx.save_for_backward(total, norm_weight, rstd, *kept, *parameters)
        ctx.eps, ctx.dtypes = eps, (attention.dtype, stream.dtype)
        return out

    @staticmethod
    def backward(ctx, dout):
        total, norm_weight, rstd, y, gate, up, h, *parameters = ctx.saved_tensors
        need_attention, need_stream, *needs = ctx.needs_input_grad[3:]
        needs = [need_attention or need_stream, *needs]
        gradients = _norm_mlp_backward(dout, total, norm_weight, rstd, (y, gate, up, h), needs, ctx.eps, parameters)
        dtotal, *others = (g if need else None for g, need in zip(gradients, needs, strict=True))
        dattention = dtotal.to(ctx.dtypes[0]) if need_attention else None
        dstream = dtotal.to(ctx.dtypes[1]) if need_stream else None
        return None, None, None, dattention, dstream, *others


# Of the norm's output, gate, up and h.
_KEPT = {"fast": (True, True, True, True), "auto": (False, True, True, False), "low": (False, False, False, False)}


@op_of_graphs("Tensor attention, Tensor stream, Tensor norm_weight, str memory, bool is_read, " + _CONSTANTS)
def _norm_mlp(attention, stream, norm_weight, memory, is_read, eps, parameters):
    y, total, rstd = _add_rms_norm(attention, stream, norm_weight, eps, *_NORM)
    if not is_read:
        return total.new_empty(()).expand(total.shape), total, rstd, None, None, None, None
    y, keeps = y.to(parameters[0].dtype), _KEPT[memory]
    tiles = _tiles(total) if memory == "low" else []
    if not tiles:
        out, *kept = _mlp(y, total, keeps, parameters)
        return out, total, rstd, *kept
    out = torch.empty_like(total)
    for tile in tiles:
        _rows(out)[tile], *kept = _mlp(_rows(y)[tile], _rows(total)[tile], keeps, parameters)
    return out, total, rstd, *kept


def _mlp(y, total, keeps, parameters):
    *gate_and_up, down = _pairs(parameters)
    gate, up = (F.linear(y, *linear) for linear in gate_and_up)
    h = _glu(gate, up, *_SWIGLU)
    kept = [t if keep else None for t, keep in zip((y, gate, up, h), keeps, strict=True)]
    out = F.linear(h, *down)
    del y, gate, up, h  # before more is made
    # Not in place: selective checkpoints keep matmuls' results, to return them a second time.
    return out + total, *kept


@op_of_graphs("Tensor dout, Tensor total, Tensor norm_weight, Tensor rstd, Tensor?[] kept, bool[] needs, " + _CONSTANTS)
@without_autocast
def _norm_mlp_backward(dout, total, norm_weight, rstd, kept, needs, eps, parameters):
    need_total, need_norm, *needs = needs
    need_dy = need_total or need_norm
    constants = norm_weight, need_dy, needs, eps, parameters
    tiles = _tiles(total) if kept[1] is None else []
    if not tiles:
        dy, gradients = _mlp_backward(dout, total, kept, *constants)
    else:
        dy = torch.empty_like(total) if need_dy else None
        dout, sums = dout.contiguous(), None
        for tile in tiles:
            dy_of_tile, gradients = _mlp_backward(_rows(dout)[tile], _rows(total)[tile], kept, *constants)
            if need_dy:
                _rows(dy)[tile] = dy_of_tile
            sums = _added(sums, gradients)
        gradients = [None if s is None else s.to(p.dtype) for s, p in zip(sums, parameters, strict=True)]
    return *_norm_backward(dy, dout, total, norm_weight, rstd, need_total, need_norm), *gradients


def _mlp_backward(dout, total, kept, norm_weight, need_dy, needs, eps, parameters):
    y, gate, up, h = kept
    if gate is None:
        y, _ = _norm(total, norm_weight, eps, parameters[0].dtype)
        gate, up = (F.linear(y, *linear) for linear in _pairs(parameters[:4]))
    d = dout.to(parameters[4].dtype)
    dh = d @ parameters[4]
    if h is None and needs[4] and dh.requires_grad:  # create_graph=True: dh is not to be written
        h = _glu(gate, up, *_SWIGLU)
    if h is None and needs[4]:
        dgate, dup = _glu_backward_with_h_(dh, gate, up, *_SWIGLU)
        h = dh
    else:
        dgate, dup = _glu_backward(dh, gate, up, *_SWIGLU)
    del gate, up, dh  # before more is made
    _, of_down = _linears_backward([d], _rows(h), parameters[4:], needs[4:], None)
    del h
    if y is None and any(needs[:4:2]):
        y, _ = _norm(total, norm_weight, eps, parameters[0].dtype)
    dy, of_gate_and_up = _linears_backward((dgate, dup), _rows(y), parameters[:4], needs, total if need_dy else None)
    return dy, [*of_gate_and_up, *of_down]


# Rows of the MLP that exist at a time where they are made again: enough to keep a GPU's matrix units busy, and little
# beside what one layer's attention takes of a sequence that is too long for anything else.
TILE = 8192


def _tiles(x: Tensor) -> list[slice]:
    """Of the rows of `x`, if they are more than one tile; none where the size is not known yet, as a graph is made."""
    rows = x.numel() // x.shape[-1] if type(x) is Tensor else 0
    return [slice(first, first + TILE) for first in range(0, rows, TILE)] if rows > TILE else []


def _added(sums: list[Tensor | None] | None, gradients: list[Tensor | None]) -> list[Tensor | None]:
    """In fp32: what is added to is rounded when all is there."""
    if sums is None:
        return [None if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
    return [None if g is None else s.add_(g) for s, g in zip(sums, gradients, strict=True)]


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm(x, weight, eps, *_NORM)
    return y.to(dtype), rstd


def runs_as_one_node(x: Tensor, linears: Iterable[nn.Module], training: bool) -> bool:
    """Whether `linears` are plain linear layers that take the dtype of `x`, and no more than a backward may follow."""
    if x.device.type not in ("cpu", "cuda") or not is_plain_tensor(x):
        return False
    if torch.compiler.is_compiling():
        if not training or is_exported():  # what is exported has public ops alone
            return False
    elif torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return False  # it may give F.linear another meaning, and hence another derivative
    casts = torch.is_autocast_enabled(x.device.type)
    for linear in linears:
        if not is_plain_linear(linear) or linear.weight.device != x.device:
            return False
        if torch.float64 in (x.dtype, linear.weight.dtype) if casts else linear.weight.dtype != x.dtype:
            return False
    return True


def _parameters(x: Tensor, linears: Iterable[nn.Linear]) -> list[Tensor | None]:
    """Weight, bias, weight, bias, ... in the dtype in which autocast has the matmuls run."""
    parameters = [parameter for linear in linears for parameter in (linear.weight, linear.bias)]
    if not torch.is_autocast_enabled(x.device.type):
        return parameters
    dtype = torch.get_autocast_dtype(x.device.type)
    return [None if parameter is None else parameter.to(dtype) for parameter in parameters]


def _pairs(of_parameters: Sequence) -> Iterator[tuple]:
    """By linear layer: (of the weight, of the bias)."""
    return zip(of_parameters[::2], of_parameters[1::2], strict=False)


def _rows(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1, t.shape[-1])


def _linears_backward(douts, y, parameters, needs, like) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of linear layers of the same rows y: the gradient of y, in the shape and dtype of `like` (None: not wanted), and
    those of the parameters that need one."""
    dy, gradients = None, []
    for dout, (weight, _), (need_weight, need_bias) in zip(douts, _pairs(parameters), _pairs(needs), strict=False):
        d = _rows(dout)
        gradients.append(d.t() @ y if need_weight and d is not None else None)
        gradients.append(d.sum(0) if need_bias and d is not None else None)
        if d is None or like is None:
            continue
        if dy is None:
            dy = (d @ weight).to(like.dtype)
        elif dy.dtype == d.dtype:
            dy.addmm_(d, weight)
        else:
            dy += d @ weight
    return (None if dy is None else dy.view(like.shape)), gradients


def _norm_backward(dy, dstream, x, weight, rstd, need_x, need_weight) -> tuple[Tensor | None, Tensor | None]:
    """Of a norm's input, `dstream` added, and of its weight."""
    if dy is None:  # nobody used the norm's output, or nobody wants what comes of it
        return (dstream if need_x else None), None
    dx, dweight = _add_rms_norm_backward(dy, dstream, x, weight, rstd, _NORM[0], need_x, need_weight)
    return (dx if need_x else None), (dweight if need_weight else None)
