"""Patches a module by swapping its class for a subclass, and swaps it back.

Why classes and not bound methods or module globals:

- A subclass is seen by `isinstance`, survives `deepcopy`, pickling and PEFT's wrapping; one assignment undoes it.
- Newer versions of transformers checkpoint a decoder layer in code that they wrap around the *class's* `forward` when a
  subclass is made; a `forward` set on an instance or on the class itself silently runs without gradient checkpointing.
- A class swap touches one instance, so stock models in the same process stay stock.

Models built later are patched by the same swap, at the end of their constructor (`on_construction`): `Class(config)`,
`from_config` and `from_pretrained` all call it.

Other libraries replace functions, too. Their code keeps running, or a warning names it (`patching.forwards` finds it):

- If other code has replaced a function of transformers whose work a patch does, the patch is not applied.
- If other code has wrapped an instance's `forward`, the class is swapped, and a copy of the wrapper calls the new
  class's `forward`. If the wrapper cannot be followed, the module is not patched.

PyTorch swaps classes as well, as in FSDP2: `patching.classes` inserts a patch below its classes.
"""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from liger_ext.models.patching.calls import exports_onnx, only_forward_runs, record_forward
from liger_ext.models.patching.classes import inherits_forward, source_class, stock_class, with_ancestor, with_patch
from liger_ext.models.patching.forwards import describe, find_foreign, leads_to, methods_called, rewrap, with_globals
from liger_ext.models.patching.handle import PatchHandle
from liger_ext.models.patching.warn import warn


