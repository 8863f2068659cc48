"""Gated activations: SwiGLU and GeGLU of two tensors, or of one tensor with both halves; and MLP and expert modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_ext import _C
from liger_ext.ops._checks import mode_code
from liger_ext.ops._register import register, register_without_derivative

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerExperts",
    "LigerFalconH1SwiGLUMLP",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerPhi3SwiGLUMLP",
    "LigerQwen3MoeSwiGLUMLP",
    "LigerSwiGLUMLP",
    "geglu",
    "geglu_packed",
    "liger_geglu",
    "liger_swiglu",
    "swiglu",
    "swiglu_packed",
]

_SILU = int(_C.Activation.silu)
_GELU = {"tanh": int(_C.Activation.gelu_tanh), "none": int(_C.Activation.gelu)}


def swiglu(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Computes ``down_multiplier * silu(gate_multiplier * gate) * up`` (Shazeer, 2020, arXiv:2002.05202).

    The arithmetic is in float32 (float64 for float64), with one rounding. The backward recomputes the activation: only
    the inputs are saved, and they are not written.

    Args:
        gate, up: ``(..., intermediate_size)``, one shape and dtype: float32, bfloat16 or float16 (float64 on the CPU),
            any strides.
        gate_multiplier, down_multiplier: constant factors (Falcon-H1 uses them).

    Returns:
        The shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: gate and up differ in shape, dtype or device, or the dtype is not supported.
    """
    return _glu(gate, up, _SILU, gate_multiplier, down_multiplier)


def geglu(gate: Tensor, up: Tensor, approximate: str = "tanh") -> Tensor:
    """Computes ``gelu(gate) * up`` (Shazeer, 2020, arXiv:2002.05202; GELU: Hendrycks and Gimpel, 2016,
    arXiv:1606.08415).

    Args:
        gate, up: as in :func:`swiglu`.
        approximate: ``"tanh"`` for ``0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``, or ``"none"`` for the exact
            GELU, which uses erf.

    Returns:
        The shape and dtype of ``gate``, contiguous.

    Raises:
        ValueError: as in :func:`swiglu`, or another value of ``approximate``.
    """
    return _glu(gate, up, mode_code("geglu", "approximate", approximate, _GELU), 1.0, 1.0)


def swiglu_packed(gate_up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """Computes :func:`swiglu` of the halves of one projection's output, ``gate, up = gate_up.chunk(2, -1)``.

    The backward writes one gradient tensor, without a split or a concatenation.

    Args:
        gate_up: ``(..., 2 * intermediate_size)``.
        gate_multiplier, down_multiplier: as in :func:`swiglu`.

    Returns:
        ``(..., intermediate_size)``, contiguous.

    Raises:
        ValueError: an odd number of columns, or a dtype that is not supported.
    """
    return _glu_packed(gate_up, _SILU, gate_multiplier, down_multiplier)


def geglu_packed(gate_up: Tensor, approximate: str = "tanh") -> Tensor:
    """Computes :func:`geglu` of the halves of one tensor; see :func:`swiglu_packed`."""
    return _glu_packed(gate_up, mode_code("geglu_packed", "approximate", approximate, _GELU), 1.0, 1.0)


class _GatedMLP(nn.Module):
    def __init__(self, config: object, intermediate_size: int | None = None):
        super().__init__()
        _check_config(self, config, *_sizes(intermediate_size))
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)


def _sizes(intermediate_size: int | None = None) -> tuple[str, ...]:
    """Returns the sizes that a configuration must have: without intermediate_size if that is an argument."""
    return ("hidden_size", "intermediate_size") if intermediate_size is None else ("hidden_size",)


def _check_config(module: nn.Module, config: object, *names: str) -> None:
    """Raises TypeError if a configuration lacks one of these attributes; ``"a or b"`` requires one of the two."""
    missing = [n for n in names if all(getattr(config, either, None) is None for either in n.split(" or "))]
    if missing:
        hint = "types.SimpleNamespace(**config)" if isinstance(config, Mapping) else "a configuration of transformers"
        raise TypeError(
            f"{type(module).__name__}: config is of type {type(config).__name__} and has no {', no '.join(missing)}; "
            f"expected an object with the attributes {', '.join(names)}, such as {hint}"
        )


