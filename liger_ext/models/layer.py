"""A decoder layer's two halves, each as one node of the autograd graph, which decides what it keeps.

Linear layers keep their inputs: of a Llama the norms' outputs and h = silu(gate) * up, a third of what the forward of a
training step keeps. Both cost little to make again: the norms' outputs one pass over the norms' inputs, and h is
written by the backward of the gated linear unit, which reads gate and up anyway, over h's gradient. What a node keeps,
by the level of `memory`:

* "fast": all of it;
* "auto": neither the norm's output nor h;
* "low": of the MLP the norm's input alone; the matmuls of gate and up run a second time.

The gradients of the residual stream and of a norm's consumers are summed on the way, by the norm's backward and by the
matmuls, not by kernels of their own. The forward's results have the bits that the separate ops give, and those of the
backward are the same at each level. No saved tensor is written: a graph may be used twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from liger_ext import _C
from liger_ext.models.loss import plain_linear
from liger_ext.models.patch import is_plain_tensor
from liger_ext.models.recompute import is_exported
from liger_ext.ops._checks import CASTING_MODES
from liger_ext.ops._inductor import introduce

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
        norm: an RMSNorm with `weight` and `variance_epsilon`.
        linears: plain linear layers of hidden_size columns, in the dtype of `x`, or of autocast.
        memory: one of the levels above.
    """
    return _NormLinears.apply(norm.variance_epsilon, memory, x, norm.weight, *_parameters(x, linears))


