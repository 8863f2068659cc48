"""GroupNorm: functions, module, fake implementation and autograd formula."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from liger_ext.ops._checks import accumulator, check_integer
from liger_ext.ops._modules import NormModule, check_size
from liger_ext.ops._register import register
from liger_ext.ops.layer_norm import fake_gradients

__all__ = ["LigerGroupNorm", "group_norm", "liger_group_norm"]


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """Applies group normalisation over groups of channels (Wu and He, 2018, arXiv:1803.08494).

    ``y = (x - mean) * rstd * weight[channel] + bias[channel]`` with ``rstd = 1 / sqrt(var + eps)``. The mean and the
    biased variance are those of a group: ``channels / num_groups`` channels of one sample. Statistics and all
    arithmetic are in float32 (float64 for float64), with one rounding at the end; the backward sums the gradients of
    weight and bias in float32, in a fixed order.

    Args:
        x: ``(batch, channels, *)``, float32, bfloat16 or float16 (float64 on the CPU), any strides; a non-contiguous
            tensor is copied.
        num_groups: a divisor of ``channels``.
        weight, bias: ``(channels,)`` or None; their dtypes may differ from that of ``x``.
        eps: added to the variance. The default is Liger-Kernel's; ``torch.nn.functional.group_norm`` has 1e-5.

    Returns:
        ``y`` with the shape and dtype of ``x``, contiguous.

    Raises:
        ValueError: fewer than two dimensions, channels that ``num_groups`` does not divide, a dtype that is not
            supported, or a weight or bias of another shape or device.
    """
    check_integer("group_norm", num_groups=num_groups)
    return _group_norm(x, weight, bias, num_groups, eps)[0]


class LigerGroupNorm(NormModule):
    """:func:`liger_ext.functional.group_norm` as a module with a weight and a bias.

    Args:
        num_channels: the channels of the input, ``(batch, num_channels, *)``. It is the first argument, as in
            Liger-Kernel; in ``torch.nn.GroupNorm`` ``num_groups`` is.
        num_groups: a divisor of ``num_channels``.
        eps: added to the variance.
        bias: accepted for compatibility, without effect: the module has a bias parameter either way, as in
            Liger-Kernel's checkpoints, and it is initialised with zeros (Liger-Kernel: random values if True).
            ``bias=False`` of ``torch.nn.GroupNorm`` is ``with_bias=False`` here.
        init_fn: the initial values of the weight: ``"ones"`` or ``"zeros"``.
        affine: False: neither weight nor bias.
        with_bias: False: no bias parameter.
        device, dtype: of the parameters; by default torch's.

    Raises:
        TypeError, ValueError: ``num_channels`` or ``num_groups`` is no positive integer, or ``init_fn`` another value.
        ValueError: ``num_groups`` does not divide ``num_channels``; in a call, the input's channels do not fit the
            parameters.
    """

    bias: nn.Parameter  # or None

    def __init__(
        self,
        num_channels: int,
        num_groups: int,
        eps: float = 1e-6,
        bias: bool = False,
        init_fn: str = "ones",
        *,
        affine: bool = True,
        with_bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_size(self, "a positive integer", num_channels=num_channels, num_groups=num_groups)
        if num_channels % num_groups:
            text = f"num_groups is {num_groups}, expected a divisor of the {num_channels} channels"
            raise ValueError(f"{type(self).__name__}: {text}")
        self.num_channels = num_channels
        self.num_groups = num_groups
        self._make_parameters(num_channels, init_fn, eps, device, dtype, weight=affine, bias=affine and with_bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return group_norm(hidden_states, self.num_groups, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        absent = self._absent("affine")
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.variance_epsilon}{absent}"


def liger_group_norm(
    X: Tensor,
    affine_scaling_weight: Tensor | None,
    affine_shifting_bias: Tensor | None,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> Tensor:
    """Calls :func:`liger_ext.functional.group_norm`; ``num_channels`` has no effect, since X has the channels."""
    return group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def _fake(x, num_groups):
    mean, rstd = (x.new_empty((x.shape[0], num_groups), dtype=accumulator(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _fake_backward(x, weight, bias_dtype, need_dx, need_dweight, need_dbias):
    return fake_gradients(x, weight, x.shape[1:2], bias_dtype, need_dx, need_dweight, need_dbias)


_group_norm = register("group_norm", fake=_fake, fake_backward=_fake_backward)