def _check_silu(module: nn.Module, config, *names: str) -> None:
    _check_config(module, config, "hidden_act", *names)
    if config.hidden_act not in ("silu", "swish"):
        name = type(module).__name__
        raise ValueError(f"{name}: config.hidden_act is {config.hidden_act!r}, expected 'silu' or 'swish'")


class LigerSwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, Llama's feed-forward layer.

    Args:
        config: has ``hidden_size``, ``intermediate_size`` and ``hidden_act``, and may have ``mlp_bias``.

    Raises:
        TypeError: ``config`` lacks one of these attributes; a dict and a number have none of them.
        ValueError: ``hidden_act`` is neither silu nor swish.
    """

    def __init__(self, config: object, intermediate_size: int | None = None):
        _check_silu(self, config, *_sizes(intermediate_size))
        super().__init__(config, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` of Qwen3-MoE: a dense layer, or with ``intermediate_size`` one expert.

    Args:
        config: as in :class:`LigerSwiGLUMLP`.
        intermediate_size: replaces the configuration's.
    """


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """:class:`LigerSwiGLUMLP` with the constructor arguments of HunYuan's MLP.

    Args:
        config: as in :class:`LigerSwiGLUMLP`.
        layer_idx, is_shared_mlp: stored as attributes, without effect.
    """

    def __init__(self, config: object, layer_idx: int | None = None, is_shared_mlp: bool = False):
        super().__init__(config)
        self.layer_idx, self.is_shared_mlp = layer_idx, is_shared_mlp


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """``down_multiplier * down_proj(silu(gate_multiplier * gate_proj(x)) * up_proj(x))``, Falcon-H1's MLP.

    Args:
        config: as in :class:`LigerSwiGLUMLP`, and ``mlp_multipliers``: ``(gate_multiplier, down_multiplier)``.
    """

    def __init__(self, config: object):
        _check_silu(self, config, *_sizes(), "mlp_multipliers")
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        h = swiglu(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(h) * self.down_multiplier


class LigerPhi3SwiGLUMLP(nn.Module):
    """``down_proj(silu(gate) * up)`` with ``gate, up = gate_up_proj(x).chunk(2, -1)``, Phi 3's MLP, without copies.

    Args:
        config: has ``hidden_size``, ``intermediate_size`` and ``hidden_act``.

    Raises:
        TypeError: ``config`` lacks one of these attributes; a dict and a number have none of them.
        ValueError: ``hidden_act`` is neither silu nor swish.
    """

    def __init__(self, config: object):
        super().__init__()
        _check_silu(self, config, *_sizes())
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu_packed(self.gate_up_proj(x)))


