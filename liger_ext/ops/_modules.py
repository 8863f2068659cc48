"""The base class of the norm modules, and functions that check constructor arguments of norms and losses."""

from __future__ import annotations

import numbers

import torch
from torch import nn

from liger_ext.ops._checks import REDUCTIONS, check_integer, mode_code

_INITIAL = {"ones": 1.0, "zeros": 0.0}
_LAST_SIZE = (
    "a positive integer, the size of the last dimension (to normalise over several, flatten them: x.flatten(-2))"
)


class NormModule(nn.Module):
    """Base class of the norms. It registers their parameters, on any device and in any dtype, and initialises them."""

    init_fn = "ones"  # for instances that were pickled by versions without this attribute
    weight: nn.Parameter  # or None, as in torch.nn: without a weight

    def _make_parameters(
        self,
        size: int,
        init_fn: str,
        eps: float,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        **wanted: bool,
    ) -> None:
        """Registers a parameter for each name in ``wanted``, or None where its value is False."""
        if not isinstance(init_fn, str) or init_fn not in _INITIAL:
            raise ValueError(f"{type(self).__name__}: init_fn is {init_fn!r}, expected 'ones' or 'zeros'")
        check_number(type(self).__name__, "eps", eps, 0, float("inf"))
        self.init_fn, self.variance_epsilon = init_fn, eps
        for name, is_wanted in wanted.items():
            parameter = nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if is_wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the parameters to their initial values."""
        # Without torch.nn.init, whose functions transformers disables while it loads a model.
        with torch.no_grad():
            for parameter, value in ((self.weight, _INITIAL[self.init_fn]), (getattr(self, "bias", None), 0.0)):
                if parameter is not None:
                    parameter.fill_(value)

    def _absent(self, affine: str) -> str:
        """Returns the text of extra_repr that names the constructor argument that omits parameters."""
        if self.weight is None:
            return f", {affine}=False"
        return ", with_bias=False" if self.bias is None else ""


def last_size(module: nn.Module, name: str, value: int) -> int:
    """Returns the size of the last dimension from ``value``: an integer, or as in torch.nn a list or tuple of one."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    check_size(module, **{name: value})
    return value


def check_size(module: nn.Module, expected: str = _LAST_SIZE, **sizes: int) -> None:
    """Checks sizes in a constructor: torch's errors do not name the argument, or are raised at the first call."""
    check_integer(type(module).__name__, expected, **sizes)
    for name, value in sizes.items():
        if not isinstance(value, torch.SymInt) and value < 1:
            raise ValueError(f"{type(module).__name__}: {name} is {value}, expected {expected}")


def check_number(module: str, name: str, value: object, least: float, most: float, expected: str = "a number") -> None:
    """Checks an option in a constructor, so that the error is not raised at the first call."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{module}: {name} is {value!r}, expected {expected}")
    if not least <= value <= most:
        raise ValueError(f"{module}: {name} is {value}, expected {expected} in [{least}, {most}]")


def check_loss_options(
    module: str, ignore_index: int, label_smoothing: float, reduction: str, softcap: float | None
) -> None:
    check_integer(module, ignore_index=ignore_index)
    check_number(module, "label_smoothing", label_smoothing, 0, 1)
    mode_code(module, "reduction", reduction, REDUCTIONS)
    if softcap is not None:
        check_number(module, "softcap", softcap, 1e-18, 1e18, "None or a number")
