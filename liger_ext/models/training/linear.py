"""Recognises the linear layers that the nodes of `liger_ext.models.training.nodes` run: plain ones, bitsandbytes' with
4-bit weights, those with a weight that torchao has quantised, and PEFT's with LoRA adapters around one of these. Around
any other base layer, a node adds the adapters to the result of the base layer's own call. `products.py` computes them.

A node receives its layers as two flat lists, because autograd and the graphs of torch.compile take tensors and numbers:

- parameters: for each layer weight, bias and the statistics of a 4-bit weight (absmax, absmax_code, absmax_scales,
  absmax_offset of `functional.dequantize_4bit`), then A, B and B's bias of each adapter; at the end the seed of the
  node's dropout. All but the weights, A and B may be None; without a weight, the node adds to a base layer's result.
- constants: for each layer the code, blocksize (0: plain; -1: torchao's) and absmax_blocksize of a 4-bit weight and the
  number of its adapters, then the scaling of each adapter and the rate of its dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from liger_ext.models.patching.calls import is_exported, only_forward_runs
from liger_ext.models.patching.swap import is_plain_tensor, runs_torch_linear
from liger_ext.models.training.checkpoint import is_differentiated
from liger_ext.models.training.products import ADAPTER_CONSTANTS, LAYER_CONSTANTS, LAYER_PARAMETERS
from liger_ext.ops.dequantize_4bit import CODES_4BIT

# PEFT's classes (0.18 to 0.21) whose forward computes `base_layer(x)`, then adds each active adapter's part.
_LORA = "peft.tuners.lora."
_PEFTS = frozenset(
    {(_LORA + "layer", "Linear"), (_LORA + "bnb", "Linear4bit"), (_LORA + "bnb", "Linear8bitLt")}
    | {(_LORA + "gptq", "GPTQLoraLinear"), (_LORA + "awq", "AwqLoraLinear"), (_LORA + "aqlm", "AqlmLoraLinear")}
    | {(_LORA + "hqq", "HqqLoraLinear"), (_LORA + "eetq", "EetqLoraLinear"), (_LORA + "inc", "IncLoraLinear")}
    | {(_LORA + "torchao", "TorchaoLoraLinear"), (_LORA + "te", "TeLinear")}
)
# torchao's weights that are decoded for a matmul, and their attributes that are None unless it does more.
_TORCHAO = {
    "Int8Tensor": ("act_quant_kwargs", "act_pre_scale"),
    "Float8Tensor": ("act_quant_kwargs",),
    "IntxUnpackedToInt8Tensor": ("activation_quantization",),
}
_BITSANDBYTES = "bitsandbytes.nn.modules", "Linear4bit"


class Parts(NamedTuple):
    """The parameters and constants of a layer, or of an adapter (see above)."""

    parameters: tuple[Tensor | None, ...]
    constants: tuple[float, ...]


class Input(NamedTuple):
    """The properties of a node's input that decide which layers the node runs."""

    dtype: torch.dtype
    device: torch.device
    casts: bool  # whether autocast is enabled
    matmul_dtype: torch.dtype


def input_properties(x: Tensor) -> Input:
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind)
    return Input(x.dtype, x.device, casts, torch.get_autocast_dtype(kind) if casts else x.dtype)


def may_fit(layer: nn.Module | None) -> bool:
    """Returns whether `layer` is a linear layer other than torch's. PEFT's and bitsandbytes' have this attribute."""
    return type(layer) is not nn.Linear and layer is not None and "in_features" in layer.__dict__


def fused_parts(layer: nn.Module, x: Input) -> Parts | None:
    """Returns the parts of a linear layer, plain, with a 4-bit weight, or with LoRA, whose parameters have the dtype
    and device of the input (under autocast, any dtype but float64). None for any other layer."""
    parts = _parts(layer, x)
    if parts is None:
        return None
    weight, bias = parts.parameters[:2]
    read = bias, *parts.parameters[LAYER_PARAMETERS:]  # without the statistics of the weight
    if parts.constants[1] == 0:  # a matmul reads the weight itself
        read = weight, *read
    elif weight.device != x.device or not (parts.constants[1] < 0 or is_plain_tensor(weight)):
        return None
    for t in read:
        if t is None:
            continue
        dtype = t.dtype
        differs = torch.float64 in (x.dtype, dtype) if x.casts else dtype != x.dtype
        if differs or t.device != x.device or not is_plain_tensor(t):
            return None
    return parts