class LigerBlockSparseTop2MLP(nn.Module):
    """``w2(silu(w1(x)) * w3(x))``, one expert of Mixtral before transformers 5.

    Args:
        config: as in :class:`LigerPhi3SwiGLUMLP`.
    """

    def __init__(self, config: object):
        super().__init__()
        _check_silu(self, config, *_sizes())
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class LigerExperts(nn.Module):
    """The experts of a layer, each ``down(silu(gate(x)) * up(x))``, by grouped matrix multiplications.

    Args:
        config: has ``hidden_size``, ``hidden_act``, ``num_local_experts`` or ``num_experts``, and
            ``moe_intermediate_size`` or ``intermediate_size``.

    Parameters are ``gate_up_proj``, ``[experts, 2 * intermediate_size, hidden_size]``, and ``down_proj``, ``[experts,
    hidden_size, intermediate_size]``, as in transformers 5. On a GPU, ``torch.nn.functional.grouped_mm`` requires that
    a row's bytes are a multiple of 16.

    Raises:
        TypeError: ``config`` lacks one of these attributes; a dict and a number have none of them.
        ValueError: ``hidden_act`` is neither silu nor swish.
    """

    def __init__(self, config: object):
        super().__init__()
        needed = "hidden_size", "moe_intermediate_size or intermediate_size", "num_local_experts or num_experts"
        _check_silu(self, config, *needed)
        named = [getattr(config, name, None) for name in ("num_local_experts", "num_experts")]
        self.num_experts = next(count for count in named if count is not None)
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.initializer_range = getattr(config, "initializer_range", 0.02)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the parameters: normally distributed, with standard deviation ``config.initializer_range``."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=self.initializer_range)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of the outputs of each token's experts.

        Args:
            hidden_states: ``[tokens, hidden_size]``.
            top_k_index: ``[tokens, k]`` int64, the experts of each token; ``num_experts`` stands for no expert.
            top_k_weights: ``[tokens, k]``, of any floating dtype.

        Returns:
            The shape and dtype of ``hidden_states``. The sum is computed in the wider of the two dtypes.
        """
        tokens, k = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(self.num_experts, device=experts.device), right=True)
        nobodys = (experts >= self.num_experts).unsqueeze(-1)  # rows that a grouped matmul neither reads nor writes
        x = hidden_states[order // k].masked_fill(nobodys, 0)
        gate_up = _grouped_linear(x, self.gate_up_proj, ends).masked_fill(nobodys, 0)
        out = _grouped_linear(swiglu_packed(gate_up), self.down_proj, ends).masked_fill(nobodys, 0)
        out = out[order.argsort()].view(tokens, k, -1) * top_k_weights.unsqueeze(-1)
        return out.sum(dim=1).to(hidden_states.dtype)


def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the rows of each expert by ``weight[expert].T``. The rows of ``x`` are sorted by expert."""
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends.to(torch.int32))


class LigerGEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, Gemma's feed-forward layer, with GELU by tanh.

    Args:
        config: has ``hidden_size`` and ``intermediate_size``, and may have ``mlp_bias`` and ``hidden_activation`` or
            ``hidden_act``; its value ``"gelu"`` means the tanh form too, as in Gemma's first configurations.

    Raises:
        TypeError: ``config`` lacks a size; a dict and a number have none.
        ValueError: the activation is no GELU.
    """

    def __init__(self, config: object, intermediate_size: int | None = None):
        activation = (
            getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        )
        if activation not in ("gelu_pytorch_tanh", "gelu_new", "gelu"):
            name = type(self).__name__
            raise ValueError(f"{name}: the configuration's activation is {activation!r}, expected 'gelu_pytorch_tanh'")
        super().__init__(config, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """:class:`LigerGEGLUMLP` of Gemma 4, twice as wide in layers that share the keys and values of others.

    Args:
        config: as in :class:`LigerGEGLUMLP`. Layers are wide only with ``use_double_wide_mlp``. ``kv_sharing_modes``,
            or else ``num_hidden_layers`` and ``num_kv_shared_layers``, determine the layers that share.
        layer_idx: the index of this layer.
    """

    def __init__(self, config: object, layer_idx: int = 0):
        modes, shared = getattr(config, "kv_sharing_modes", None), getattr(config, "num_kv_shared_layers", None) or 0
        _check_config(self, config, *_sizes(), *(["num_hidden_layers"] if shared and modes is None else []))
        if modes is not None:
            reuses = modes[layer_idx] == "reuse"
        else:
            reuses = shared > 0 and layer_idx >= config.num_hidden_layers - shared > 0
        wide = reuses and getattr(config, "use_double_wide_mlp", False)
        super().__init__(config, config.intermediate_size * (2 if wide else 1))


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Calls :func:`liger_ext.functional.swiglu`."""
    return swiglu(a, b)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """Calls :func:`liger_ext.functional.geglu` with ``approximate="tanh"``."""
    return geglu(a, b)


_glu = register("glu", fake=lambda gate: gate.new_empty(gate.shape))
register_without_derivative(
    "glu_backward_with_h_", lambda gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape))
)
_glu_packed = register(
    "glu_packed", fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
)
