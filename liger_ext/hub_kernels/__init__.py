"""Layers for Hugging Face's package `kernels`, which loads this folder as a local kernel: `use_kernels=True`.

`kernels` replaces the `forward` of modules whose class transformers has registered with a layer's name. It imports
this folder by its path, reads metadata.json, and uses the classes in `layers`.
"""

from torch import nn

from liger_ext.hub_kernels import layers

__all__ = ["layers", "mapping"]

_LAYERS = {  # layers by the names that transformers registers
    "RMSNorm": layers.RMSNorm,
    "RMSNormZeroCentered": layers.RMSNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "SwiGLUMLP": layers.MLP,
    "GeGLUMLP": layers.MLP,
}


def mapping(model: nn.Module) -> dict[str, str]:
    """Returns the first argument of `transformers.KernelConfig(..., use_local_kernel=True)`: the layers for `model`.

    Raises:
        ValueError: transformers has registered none of these layers for a module of `model`.
    """
    from transformers import KernelConfig  # exists since transformers 5

    config = KernelConfig()
    config.store_registered_layer_names(model)
    registered = set(config.registered_layer_names.values())
    found = {name: f"{__path__[0]}:{layer.__name__}" for name, layer in _LAYERS.items() if name in registered}
    if not found:
        raise ValueError(
            f"{type(model).__name__} registers no layer of {', '.join(_LAYERS)} with the package kernels: transformers "
            "registers them if the version of kernels that it asks for is installed when it is imported"
        )
    return found
