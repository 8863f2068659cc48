"""The records of RMSNorm and add+RMSNorm, the norm of ``x + residual``: formulas, baselines with ``F.rms_norm``,
magnitudes of intermediate values (the scales of rounding errors), and shapes to time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_ext.records._norms import NORM, NORM_DX, NORM_SUMS, NORM_TIMED, gradient_scale, norm_example
from liger_ext.records._record import InputFactory, Record, Roundings, Size, Timed, matrices, sizes
from liger_ext.records._sizes import Tensors, peak


def _rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns t rounded to ``dtype``, in the dtype of t. The gradient is not rounded."""
    return t if dtype is None else t + (t.detach().to(dtype).to(t.dtype) - t.detach())


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> Tensor:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


def torch_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    stored: torch.dtype | None = None,
) -> Tensor:
    n = F.rms_norm(x, x.shape[-1:], None, eps)
    factor = 1 if weight is None else weight + offset
    y = n * factor
    if casting_mode != "llama" or stored is None:
        return y
    return y + (n.to(stored).to(n.dtype) * factor - y).detach()


def rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    if "out" not in grads:
        return {}
    x = inputs["x"]
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + inputs.get("eps", 1e-6))
    weight, offset = inputs.get("weight"), inputs.get("offset", 0.0)
    return {"dx": gradient_scale(x * rstd, rstd, grads["out"], weight, offset)}


def _add_norm(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns add + norm. The norm is applied to the sum after its rounding to ``stored``."""

    def add_norm(
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None = None,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        stored: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(_rounded(total, stored), weight, eps, offset, casting_mode, stored), total

    return add_norm


add_rms_norm = _add_norm(rms_norm)
torch_add_rms_norm = _add_norm(torch_rms_norm)


def add_rms_norm_scales(inputs: Mapping[str, Any], outputs: Tensors, grads: Tensors) -> dict[str, Tensor]:
    total = _rounded(inputs["x"] + inputs["residual"], inputs["stored"])
    scales = {"out1": peak(inputs["x"]) + peak(inputs["residual"])}
    dx = torch.zeros_like(peak(total))
    if "out0" in grads:
        options = {k: v for k, v in inputs.items() if k in ("weight", "eps", "offset")}
        dx = dx + rms_norm_scales({"x": total, **options}, outputs, {"out": grads["out0"]})["dx"]
    if "out1" in grads:
        dx = dx + peak(grads["out1"])
    return scales | {"dx": dx, "dresidual": dx}


def _rounded_product(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    return ("out", "out0") if inputs.get("casting_mode", "llama") == "llama" else ()


def _inputs(*rows: str) -> Callable[[InputFactory, Size], dict[str, Any]]:
    def inputs(make: InputFactory, size: Size) -> dict[str, Any]:
        tensors = {name: make.leaf(size.rows, size.cols) for name in rows}
        return tensors | {"weight": make.leaf(size.cols, mean=1, scale=0.3)}

    return inputs


_ALONE = sizes((16384, 576), (8192, 3072), (2048, 4096), (8192, 5120), (64, 4096), (1, 4096))
_FROZEN = {"sizes": sizes((8192, 4096)), "small": sizes((2048, 4096))}

RMS_NORM = Record(
    name="rms_norm",
    reference=rms_norm,
    baseline=torch_rms_norm,
    scales=rms_norm_scales,
    roundings={"out": NORM, "dx": NORM_DX, "dweight": NORM_SUMS["dweight"]},
    inputs=_inputs("x"),
    example=norm_example,
    llama=Size(8192, 4096),
    moved=matrices(2, 3, statistics=4),
    timed=(
        Timed((*NORM_TIMED.sizes, *_ALONE), NORM_TIMED.small),
        Timed(**_FROZEN, label="frozen weight", frozen=("weight",)),
        Timed(**_FROZEN, label="weight of another dtype", other_dtype=("weight",)),
    ),
    parameters=("weight",),
    rounded=_rounded_product,
    stores=True,
)

ADD_RMS_NORM = Record(
    name="add_rms_norm",
    reference=add_rms_norm,
    baseline=torch_add_rms_norm,
    scales=add_rms_norm_scales,
    roundings={
        "out0": NORM,
        "out1": Roundings(1),
        "dx": NORM_DX,
        "dresidual": NORM_DX,
        "dweight": NORM_SUMS["dweight"],
    },
    inputs=_inputs("x", "residual"),
    example=norm_example,
    llama=Size(8192, 4096),
    moved=matrices(4, 4, statistics=4),
    timed=(NORM_TIMED,),
    outputs=("out0", "out1"),
    parameters=("weight",),
    computes_in=("x", "residual"),
    rounded=_rounded_product,
    stores=True,
)
