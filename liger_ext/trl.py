"""Runs the loss heads of TRL's trainers on this library's op: :func:`install`.

TRL (1.16 and newer) computes the log-probabilities and entropies of SFT, DPO, KTO, GRPO and RLOO by one autograd
function, which it looks up at each call. That function saves no logits and recomputes the head's matmul in its
backward. :func:`liger_ext.functional.linear_log_probs` replaces it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from liger_ext.functional import LogProbsOutput, linear_log_probs

if TYPE_CHECKING:
    from liger_ext.models.patching.handle import PatchHandle

__all__ = ["install"]

_NAME = "_ChunkedLogProbFunction"
_PARAMETERS = (
    "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale",
    "outputs",
)  # fmt: skip
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def install() -> PatchHandle:
    """Runs the loss heads of TRL's trainers, in this process, on :func:`liger_ext.functional.linear_log_probs`.

    Call it before or after a trainer is built. TRL runs unchanged, and a warning gives the reason, if TRL's function
    has other parameters, if other code has replaced it, or if the two functions disagree on a small example, which is
    computed on the CPU.

    Returns:
        A handle, whose ``.revert()`` restores TRL's function. As a context manager it reverts at the end. A second call
        of ``install`` changes nothing, and its handle reverts nothing.

    Raises:
        ImportError: TRL is not installed.
    """
    from liger_ext.models.patching.handle import PatchHandle

    handle = PatchHandle()
    utils = importlib.import_module("trl.trainer.utils")
    found = getattr(utils, _NAME, None)
    if isinstance(found, _LogProbs):
        return handle
    reason = _refusal_reason(found)
    if reason is not None:
        warnings.warn(f"liger_ext.trl.install: {reason}; TRL runs unchanged", stacklevel=2)
        return handle
    handle.replace(utils, _NAME, _LogProbs(found))
    return handle


class _LogProbs:
    """Stands in for ``trl.kernels.ChunkedLogProbFunction``: ``apply`` has its parameters and its results."""

    def __init__(self, stock: type[torch.autograd.Function]) -> None:
        self.stock = stock

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        if not _in_range(temperature, final_logit_softcapping, logit_scale):
            return self.stock.apply(
                hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping, logit_scale, outputs
            )

        def run(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LogProbsOutput:
            wanted = {name: name in outputs for name in _OUTPUTS}
            with _matmul_context(hidden, weight):
                found = linear_log_probs(
                    hidden, weight, targets.long(), bias, temperature=temperature, softcap=final_logit_softcapping,
                    logit_scale=logit_scale, **wanted,
                )  # fmt: skip
            return LogProbsOutput(found) if isinstance(found, Tensor) else found

        if hasattr(weight, "ds_id") and torch.is_grad_enabled():
            found = LogProbsOutput(*_RegatheredHead.apply(run, hidden, weight, bias))
        else:
            found = run(hidden, weight, bias)
        return found.log_probs, found.entropy, found.log_sum_sq_probs, found.mean_logits, found.is_top1


def _in_range(temperature: object, softcap: float | None, logit_scale: float) -> bool:
    """Whether linear_log_probs takes all these values; with others, TRL's function runs."""
    numbers = (temperature, logit_scale, 1.0 if softcap is None else softcap)
    return all(isinstance(number, (int, float)) and 1e-9 <= number <= 1e9 for number in numbers)


def _matmul_context(hidden: Tensor, weight: Tensor) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the matmuls run in the dtype of hidden, as TRL's do; without effect under autocast."""
    device = hidden.device.type
    if hidden.dtype == weight.dtype or hidden.dtype == torch.float32 or torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, hidden.dtype)


class _RegatheredHead(torch.autograd.Function):
    """linear_log_probs under DeepSpeed's ZeRO 3, where TRL gathers the head for the forward only.

    The backward gathers the head again, unless weight and bias are frozen and the entropy has no upstream gradient:
    then it does not read the head."""

    @staticmethod
    def forward(ctx, run, hidden, weight, bias):
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        with torch.enable_grad():
            found = run(leaf, weight, bias)
        ctx.inputs, ctx.found, ctx.shape = (leaf, weight, bias), found[:2], weight.shape
        ctx.set_materialize_grads(False)
        results = tuple(t if t is None else t.detach() for t in found)
        ctx.mark_non_differentiable(*(t for t in results[2:] if t is not None))
        return results

    @staticmethod
    def backward(ctx, *grads):
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        _, weight, bias = ctx.inputs
        upstream = [(output, grad) for output, grad in zip(ctx.found, grads, strict=False) if grad is not None]
        wanted = [t for t in ctx.inputs if t is not None and t.requires_grad]
        reads = weight.requires_grad or (bias is not None and bias.requires_grad) or grads[1] is not None
        found = {}
        if upstream and wanted:
            with maybe_gather_lm_head_ctx(weight, bias) if reads else _in_shape(weight, ctx.shape):
                gradients = torch.autograd.grad(
                    [output for output, _ in upstream], wanted, [grad for _, grad in upstream]
                )
            found = {id(t): gradient for t, gradient in zip(wanted, gradients, strict=True)}
        ctx.found = None
        return None, *(found.get(id(t)) for t in ctx.inputs)


@contextlib.contextmanager
def _in_shape(weight: Tensor, shape: torch.Size) -> Iterator[None]:
    """Sets the shape of an empty weight, without values or memory, for an op that checks the shape only."""
    data = weight.data
    weight.data = data.new_zeros(()).expand(shape)
    try:
        yield
    finally:
        weight.data = data


def _refusal_reason(found: object) -> str | None:
    """Returns the reason not to replace TRL's function, or None."""
    kernels = importlib.import_module("trl.kernels") if importlib.util.find_spec("trl.kernels") else None
    stock = getattr(kernels, "ChunkedLogProbFunction", None)
    if found is None or stock is None:
        return f"this version of TRL has no trl.trainer.utils.{_NAME} (TRL 1.16 and newer have)"
    if found is not stock:
        return f"trl.trainer.utils.{_NAME} was replaced by {found!r}"
    parameters = tuple(inspect.signature(stock.forward).parameters)
    if parameters != _PARAMETERS:
        return f"trl.kernels.ChunkedLogProbFunction takes {', '.join(parameters)}, expected {', '.join(_PARAMETERS)}"
    try:
        return None if _agree(stock) else "trl.kernels.ChunkedLogProbFunction and liger_ext disagree on a small example"
    except Exception as error:
        return f"a small example of trl.kernels.ChunkedLogProbFunction failed ({error!r})"


@contextlib.contextmanager
def _default_torch_state() -> Iterator[None]:
    """Sets torch's defaults for the small example: the caller may have changed them, and TRL's function depends on
    some."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


@_default_torch_state()
def _agree(stock: type[torch.autograd.Function]) -> bool:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (5, 12))
    bias, targets = torch.randn(12, generator=generator), torch.tensor([0, 11, 3, 3, 7])
    up = torch.randn(2, 5, generator=generator)

    def results(function: object) -> list[Tensor | None]:
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        found = function.apply(*leaves, targets, 0.7, 4, 5.0, 0.5, _OUTPUTS)
        total = (found[0] * up[0] + found[1] * up[1]).sum()
        return [*found, *torch.autograd.grad(total, leaves)]

    both = zip(results(stock), results(_LogProbs(stock)), strict=True)
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in both)