def fused_linears(
    x: Tensor, layers: Iterable[nn.Module], training: bool, read: Callable = fused_parts
) -> list[Parts] | None:
    """Returns the parts of `layers` that the nodes run. None unless `read` accepts all of these linear layers, and
    nothing but a backward may follow: no functorch transform, forward-mode derivative or export."""
    differentiated = is_differentiated()
    if not (differentiated or training) or x.device.type not in ("cpu", "cuda") or not is_plain_tensor(x):
        return None
    if torch.compiler.is_compiling():
        if not training or is_exported():  # an exported graph contains only public ops
            return None
    elif torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return None  # the mode may replace F.linear, and with it the derivative
    found, properties = [], input_properties(x)
    for layer in layers:
        parts = read(layer, properties)
        if parts is None:
            return None
        found.append(parts)
    # A reentrant checkpoint's first run, without gradients, must draw the random numbers of the second one.
    return found if differentiated or any(map(has_dropout, found)) else None


def added_parts(layer: nn.Module, x: Input) -> Parts | None:
    """Returns the parts of a LoRA layer without a weight: a node adds its adapters to the result of `base_layer`. They
    have one dtype: without autocast, the node computes in it, as PEFT does. None for any other layer."""
    if (type(layer).__module__, type(layer).__name__) not in _PEFTS or not only_forward_runs(layer):
        return None
    if layer.disable_adapters or layer.merged:
        return None
    parts = _with_adapters(layer, Parts((None,) * LAYER_PARAMETERS, (0.0,) * LAYER_CONSTANTS))
    tensors = [t for t in parts.parameters if t is not None] if parts is not None else []
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) != 1 or not all(is_plain_tensor(t) and t.device == x.device for t in tensors):
        return None
    if x.casts and x.dtype not in (x.matmul_dtype, torch.float32):
        return None
    if dtypes != {x.dtype} and not x.casts and not getattr(layer, "cast_input_dtype_enabled", True):
        return None
    return parts if (torch.float64 in dtypes) == (x.dtype == torch.float64) else None


def why_called(layer: nn.Module) -> str | None:
    """Returns why a call of a layer with PEFT's adapters must run PEFT's code, whatever its input is. None: nodes may
    run it. FSDP2 gathers sharded parameters before the call, so they are no reason."""
    module, name = type(layer).__module__, type(layer).__name__
    if (module, name) not in _PEFTS:
        return f"of class {module}.{name}"
    if not only_forward_runs(layer):
        return "with hooks or replaced functions"
    if layer.disable_adapters or layer.merged or any(hasattr(p, "placements") for p in layer.parameters()):
        return None
    for found in (_adapter(layer, name) for name in layer.active_adapters if name in layer.lora_A):
        if isinstance(found, str):
            return found
        if not all(t is None or is_plain_tensor(t) for t in found.parameters):
            return "with lora_A or lora_B of a tensor subclass"
    return None


def base_layer(layer: nn.Module) -> nn.Module:
    """Returns the module that the `forward` of a LoRA layer calls for the base's result."""
    modules = layer._modules
    return modules["quant_linear_module" if "quant_linear_module" in modules else "base_layer"]


def flatten(x: Tensor, layers: Sequence[Parts]) -> tuple[torch.dtype, list[float], list[Tensor | None]]:
    """Returns the dtype of the matmuls, and the constants and the parameters of all layers. Under autocast, weights and
    biases are cast to its dtype; adapters are cast by the node, which rounds their gradients once. The seed is drawn
    here, once for each call: a checkpoint's second run draws it again."""
    _, _, casts, dtype = input_properties(x)
    if layers[0].parameters[0] is None and not casts:
        dtype = layers[0].parameters[LAYER_PARAMETERS].dtype
    constants, parameters = [], []
    for layer in layers:
        constants += layer.constants
        weight, bias, *others = layer.parameters
        keeps = weight is None or layer.constants[1]  # no weight, or not one that a matmul reads
        parameters += [weight if keeps else weight.to(dtype), None if bias is None else bias.to(dtype), *others]
    drops = any(map(has_dropout, layers))
    return dtype, constants, [*parameters, torch.randint(2**62, (1,), device=x.device) if drops else None]


def has_dropout(parts: Parts) -> bool:
    """Returns whether a call of the layer draws random numbers."""
    return any(parts.constants[LAYER_CONSTANTS + 1 :: ADAPTER_CONSTANTS])


def _parts(layer: nn.Module, x: Input) -> Parts | None:
    """Returns a layer's parts; None if its call computes more."""
    if (type(layer).__module__, type(layer).__name__) not in _PEFTS:
        return _base_parts(layer, x)
    if not only_forward_runs(layer) or (layer.disable_adapters and layer.merged):  # the call unmerges
        return None
    base = _base_parts(base_layer(layer), x)
    return base if base is None or layer.disable_adapters or layer.merged else _with_adapters(layer, base)


