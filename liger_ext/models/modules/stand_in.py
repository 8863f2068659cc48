"""Runs the `forward` of a module of transformers so that its linear layers with an adapter or a 4-bit weight run in
autograd nodes. `forward` itself does not change: another object stands in for its `self`."""

import ast
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from liger_ext.models.patching.calls import only_forward_runs
from liger_ext.models.patching.forwards import parse_function
from liger_ext.models.patching.warn import warn
from liger_ext.models.training.checkpoint import is_differentiated
from liger_ext.models.training.linear import may_fit, why_called
from liger_ext.models.training.nodes import adapted
from liger_ext.ops._compile import assume_constant_result


class Uses(NamedTuple):
    """The uses of `self` in a `forward`."""

    # Modules that it only calls, with one argument, or compares by `is`. Empty if another `self` would change it.
    layers: tuple[str, ...]
    passes_itself: bool  # to the attention function


class StandIn:
    """A module as the `self` of its `forward`: calls of the layers `names` run in nodes. The layers in `results` have
    run: called with any argument, they return these results."""

    def __init__(self, module: nn.Module, names: list[str], results: Mapping[str, Tensor] | None = None) -> None:
        self._module = module
        for name in names:
            setattr(self, name, lambda x, name=name: project(module, x, name)[0])
        for name, result in (results or {}).items():
            setattr(self, name, lambda _, result=result: result)

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


def call(module: nn.Module, *args: object, **kwargs: object) -> object:
    """Returns `module(*args, **kwargs)`. The linear layers of a module without a patch run in nodes."""
    cls = type(module)
    uses = (_uses_in_graph if torch.compiler.is_compiling() else _uses)(cls)
    names = fused_names(module, uses)
    if not names or not only_forward_runs(module):
        return module(*args, **kwargs)
    return cls.forward(StandIn(module, names), *args, **kwargs)


def runs_in_nodes(forward: Callable, uses: Uses, joint: tuple[str, ...] = ()) -> Callable:
    """Returns `forward`, a method, whose `self` is a `StandIn` where the module has layers for nodes. It calls each of
    the layers `joint` once, with its argument `hidden_states`: they run in one node."""

    @functools.wraps(forward)
    def run(self, *args, **kwargs):
        names = fused_names(self, uses)
        if not names:
            return forward(self, *args, **kwargs)
        results = {}
        if not {*joint}.isdisjoint(names) and None not in map(self._modules.get, joint):
            results = dict(zip(joint, project(self, args[0] if args else kwargs["hidden_states"], *joint), strict=True))
        return forward(StandIn(self, names, results), *args, **kwargs)

    return run


def project(module: nn.Module, x: Tensor, *names: str) -> Sequence[Tensor]:
    """Returns the results of the module's linear layers of these names, by a node if one has an adapter or a 4-bit
    weight."""
    return adapted([getattr(module, name) for name in names], x, module.training)


def fused_names(module: nn.Module, uses: Uses) -> list[str]:
    """Returns the names of the layers that a `StandIn` of `module` may run in nodes."""
    names = [name for name in uses.layers if may_fit(module._modules.get(name))]
    if not names or not (is_differentiated() or module.training) or (uses.passes_itself and not sees_no_module(module)):
        return []
    return names


def adapters(model: nn.Module, patches: tuple[type, ...]) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Yields the name of each layer of `model` with adapters, the layer, and why its adapters run PEFT's code. None:
    nodes run them. `patches` are the patches that run layers in nodes."""
    inside = {id(m) for module in model.modules() if isinstance(module, patches) for m in module.modules()}
    for name, module in model.named_modules():
        if any((c.__module__, c.__name__) == _ADAPTED for c in type(module).__mro__):
            reason = why_called(module) or (None if id(module) in inside else "outside of the patched layers")
            yield name, module, reason


def warn_about_adapters(model: nn.Module, patches: tuple[type, ...]) -> None:
    """Warns once of the layers of `model` whose adapters run PEFT's code, for each reason with their number."""
    found: dict[str, list[str]] = {}
    for name, _, reason in adapters(model, patches):
        if reason is not None:
            found.setdefault(reason, []).append(name)
    if found:
        parts = (f"{len(names)} {reason} ({names[0]}{', ...' if names[1:] else ''})" for reason, names in found.items())
        warn(f"PEFT's own code runs these adapted layers of {type(model).__name__}: {'; '.join(parts)}")


_ADAPTED = "peft.tuners.tuners_utils", "BaseTunerLayer"


def sees_no_module(attention: nn.Module) -> bool:
    """Returns whether the attention function is from transformers. A user's function must receive the module itself,
    because it may store results on it or read its weights."""
    names = vars(sys.modules[getattr(attention, "STOCK_MODULE", type(attention).__module__)])
    functions, default = names.get("ALL_ATTENTION_FUNCTIONS"), names.get("eager_attention_forward")
    if functions is None or default is None:
        return False
    function = functions.get(attention.config._attn_implementation, default)
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] == "transformers"


def find_uses(forward: Callable) -> Uses:
    nodes = list(ast.walk(parse_function(forward) or ast.Name("self")))
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    reads = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    passed = [n.args[0] for n in calls if n.args and ast.unparse(n.func) == "attention_interface"]
    allowed = [n.value for n in reads] + passed
    allowed += [n.args[0] for n in calls if n.args and ast.unparse(n.func) in ("hasattr", "getattr")]
    names = [n for n in nodes if isinstance(n, ast.Name) and n.id in ("self", "super", "__class__")]
    if any(n not in allowed for n in names):
        return Uses((), False)
    called = [n.func for n in calls if len(n.args) == 1 and not n.keywords and not isinstance(n.args[0], ast.Starred)]
    own = [n for n in reads if isinstance(n.value, ast.Name) and n.value.id == "self"]
    called += [n.left for n in nodes if isinstance(n, ast.Compare) and isinstance(n.ops[0], ast.Is | ast.IsNot)]
    others = {n.attr for n in own if n not in called} | {n.value for n in nodes if isinstance(n, ast.Constant)}
    layers = dict.fromkeys(n.attr for n in own if n.attr not in others)
    return Uses(tuple(layers), any(n in passed for n in names))


@functools.cache
def _uses(cls: type[nn.Module]) -> Uses:
    """Returns the uses of a class without a patch. A patch's methods call `project`, or `runs_in_nodes` wraps them."""
    ours = getattr(cls.forward, "__globals__", {}).get("__name__", "").startswith("liger_ext.")
    return Uses((), False) if ours else find_uses(cls.forward)


@assume_constant_result
def _uses_in_graph(cls: type[nn.Module]) -> Uses:
    """Returns `_uses` as a constant of the graph: torch.compile cannot trace it."""
    return _uses(cls)
