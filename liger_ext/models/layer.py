"""A decoder layer's two halves, each as one node of the autograd graph, which decides what it keeps.

Linear layers keep their inputs: of a Llama the norms' outputs and h = silu(gate) * up, a third of what the forward of a
training step keeps. Both cost little to make again: the norms' outputs one pass over the norms' inputs, and h is
written by the backward of the gated linear unit, which reads gate and up anyway. What a node keeps, by the level of
`memory`:

* "fast": all of it;
* "auto": neither the norm's output nor h;
* "low": of the MLP the norm's input alone; the matmuls of gate and up run a second time.

The gradients of the residual stream and of a norm's consumers are summed on the way, by the norm's backward and by the
matmuls, not by kernels of their own. The forward's results have the bits that the separate ops give, and those of the
backward are the same at each level. No saved tensor is written: a graph may be used twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from liger_ext import _C
from liger_ext.models.loss import plain_linear
from liger_ext.models.patch import is_plain_tensor
from liger_ext.ops._checks import CASTING_MODES

_rms_norm = torch.ops.liger_ext.rms_norm.default
_add_rms_norm = torch.ops.liger_ext.add_rms_norm.default
_add_rms_norm_backward = torch.ops.liger_ext.add_rms_norm_backward.default
_glu = torch.ops.liger_ext.glu.default
_glu_backward = torch.ops.liger_ext.glu_backward.default
_SWIGLU = (int(_C.Activation.silu), 1.0, 1.0)
_NORM = (0.0, CASTING_MODES["llama"])  # offset, casting mode


def norm_linears(x: Tensor, norm: nn.Module, linears: list[nn.Linear], memory: str) -> tuple[Tensor, ...]:
    """The residual stream, and what `linears` make of its norm: ``x, *(linear(norm(x)) for linear in linears)``.

    The first result is `x` itself; who adds to the stream takes it from here, so that its gradient is summed here.

    Args:
        x: (..., hidden_size).
        norm: an RMSNorm with `weight` and `variance_epsilon`.
        linears: plain linear layers of hidden_size columns, in the dtype of `x`, or of autocast.
        memory: one of the levels above.
    """
    return _NormLinears.apply(x, norm.weight, norm.variance_epsilon, memory, *_parameters(x, linears))


def norm_mlp(attention: Tensor, stream: Tensor, norm: nn.Module, mlp: nn.Module, memory: str) -> Tensor:
    """``s + down(silu(gate(y)) * up(y))`` with ``s = attention + stream`` and ``y = norm(s)``.

    Args:
        attention, stream: (..., hidden_size), what the attention adds to the residual stream, and the stream.
        norm: as in `norm_linears`.
        mlp: has the plain linear layers `gate_proj`, `up_proj` and `down_proj`.
        memory: one of the levels above.
    """
    parameters = _parameters(stream, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return _NormMLP.apply(attention, stream, norm.weight, norm.variance_epsilon, memory, *parameters)


def swiglu_linear(gate: Tensor, up: Tensor, linear: nn.Linear) -> Tensor:
    """``linear(silu(gate) * up)``, which keeps gate and up alone, as a part of a graph that torch.compile makes."""
    return _SwiGLULinear.apply(gate, up, *_parameters(gate, (linear,)))


class _SwiGLULinear(torch.autograd.Function):
    """Numbers stand here themselves: torch.compile(dynamic=True) makes inputs of floats that have a name elsewhere."""

    @staticmethod
    def forward(ctx, gate, up, weight, bias):
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_glu(gate, up, 0, 1.0, 1.0), weight, bias)

    @staticmethod
    def backward(ctx, dout):
        gate, up, weight = ctx.saved_tensors
        _, _, *needs = ctx.needs_input_grad
        dgate, dup, h = _glu_backward(dout @ weight, gate, up, 0, 1.0, 1.0, needs[0])
        _, gradients = _linears_backward([dout], _rows(h) if needs[0] else None, (weight, None), needs, None)
        return dgate, dup, *gradients


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm_weight, eps, memory, *parameters):
        y, rstd = _rms_norm(x, norm_weight, eps, *_NORM)
        y = y.to(parameters[0].dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, norm_weight, rstd, y if memory == "fast" else None, *parameters)
        ctx.eps = eps
        return x, *(F.linear(y, *linear) for linear in _pairs(parameters))

    @staticmethod
    @once_differentiable
    def backward(ctx, dstream, *douts):
        x, norm_weight, rstd, y, *parameters = ctx.saved_tensors
        need_x, need_norm, _, _, *needs = ctx.needs_input_grad
        with _without_autocast(x):
            if y is None and any(needs[::2]):
                y = _norm(x, norm_weight, ctx.eps, parameters[0].dtype)
            dy, gradients = _linears_backward(douts, _rows(y), parameters, needs, x if need_x or need_norm else None)
            dx, dnorm = _norm_backward(dy, dstream, x, norm_weight, rstd, need_x, need_norm)
        return dx, dnorm, None, None, *gradients


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, attention, stream, norm_weight, eps, memory, *parameters):
        y, total, rstd = _add_rms_norm(attention, stream, norm_weight, eps, *_NORM)
        *gate_and_up, down = _pairs(parameters)
        y = y.to(parameters[0].dtype)
        gate, up = (F.linear(y, *linear) for linear in gate_and_up)
        h = _glu(gate, up, *_SWIGLU)
        kept = {"fast": (y, gate, up, h), "auto": (None, gate, up, None), "low": (None,) * 4}[memory]
        ctx.save_for_backward(total, norm_weight, rstd, *kept, *parameters)
        ctx.eps, ctx.dtypes = eps, (attention.dtype, stream.dtype)
        out = F.linear(h, *down)
        del gate, up, h, kept  # before more is made
        return out + total  # not in place: selective checkpoints keep matmuls' results, to return them a second time

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        total, norm_weight, rstd, y, gate, up, h, *parameters = ctx.saved_tensors
        need_attention, need_stream, need_norm, _, _, *needs = ctx.needs_input_grad
        need_total = need_attention or need_stream
        with _without_autocast(total):
            if y is None and (gate is None or any(needs[:4:2])):
                y = _norm(total, norm_weight, ctx.eps, parameters[0].dtype)
            if gate is None:
                gate, up = (F.linear(y, *linear) for linear in _pairs(parameters[:4]))
            d = dout.to(parameters[4].dtype)
            makes_h = h is None and needs[4]
            dgate, dup, made = _glu_backward(d @ parameters[4], gate, up, *_SWIGLU, makes_h)
            h = made if makes_h else h
            _, down_gradients = _linears_backward([d], _rows(h), parameters[4:], needs[4:], None)
            del gate, up, made, h  # before more is made
            like = total if need_total or need_norm else None
            dy, gradients = _linears_backward((dgate, dup), _rows(y), parameters[:4], needs, like)
            dtotal, dnorm = _norm_backward(dy, dout, total, norm_weight, rstd, need_total, need_norm)
        dattention = dtotal.to(ctx.dtypes[0]) if need_attention else None
        dstream = dtotal.to(ctx.dtypes[1]) if need_stream else None
        return dattention, dstream, dnorm, None, None, *gradients, *down_gradients


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return _rms_norm(x, weight, eps, *_NORM)[0].to(dtype)


def runs_as_one_node(x: Tensor, linears: Iterable[nn.Module]) -> bool:
    """Whether a graph is recorded, eagerly, and `linears` are plain linear layers that take the dtype of `x`."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type not in ("cpu", "cuda"):
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or not is_plain_tensor(x):
        return False
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return False  # it may give F.linear another meaning, and hence another derivative
    casts = torch.is_autocast_enabled(x.device.type)
    for linear in linears:
        if plain_linear(linear) is not linear or linear.weight.device != x.device:
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


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """For a backward: the dtypes are those of the forward, wherever it is called."""
    enabled = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if enabled else contextlib.nullcontext()


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