def norm_mlp(attention: Tensor, stream: Tensor, norm: nn.Module, mlp: nn.Module, memory: str) -> Tensor:
    """``s + down(silu(gate(y)) * up(y))`` with ``s = attention + stream`` and ``y = norm(s)``.

    Args:
        attention, stream: (..., hidden_size), what the attention adds to the residual stream, and the stream.
        norm: as in `norm_linears`.
        mlp: has the plain linear layers `gate_proj`, `up_proj` and `down_proj`.
        memory: one of the levels above.
    """
    parameters = _parameters(stream, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    return _NormMLP.apply(norm.variance_epsilon, memory, attention, stream, norm.weight, *parameters)


def _without_autocast(function: Callable) -> Callable:
    """The dtypes are those of the forward, wherever a backward is called."""

    @functools.wraps(function)
    def run(*args):
        device_type = next(a for a in args if isinstance(a, Tensor)).device.type
        if not torch.is_autocast_enabled(device_type):
            return function(*args)
        with torch.autocast(device_type, enabled=False):
            return function(*args)

    return run


_LIBRARY = torch.library.Library("liger_ext_models", "FRAGMENT")  # apart from the public ops, which have records


def _op_of_graphs(arguments: str) -> Callable:
    """A decorator: in a graph that torch.compile makes, the function is one op, of these arguments.

    What is kept is then decided here, not by the compiler, which would keep a matmul's input though it costs next to
    nothing, and add gradients by kernels. An op has no None among its results: an empty tensor stands for it.
    """

    def decorate(function: Callable) -> Callable:
        @_without_autocast
        def run(*args):
            results = function(*args)
            some = next(t for t in results if t is not None)
            return [some.new_empty(0) if t is None else t for t in results]

        name = function.__name__.removeprefix("_")
        _LIBRARY.define(f"{name}({arguments}, float eps, Tensor?[] parameters) -> Tensor[]")
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_ext_models::{name}", run, lib=_LIBRARY)
        op = getattr(torch.ops.liger_ext_models, name).default
        introduce(op)

        def call(*args):
            return op(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate


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


@_op_of_graphs("Tensor x, Tensor norm_weight, bool keeps_y")
def _norm_linears(x, norm_weight, keeps_y, eps, parameters):
    y, rstd = _norm(x, norm_weight, eps, parameters[0].dtype)
    return y if keeps_y else None, rstd, *(F.linear(y, *linear) for linear in _pairs(parameters))


@_op_of_graphs("Tensor?[] douts, Tensor x, Tensor norm_weight, Tensor rstd, Tensor? y, bool[] needs")
@_without_autocast
def _norm_linears_backward(douts, x, norm_weight, rstd, y, needs, eps, parameters):
    dstream, *douts = douts
    need_x, need_norm, *needs = needs
    if y is None and any(needs[::2]):
        y, _ = _norm(x, norm_weight, eps, parameters[0].dtype)
    dy, gradients = _linears_backward(douts, _rows(y), parameters, needs, x if need_x or need_norm else None)
    return *_norm_backward(dy, dstream, x, norm_weight, rstd, need_x, need_norm), *gradients


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, memory, attention, stream, norm_weight, *parameters):
        out, total, rstd, *kept = _norm_mlp(attention, stream, norm_weight, memory, eps, parameters)
        kept = [t if keep else None for t, keep in zip(kept, _KEPT[memory], strict=True)]
        ctx.save_for_backward(total, norm_weight, rstd, *kept, *parameters)
        ctx.eps, ctx.dtypes = eps, (attention.dtype, stream.dtype)
        return out

    @staticmethod
    def backward(ctx, dout):
        total, norm_weight, rstd, y, gate, up, h, *parameters = ctx.saved_tensors
        need_attention, need_stream, *needs = ctx.needs_input_grad[2:]
        needs = [need_attention or need_stream, *needs]
        gradients = _norm_mlp_backward(dout, total, norm_weight, rstd, (y, gate, up, h), needs, ctx.eps, parameters)
        dtotal, *others = (g if need else None for g, need in zip(gradients, needs, strict=True))
        dattention = dtotal.to(ctx.dtypes[0]) if need_attention else None
        dstream = dtotal.to(ctx.dtypes[1]) if need_stream else None
        return None, None, dattention, dstream, *others


# Of the norm's output, gate, up and h.
_KEPT = {"fast": (True, True, True, True), "auto": (False, True, True, False), "low": (False, False, False, False)}


@_op_of_graphs("Tensor attention, Tensor stream, Tensor norm_weight, str memory")
def _norm_mlp(attention, stream, norm_weight, memory, eps, parameters):
    y, total, rstd = _add_rms_norm(attention, stream, norm_weight, eps, *_NORM)
    *gate_and_up, down = _pairs(parameters)
    y = y.to(parameters[0].dtype)
    gate, up = (F.linear(y, *linear) for linear in gate_and_up)
    h = _glu(gate, up, *_SWIGLU)
    kept = [t if keep else None for t, keep in zip((y, gate, up, h), _KEPT[memory], strict=True)]
    out = F.linear(h, *down)
    del y, gate, up, h  # before more is made
    # Not in place: selective checkpoints keep matmuls' results, to return them a second time.
    return out + total, total, rstd, *kept


@_op_of_graphs("Tensor dout, Tensor total, Tensor norm_weight, Tensor rstd, Tensor?[] kept, bool[] needs")
@_without_autocast
def _norm_mlp_backward(dout, total, norm_weight, rstd, kept, needs, eps, parameters):
    need_total, need_norm, *needs = needs
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
    like = total if need_total or need_norm else None
    dy, gradients = _linears_backward((dgate, dup), _rows(y), parameters[:4], needs, like)
    return *_norm_backward(dy, dout, total, norm_weight, rstd, need_total, need_norm), *gradients, *of_down


def _norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    y, rstd = _rms_norm(x, weight, eps, *_NORM)
    return y.to(dtype), rstd


def runs_as_one_node(x: Tensor, linears: Iterable[nn.Module], training: bool) -> bool:
    """Whether a backward may follow, and `linears` are plain linear layers that take the dtype of `x`."""
    if not torch.is_grad_enabled() or x.device.type not in ("cpu", "cuda") or not is_plain_tensor(x):
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