def replaces(
    module: types.ModuleType, *others: tuple[types.ModuleType, str], **replacements: object
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Returns a decorator for a patch: a subclass of a class of `module` with its name, which replaces its `forward`.

    With `replacements`, the patch's `forward` is a copy of the base's, in which these global names refer to the
    replacements. The decorator records the functions whose work the patch does: the base's `forward`, the replaced
    globals, and `others` (each a module and a name in it). `swap_classes` checks whether other code has replaced one.
    """

    def remember(patch: type[nn.Module]) -> type[nn.Module]:
        base = stock_class(patch)
        _originals[patch] = [_Original(f"{patch.__name__}.forward", base, "forward", module.__name__, base.forward)]
        for owner, name in (*((module, name) for name in replacements), *others):
            ours = replacements.get(name)
            _originals[patch].append(_Original(name, owner, name, owner.__name__, getattr(owner, name), ours))
        if replacements:
            wrap = getattr(patch, "wrap_forward", lambda forward: forward)
            patch.forward = wrap(copy_forward(patch, **replacements))
        record_forward(patch)
        return patch

    return remember


class Mixin:
    """Base of the mixins that inspect the class that they replace. A patch has two bases: the mixin, and that class."""

    PATCH_STATE: tuple[str, ...] = ()  # attributes that only patched instances have

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        mixin = cls.__bases__[0]
        if issubclass(cls, nn.Module) and issubclass(mixin, Mixin) and not issubclass(mixin, nn.Module):
            # Only for the patch: a class that FSDP2 or a user derives from it inherits these attributes.
            stock = stock_class(cls)
            cls.STOCK_MODULE = stock.__module__
            cls.inspect_stock(stock)

    @classmethod
    def inspect_stock(cls, stock: type[nn.Module]) -> None:
        """Stores on the patch, for its methods, facts about the class `stock` that it replaces. Called once a patch."""


def copy_forward(patch: type[nn.Module], **replacements: object) -> Callable:
    """Returns a copy of the `forward` that `patch` replaces, in which global names refer to `replacements`.

    If other code has replaced a function whose work `patch` does, returns the `forward` itself: `swap_classes` refuses
    the patch.
    """
    forward = stock_class(patch).forward
    return forward if any(find_replacements(patch)) else with_globals(forward, **replacements)


def swap_classes(modules: Iterable[nn.Module], patch: type[nn.Module], handle: PatchHandle) -> None:
    """Sets the class of `modules` to `patch`, if they are instances of the class that it replaces. `handle` reverts it.

    Skips, with a warning, a module with its own `forward`, in its class or on the instance, or whose class overrides a
    method that `patch` replaces. Skips all modules if other code has replaced a function whose work `patch` does: that
    code would no longer be called.
    """
    modules = [m for m in modules if isinstance(m, stock_class(patch)) and not isinstance(m, patch)]
    replaced = list(find_replacements(patch)) if modules else []
    for name, found in replaced:
        warn(f"{name} of transformers was replaced by {describe(found)}, and stays: {patch.__name__} is not patched")
    for module in modules if not replaced else ():
        _swap_class(module, patch, handle)


def on_construction(
    cls: type[nn.Module], patch: Callable[[nn.Module], object], handle: PatchHandle, *, first: bool
) -> None:
    """Calls `patch(instance)` at the end of every `cls.__init__` from now on, until `handle` is reverted. With `first`
    it runs before the functions that are already called there, else after them."""
    if cls not in _constructors:
        _constructors[cls] = _HookedConstructor(cls)
    hooks = _constructors[cls].hooks
    hooks.insert(0 if first else len(hooks), patch)
    handle.on_revert(_remove_constructor_hook, cls, patch)


def is_fsdp1(module: nn.Module) -> bool:
    """Returns whether `module` is a FullyShardedDataParallel, which gathers a module's weights around its call."""
    return derives_from(module, "FullyShardedDataParallel")


def derives_from(module: nn.Module, name: str) -> bool:
    """Returns whether the class of `module` or an ancestor has this name. The name stands for a class of a library that
    may not be installed. Ancestors count because FSDP2 derives a class from each class that it shards."""
    return any(cls.__name__ == name for cls in type(module).__mro__)


def runs_torch_linear(module: nn.Module) -> bool:
    """Returns whether a call of `module` is torch's `F.linear` with its weight and bias, of any kind."""
    return type(module) is nn.Linear and torch_linear_is_intact() and only_forward_runs(module)


def torch_linear_is_intact() -> bool:
    """Returns whether `nn.Linear.forward` and `F.linear` are torch's. DeepSpeed's `zero.Init` permanently replaces
    `F.linear` by a function that computes the same, which counts as torch's."""
    linear = nn.functional.linear
    is_known = linear is _F_LINEAR or getattr(linear, "__globals__", {}).get("__name__") == _DEEPSPEED_LINEAR
    return nn.Linear.forward is _LINEAR and is_known


_LINEAR, _F_LINEAR = nn.Linear.forward, nn.functional.linear
_DEEPSPEED_LINEAR = "deepspeed.runtime.zero.linear"


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Returns whether `tensor` is neither a DTensor nor another subclass with its own semantics (quantised weights).

    Subclasses that stand in for plain tensors while a graph is traced count as plain, so that the graph has the same
    ops. In an export to ONNX no tensor counts as plain (`exports_onnx`).
    """
    return type(tensor) in (torch.Tensor, nn.Parameter, FakeTensor, FunctionalTensor) and not exports_onnx()


class _HookedConstructor:
    """The wrapper of `cls.__init__` that calls hooks after it. It exists as long as it has hooks."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.hooks: list[Callable[[nn.Module], object]] = []
        self.original = original = cls.__init__

        @functools.wraps(original)
        def __init__(instance, *args, **kwargs):
            original(instance, *args, **kwargs)
            for hook in tuple(self.hooks):
                hook(instance)

        self.wrapper = cls.__init__ = __init__


_constructors: dict[type[nn.Module], _HookedConstructor] = {}


def _remove_constructor_hook(cls: type[nn.Module], patch: Callable[[nn.Module], object]) -> None:
    constructor = _constructors[cls]
    constructor.hooks.remove(patch)
    if not constructor.hooks:
        del _constructors[cls]
        # If another library has wrapped our wrapper since, ours stays below and calls no hooks.
        if cls.__init__ is constructor.wrapper:
            cls.__init__ = constructor.original


class _Original(NamedTuple):
    """A function whose work a patch does: the value of `owner.attribute` when the patch was created."""

    name: str
    owner: object
    attribute: str
    module: str
    value: Callable
    replacement: Callable | None = None  # what the patch's `forward` calls instead


_originals: dict[type[nn.Module], list[_Original]] = {}


def find_functions(patch: type[nn.Module]) -> dict[str, Callable]:
    """Returns the functions that the `forward` of `patch` calls in place of global functions, by name."""
    return {found.name: found.replacement for found in _originals[patch] if found.replacement is not None}


def find_replacements(patch: type[nn.Module]) -> Iterator[tuple[str, Callable]]:
    """Yields the name of each function whose work `patch` does and that other code has replaced, before or after the
    patch was created, with its replacement."""
    for original in _originals[patch]:
        current = getattr(original.owner, original.attribute)
        found = None if current is original.value else current
        for value in (current, original.value):
            trusted = "transformers", "kernels", original.module.partition(".")[0]
            found = find_foreign(value, original.module, original.name, trusted) or found
        if found is not None:
            yield original.name, found


def _swap_class(module: nn.Module, patch: type[nn.Module], handle: PatchHandle) -> None:
    cls, original = type(module), stock_class(patch)
    written = source_class(cls, original)
    patched = with_patch(written, patch)
    for name in _methods_replaced(patch):
        if inspect.getattr_static(cls, name) is not inspect.getattr_static(original, name):
            warn(f"{cls.__name__} has a {name} of its own and is not patched")
            return
    if not inherits_forward(cls, original) or not _set_class(module, with_ancestor(cls, written, patched)):
        warn(f"{cls.__name__} has a forward of its own and is not patched")
        return
    handle.on_revert(_restore_class, weakref.ref(module), patched, written)


@functools.cache
def _methods_replaced(patch: type[nn.Module]) -> tuple[str, ...]:
    """Returns the names of the methods, other than `forward`, whose work `patch` does in place of the class that it
    replaces."""
    original = stock_class(patch)
    members = (
        member for cls in patch.__mro__ if cls.__module__.startswith("liger_ext.") for member in vars(cls).items()
    )
    ours = (name for name, value in members if isinstance(value, types.FunctionType) and name[:2] != "__")
    shadowed = (name for name in ours if name != "forward" and hasattr(original, name))
    return tuple(dict.fromkeys((*methods_called(original), *shadowed)))


def _restore_class(reference: weakref.ref, patched: type[nn.Module], original: type[nn.Module]) -> None:
    module = reference()
    if module is None:
        return
    name, cls = type(module).__name__, with_ancestor(type(module), patched, original)
    if cls is None:
        warn(f"{name} is derived from a patched class, and keeps the patch")
    elif not _set_class(module, cls):
        warn(f"the forward of this {name} was wrapped after patching, and keeps the patch")
    else:
        for attribute in ("liger_memory", *getattr(patched, "PATCH_STATE", ())):
            module.__dict__.pop(attribute, None)


def _set_class(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Sets the class of `module`. If other libraries have wrapped its `forward` on the instance, the wrappers then call
    the new class's `forward`:

    - accelerate's mixed precision (every `Trainer(bf16=True)`) permanently stores a wrapper in `forward`, and the
      former function in `_original_forward`;
    - accelerate's device hooks store the former function in `_old_forward`, which their own `forward` calls.

    Returns False and changes nothing if the function on the instance does not lead to the class's `forward`.
    """
    old, new = type(module).forward, cls.forward
    _drop_bound_forward(module)
    followed = {}
    for name in ("forward", "_original_forward", "_old_forward"):
        own = module.__dict__.get(name)
        if own is not None and leads_to(own, old):
            with contextlib.suppress(TypeError):
                followed[name] = rewrap(own, old, new)
    runs = "_old_forward" if "_old_forward" in module.__dict__ else "forward"
    if runs in module.__dict__ and runs not in followed:
        return False
    module.__dict__.update(followed)
    module.__class__ = cls
    return True


def _drop_bound_forward(module: nn.Module) -> None:
    """Removes an instance's `forward` that is only its class's bound method, so that a swap of the class takes effect.

    transformers 4.54 to 5.0 leaves one behind after recording hidden states. accelerate's `unwrap_model` leaves one,
    without the class's decorators, when it removes mixed precision.
    """
    own = module.__dict__.get("forward")
    if isinstance(own, types.MethodType) and own.__self__ is module and leads_to(type(module).forward, own.__func__):
        del module.__dict__["forward"]
