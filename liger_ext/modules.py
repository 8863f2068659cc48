"""The functions as modules, with Liger-Kernel's constructor arguments and parameter names, so that checkpoints load."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_ext import functional as F

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerJSD",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSwiGLUMLP",
]

_INITIALISERS = {"ones": torch.ones, "zeros": torch.zeros}


def _parameter(init_fn: str, hidden_size: int) -> nn.Parameter:
    if init_fn not in _INITIALISERS:
        raise ValueError(f"init_fn is {init_fn!r}, expected 'ones' or 'zeros'")
    return nn.Parameter(_INITIALISERS[init_fn](hidden_size))


class LigerRMSNorm(nn.Module):
    """:func:`liger_ext.functional.rms_norm` with its weight.

    Args:
        hidden_size: size of the last dimension of the input.
        eps, offset, casting_mode: as in :func:`liger_ext.functional.rms_norm`.
        init_fn: the weight begins with ``"ones"`` or ``"zeros"``.
        in_place, row_mode: accepted for compatibility, without effect: no input or gradient is ever written, and the
            launch is planned from the device and the shape.
        elementwise_affine: False: no weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ):
        super().__init__()
        weight = _parameter(init_fn, hidden_size)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place
        self.row_mode = row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        size = "" if self.weight is None else f"{self.weight.shape[0]}, "
        return f"{size}eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerFusedAddRMSNorm(nn.Module):
    """:func:`liger_ext.functional.add_rms_norm` with its weight: ``forward(hidden_states, residual) -> (normed, sum)``.

    Arguments as in :class:`LigerRMSNorm`; ``in_place`` has no effect.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = False,
    ):
        super().__init__()
        self.weight = _parameter(init_fn, hidden_size)
        self.variance_epsilon = eps
        self.offset = offset
        self.casting_mode = casting_mode
        self.in_place = in_place

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return F.add_rms_norm(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )

    def extra_repr(self) -> str:
        size = self.weight.shape[0]
        return f"{size}, eps={self.variance_epsilon}, offset={self.offset}, casting_mode={self.casting_mode!r}"


class LigerLayerNorm(nn.Module):
    """:func:`liger_ext.functional.layer_norm` with its weight and bias.

    Args:
        hidden_size: size of the last dimension of the input.
        eps: added to the variance.
        bias: accepted for compatibility: there is a bias parameter either way, as upstream's checkpoints have it, and
            it begins with zeros either way (upstream begins with random values if True).
        init_fn: the weight begins with ``"ones"`` or ``"zeros"``.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight = _parameter(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.layer_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}"


class LigerGroupNorm(nn.Module):
    """:func:`liger_ext.functional.group_norm` with its weight and bias.

    Args:
        num_channels: of the input, ``(batch, num_channels, *)``.
        num_groups: a divisor of ``num_channels``.
        eps: added to the variance.
        bias: accepted for compatibility: there is a bias parameter either way, as upstream's checkpoints have it, and
            it begins with zeros either way (upstream begins with random values if True).
        init_fn: the weight begins with ``"ones"`` or ``"zeros"``.

    Raises:
        ValueError: ``num_groups`` does not divide ``num_channels``; when it is called, an input with another number of
            channels.
    """

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ):
        super().__init__()
        if num_groups <= 0 or num_channels % num_groups:
            raise ValueError(f"num_groups is {num_groups}, expected a divisor of the {num_channels} channels")
        self.num_channels = num_channels
        self.num_groups = num_groups
        self.weight = _parameter(init_fn, num_channels)
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}"


class _GatedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)


class LigerSwiGLUMLP(_GatedMLP):
    """``down_proj(silu(gate_proj(x)) * up_proj(x))``, Llama's feed-forward layer.

    Args:
        config: has ``hidden_size``, ``intermediate_size`` and ``hidden_act``, and may have ``mlp_bias``.

    Raises:
        ValueError: ``hidden_act`` is neither silu nor swish.
    """

    def __init__(self, config):
        if config.hidden_act not in ("silu", "swish"):
            raise ValueError(f"LigerSwiGLUMLP: config.hidden_act is {config.hidden_act!r}, expected 'silu' or 'swish'")
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.swiglu(self.gate_proj(x), self.up_proj(x)))


class LigerGEGLUMLP(_GatedMLP):
    """``down_proj(gelu(gate_proj(x)) * up_proj(x))``, Gemma's feed-forward layer, with GELU by tanh.

    Args:
        config: has ``hidden_size`` and ``intermediate_size``, and may have ``mlp_bias`` and ``hidden_activation`` or
            ``hidden_act``; its value ``"gelu"`` means the tanh form too, as in Gemma's first configurations.

    Raises:
        ValueError: the activation is no GELU.
    """

    def __init__(self, config):
        activation = (
            getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_pytorch_tanh"
        )
        if activation not in ("gelu_pytorch_tanh", "gelu_new", "gelu"):
            raise ValueError(
                f"LigerGEGLUMLP: the configuration's activation is {activation!r}, expected 'gelu_pytorch_tanh'"
            )
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.geglu(self.gate_proj(x), self.up_proj(x)))


class LigerReLUSquared(nn.Module):
    """:func:`liger_ext.functional.relu_squared`: ``max(x, 0)^2``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_squared(x)


class LigerSoftmax(nn.Module):
    """:func:`liger_ext.functional.softmax`: softmax over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x)


class LigerCrossEntropyLoss(nn.Module):
    """:func:`liger_ext.functional.cross_entropy` with its options; ``forward(_input, target)``.

    Class weights are a buffer, so that they follow ``.to()``, and not part of the state dict.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__()
        _check_loss_options(label_smoothing, reduction, softcap)
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Tensor | F.CrossEntropyOutput:
        return F.cross_entropy(
            _input,
            target,
            self.weight,
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.lse_square_scale,
            self.softcap,
            self.return_z_loss,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """:func:`liger_ext.functional.fused_linear_cross_entropy` with its options.

    ``forward(lin_weight, _input, target, bias=None)``, in this order. Class weights are a buffer, so that they follow
    ``.to()``, and not part of the state dict.
    """

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ):
        super().__init__()
        _check_loss_options(label_smoothing, reduction, softcap)
        self.register_buffer("ce_weight", ce_weight, persistent=False)
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Tensor | F.CrossEntropyOutput:
        return F.fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


class LigerJSD(nn.Module):
    """:func:`liger_ext.functional.jsd` with its options; ``forward(log_q, log_p, shift_labels=None)``."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100):
        super().__init__()
        if not 0 <= beta <= 1:
            raise ValueError(f"beta is {beta}, expected a number in [0, 1]")
        self.beta = beta
        self.ignore_index = ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return F.jsd(log_q, log_p, shift_labels, self.beta, self.ignore_index)

    def extra_repr(self) -> str:
        return f"beta={self.beta}, ignore_index={self.ignore_index}"


def _check_loss_options(label_smoothing: float, reduction: str, softcap: float | None) -> None:
    # Said when the module is made, rather than at its first call.
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected a number in [0, 1]")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}, expected 'none', 'mean' or 'sum'")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, expected None or a number greater than 0")