def _with_adapters(layer: nn.Module, base: Parts) -> Parts | None:
    """Returns the parts of a LoRA layer, from its base layer's; None if an adapter computes more."""
    parameters, constants, matrices = list(base.parameters), [*base.constants[:-1], 0.0], layer._modules["lora_A"]
    for name in layer.active_adapters:
        if name not in matrices._modules:
            continue
        adapter = _adapter(layer, name)
        if isinstance(adapter, str):
            return None
        parameters += adapter.parameters
        constants += adapter.constants
        constants[LAYER_CONSTANTS - 1] += 1
    return Parts(tuple(parameters), tuple(constants))


def _adapter(layer: nn.Module, name: str) -> Parts | str:
    """Returns the parameters and constants of one LoRA adapter; if it computes more, the reason."""
    # DoRA and other variants; they are flags of the layer before PEFT 0.15.
    if name in getattr(layer, "lora_variant", ()) or getattr(layer, "use_dora", {}).get(name, False):
        return "with DoRA or another variant of LoRA"
    a, b, dropout = (layer._modules[part]._modules[name] for part in ("lora_A", "lora_B", "lora_dropout"))
    scaling = layer.scaling[name]
    if not (runs_torch_linear(a) and runs_torch_linear(b)):
        return "with hooks or replaced functions of lora_A or lora_B"
    if _parameter(a, "bias") is not None or not isinstance(scaling, (int, float)):
        return "with a bias of lora_A or a scaling that is no number"
    if type(dropout) not in (nn.Dropout, nn.Identity) or not only_forward_runs(dropout):
        return "with another dropout than torch's"
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    a_weight, b_weight = _parameter(a, "weight"), _parameter(b, "weight")
    if a_weight.dtype != b_weight.dtype or (rate and dropout.inplace):
        return "with lora_A and lora_B of two dtypes, or dropout in place"
    return Parts((a_weight, b_weight, _parameter(b, "bias")), (float(scaling), float(rate)))


def _base_parts(layer: nn.Module, x: Input) -> Parts | None:
    """Returns the parts of a linear layer without an adapter; None if its call computes more."""
    if type(layer) is nn.Linear:
        weight, kind = _parameter(layer, "weight"), 0.0
        if not is_plain_tensor(weight):
            kind = -1.0
        if not runs_torch_linear(layer) or (kind and not _decodes(weight, x)):
            return None
        return Parts((weight, _parameter(layer, "bias"), None, None, None, None), (0.0, kind, 0.0, 0.0))
    if (type(layer).__module__, type(layer).__name__) != _BITSANDBYTES or not only_forward_runs(layer):
        return None
    weight, bias = _parameter(layer, "weight"), _parameter(layer, "bias")
    state = getattr(weight, "quant_state", None) or layer.quant_state  # FSDP's gathered weight has none
    if state is None or getattr(state, "packing_format_for_cpu", False) or state.quant_type not in CODES_4BIT:
        return None
    if tuple(state.shape) != (layer.out_features, layer.in_features) or state.shape.numel() % 2:
        return None
    # The first call of a layer without a compute dtype sets it.
    computes_in = layer.compute_dtype if layer.compute_type_is_set or x.dtype == torch.float16 else x.dtype
    if (computes_in or x.dtype) != x.matmul_dtype or (bias is not None and bias.requires_grad):
        return None
    statistics = [state.absmax, None, None, None]
    if state.nested:
        statistics[1:] = state.state2.code, state.state2.absmax, state.offset
    bias = None if bias is None else bias.to(x.matmul_dtype)
    blocks = CODES_4BIT[state.quant_type], state.blocksize, state.state2.blocksize if state.nested else 256
    return Parts((weight.data, bias, *statistics), (*map(float, blocks), 0.0))


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns `getattr(module, name)`, which takes four times as long for a parameter."""
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _decodes(weight: Tensor, x: Input) -> bool:
    """Returns whether this is a weight of torchao whose layer multiplies `x` by it, and computes no more. A graph of
    torch.compile passes no tensor subclass to an op."""
    options = _TORCHAO.get(type(weight).__name__) if type(weight).__module__.startswith("torchao.quant") else None
    if options is None or any(getattr(weight, name, None) is not None for name in options):
        return False
    # torchao's results have the dtype of `x`, also under autocast.
    fits = weight.dim() == 2 and weight.dtype == x.dtype == x.matmul_dtype and not weight.requires_grad
    return fits and not torch.compiler.is_compiling()
