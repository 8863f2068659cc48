"""What every op gets on the Python side, in one place.

For an op ``name`` and its ``name_backward``, both implemented in C++:

* fake implementations: shapes, dtypes and strides without data, for ``torch.compile`` and meta tensors;
* autograd on the forward. The backward op carries a formula that refuses, since without one a double backward would
  silently take the first derivative for a constant;
* a refusal under ``torch.func`` transforms, for the same reason: a jvp would silently be zero;
* an autocast rule. Row ops fall through: they keep the dtypes of their inputs. An op with matmuls passes ``autocast``;
* where the GPU library is missing, a CUDA implementation that says why.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from liger_ext import _load

LIBRARY = torch.library.Library("liger_ext", "IMPL")

_AUTOCAST = {"cpu": torch._C.DispatchKey.AutocastCPU, "cuda": torch._C.DispatchKey.AutocastCUDA}


def register(
    name: str,
    *,
    fake: Callable,
    fake_backward: Callable,
    setup_context: Callable,
    backward: Callable,
    autocast: Callable | None = None,
) -> None:
    """Registers all of the above for ``name`` and ``name_backward``.

    ``autocast(device_type, *args)`` returns the arguments that the forward runs with under autocast; the op itself, and
    the backward op, then run with autocast off, so that no matmul inside is cast.
    """
    for op, implementation in ((name, fake), (f"{name}_backward", fake_backward)):
        torch.library.register_fake(f"liger_ext::{op}", implementation, lib=LIBRARY)
        LIBRARY.impl(op, _refuse_transforms(op), "FuncTorchDynamicLayerFrontMode")
        if not _load.gpu_available():
            LIBRARY.impl(op, _gpu_missing, "CUDA")
        for device_type, key in _AUTOCAST.items():
            rule = torch.library.fallthrough_kernel
            if autocast is not None:
                rule = _without_autocast(op, key, device_type, autocast if op == name else None)
            LIBRARY.impl(op, rule, key.name)
    torch.library.register_autograd(f"liger_ext::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    torch.library.register_autograd(f"liger_ext::{name}_backward", _refuse_double_backward(name), lib=LIBRARY)


def _refuse_double_backward(name: str) -> Callable:
    def backward(ctx, *grads):
        raise RuntimeError(
            f"liger_ext::{name} has no second derivative: double backward (create_graph=True) is not supported"
        )

    return backward


def _refuse_transforms(op: str) -> Callable:
    def kernel(*args):
        raise RuntimeError(
            f"liger_ext::{op} does not work under torch.func transforms (grad, vmap, jvp, ...). Use torch.autograd; "
            "instead of vmap give the tensors another leading dimension"
        )

    return kernel


def _gpu_missing(*args):
    raise RuntimeError(f"liger_ext cannot run on a GPU here: {_load.gpu_status()}")


def _without_autocast(op: str, key: torch._C.DispatchKey, device_type: str, prepare: Callable | None) -> Callable:
    overload = getattr(torch.ops.liger_ext, op).default
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args):
        if prepare is not None:
            args = prepare(device_type, *args)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args)

    return kernel
