"""The names of ``liger_kernel.ops`` that liger_ext lacks: ops as classes with ``apply``, and helpers that other
packages import for their own Triton kernels.

Each ``apply`` takes Liger-Kernel's positional arguments and returns the same results. Arguments that select a kernel
or its chunks (``row_mode``, ``ce_impl``, ...) and ``in_place`` have no effect: no input is ever written. The
classes are not derived from ``torch.autograd.Function``, since the ops of ``torch.ops.liger_ext`` have autograd
formulas.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from liger_ext import compat, functional


class LigerCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Calls :func:`liger_ext.functional.cross_entropy`. Returns loss, z_loss, token_accuracy and predicted_tokens;
        a result without its option is None."""
        return _four_results(
            functional.cross_entropy(
                _input, target, weight, ignore_index, reduction, label_smoothing, lse_square_scale, softcap,
                return_z_loss, return_token_accuracy, return_predicted_tokens,
            )
        )  # fmt: skip


class LigerFusedLinearCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
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
        ce_impl: str | None = None,
        ce_mode: str | None = None,
        chunk_mem_const: int = 1,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Calls :func:`liger_ext.functional.fused_linear_cross_entropy`. Returns loss, z_loss, token_accuracy and
        predicted_tokens; a result without its option is None."""
        return _four_results(
            functional.fused_linear_cross_entropy(
                _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
                softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
            )
        )  # fmt: skip


def _four_results(
    result: Tensor | functional.CrossEntropyOutput,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    return (result, None, None, None) if isinstance(result, Tensor) else tuple(result)


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        W: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        """Calls :func:`liger_ext.functional.rms_norm`."""
        return functional.rms_norm(X, W, eps, offset, casting_mode)


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Calls :func:`liger_ext.functional.add_rms_norm`."""
        return functional.add_rms_norm(X, R, W, eps, offset, casting_mode)


class LigerFusedGateUpSiLUMulFunction:
    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """Calls :func:`liger_ext.functional.swiglu_packed`."""
        return functional.swiglu_packed(y)


class LigerJSDFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: str | None = None,
        jsd_mode: str | None = None,
    ) -> Tensor:
        """Calls :func:`liger_ext.functional.jsd`."""
        return functional.jsd(_input, target, shift_labels, beta, ignore_index)


class LigerFusedLinearScaledCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        weight: Tensor,
        target: Tensor,
        temperature: float = 1.0,
        ignore_index: int = -100,
        m_tiles_per_cluster: int = 1,
        return_entropy: bool = False,
        selected_token_ids: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Returns the negative of :func:`liger_ext.functional.linear_log_probs`; with ``return_entropy`` also the
        entropy, in the dtype of _input; and with ``selected_token_ids`` their log-probabilities, ``(rows, ids)``. All
        are differentiable."""
        found = functional.linear_log_probs(
            _input, weight, target, temperature=temperature, ignore_index=ignore_index, entropy=return_entropy
        )
        log_probs, *entropy = found[:2] if return_entropy else (found,)
        results = [0 - log_probs, *(t.to(_input.dtype) for t in entropy)]
        if selected_token_ids is not None:
            counts = target != ignore_index
            target_logits = (_input.float() * weight[torch.where(counts, target, 0)].float()).sum(-1) / temperature
            selected_logits = (_input @ weight[selected_token_ids].T).float() / temperature
            results.append(torch.where(counts[:, None], selected_logits + (log_probs - target_logits)[:, None], 0.0))
        return results[0] if len(results) == 1 else tuple(results)


def _function(name: str, function: Callable) -> type:
    """Returns a class whose ``apply`` is ``function``, which has Liger-Kernel's arguments."""
    return type(name, (), {"apply": staticmethod(function), "__module__": __name__, "__doc__": function.__doc__})


LigerGELUMulFunction = _function("LigerGELUMulFunction", compat.liger_geglu)
LigerGroupNormFunction = _function("LigerGroupNormFunction", compat.liger_group_norm)
LigerLayerNormFunction = _function("LigerLayerNormFunction", compat.liger_layer_norm)
LigerReLUSquaredFunction = _function("LigerReLUSquaredFunction", compat.liger_relu_squared)
LigerRopeFunction = _function("LigerRopeFunction", compat.liger_rope)
LigerSiLUMulFunction = _function("LigerSiLUMulFunction", functional.swiglu)
LigerSoftmaxFunction = _function("LigerSoftmaxFunction", functional.softmax)


def _refused(name: str) -> Callable:
    def refuse(*_, **__):
        raise NotImplementedError(
            f"{name} exists only to be replaced (axolotl excludes it from torch.compile) and cannot be called in "
            "liger_ext, which provides the module liger_kernel. Call liger_ext.fused_linear_cross_entropy"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


fused_linear_cross_entropy_forward = _refused("fused_linear_cross_entropy_forward")
fused_linear_cross_entropy_backward = _refused("fused_linear_cross_entropy_backward")


def apply_liger_triton_cache_manager() -> None:
    """Does nothing: liger_ext compiles no Triton kernels, so their cache need not be changed."""


def ensure_contiguous(function: Callable) -> Callable:
    """Decorates a method of an autograd.Function: makes its tensor arguments contiguous."""

    def contiguous(value: Any) -> Any:
        return value.contiguous() if isinstance(value, Tensor) else value

    @functools.wraps(function)
    def wrapper(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        return function(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n: int) -> tuple[int, int]:
    """Returns the block size, a power of two, and the number of warps of a Triton kernel for rows of ``n`` elements.

    Raises:
        RuntimeError: ``n`` is over 65,536.
    """
    if n > 65536:
        raise RuntimeError(f"n is {n}, expected at most 65536 elements in a row of a Triton kernel")
    block = 1 << max(n - 1, 0).bit_length()
    limits = (32768, 16 if torch.version.hip else 32), (8192, 16), (2048, 8)
    return block, next((warps for least, warps in limits if block >= least), 4)


def compare_version(package: str, operator: Callable[[Version, Version], bool], target: str) -> bool:
    """Returns ``operator(version of package, target)``; False if the package cannot be imported."""
    try:
        module = importlib.import_module(package)
    except ImportError:
        return False
    return operator(Version(module.__version__), Version(target))


def __getattr__(name: str) -> dict[torch.dtype, object]:
    if name != "torch_to_triton_dtype":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        language = importlib.import_module("triton.language")
    except ImportError as error:
        raise AttributeError(f"{name} needs triton, which is not installed") from error
    return {getattr(torch, dtype): getattr(language, dtype) for dtype in ("float32", "float16", "bfloat16")}
