"""Which code of transformers is known: told by the text of a class's `forward`, and of what it calls.

Text is compared without what does not matter (`forwards.text_of`), with Llama's of the installed version, or by digests
(`liger_ext.models.digests`) of what has stayed the same in all versions that are named beside them.
"""

import ast
import difflib
import functools
import hashlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterable

from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from liger_ext.models import digests, llama
from liger_ext.models.causal_lm import renamed
from liger_ext.models.classes import stock_class
from liger_ext.models.decoder import Attention
from liger_ext.models.forwards import definition_of, find_calls, text_of
from liger_ext.models.names import MODELS, name_of
from liger_ext.models.patch import stands_in
from liger_ext.models.rope import ROPES, rope_for


@functools.cache
def patch_of(cls: type[nn.Module]) -> type[nn.Module] | None:
    """The subclass that takes the place of a class of transformers; None where its code is not known."""
    if patch_of_llamas(cls):
        return patch_of_llamas(cls)
    kind = _kinds().get(_code_of(cls.forward, cls))
    if kind is None and issubclass(cls, PreTrainedModel):
        kind = digests.HEADS.get(_difference(_text_of_head, cls, stock_class(llama.LlamaForCausalLM)))
    if kind is None:
        kind = digests.LAYERS.get(_difference(_text_of_layer, cls, stock_class(llama.LlamaDecoderLayer)))
    module, replacements = sys.modules[cls.__module__], {}
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if kind is None and code is not None and not _is_without_gradient(cls.forward):
        ropes = {name: vars(module).get(name) for name in code.co_names if name.startswith("apply_rotary_")}
        known = {name: (rope, _known_ropes().get(_code_of(rope))) for name, rope in ropes.items()}
        replacements = {name: rope_for(rope, **how) for name, (rope, how) in known.items() if how is not None}
        kind = Attention if replacements else None
    if kind is None:
        kind = digests.GATES_OF_EXPERTS.get(_code_of(getattr(cls, "_apply_gate", None)))
    if kind is None:
        return None
    # The module's __getattr__ finds it again.
    namespace = {"__module__": "liger_ext.models.families", "__qualname__": name_of(cls)}
    if hasattr(kind, "forward"):
        namespace["forward"] = kind.forward
    return stands_in(module, **replacements)(type(cls)(cls.__name__, (kind, cls), namespace))


def is_left_alone(cls: type[nn.Module]) -> bool:
    """Whether the code is known, and nothing is to be gained."""
    codes = _difference(_text_of_layer, cls, stock_class(llama.LlamaDecoderLayer)), _code_of(cls.forward, cls)
    return not digests.LEFT_ALONE.isdisjoint(codes)


def _is_without_gradient(forward: Callable) -> bool:
    """Whether it is decorated so where it is defined, as indexers are, which choose what attention reads."""
    definition = definition_of(forward)
    return definition is not None and any("no_grad" in ast.unparse(d) for d in definition.decorator_list)


@functools.cache
def _kinds() -> dict[str, type]:
    """By the digest of a class's code: the mixin that does the same."""
    patches = llama.LlamaRMSNorm, llama.LlamaMLP
    codes = {_code_of(stock_class(patch).forward, stock_class(patch)): patch.__bases__[0] for patch in patches}
    return {code: kind for code, kind in codes.items() if code is not None} | digests.MODULES


@functools.cache
def _known_ropes() -> dict[str, dict[str, object]]:
    llamas = _code_of(modeling_llama.apply_rotary_pos_emb)
    return ROPES if llamas is None else {llamas: {}, **ROPES}


def _code_of(function: Callable | None, cls: type | None = None, seen: tuple = ()) -> str | None:
    """A digest of what `function` does, with the functions of its module, and the methods of `cls`, that it names.

    None if some of the source is not there to be read; it is then like no other.
    """
    text = None if function is None else text_of(function)
    if text is None:
        return None
    function = inspect.unwrap(function)
    texts = [text]
    for name in function.__code__.co_names:
        found = vars(cls).get(name) if cls else None
        found = function.__globals__.get(name) if found is None else found
        found = inspect.unwrap(found) if isinstance(found, types.FunctionType) else None
        if found is not None and found.__module__ == function.__module__ and found not in (*seen, function):
            texts.append(_code_of(found, cls, (*seen, function)))
    return None if None in texts else _digest(texts)


def _difference(text: Callable[[Callable], str | None], cls: type, other: type) -> str | None:
    """A digest of what turns `other.forward` into `cls.forward`: the lines that go and those that come, in order."""
    texts = text(other.forward), text(cls.forward)
    if None in texts:
        return None
    changes = difflib.unified_diff(*(text.splitlines() for text in texts), n=0, lineterm="")
    return _digest([change for change in list(changes)[2:] if not change.startswith("@@")])


@functools.cache
def _text_of_layer(forward: Callable) -> str | None:
    """The text of a layer that gives its arguments to the attention, by their names, without these arguments. It may
    withhold some: `DecoderLayer` looks which."""
    text = text_of(forward)
    if text is None:
        return None
    function = ast.parse(text).body[0]
    calls = find_calls(function, "self.self_attn")
    names = _names_of_arguments(function)
    given = [name for name in names if any(keyword.arg == name for call in calls for keyword in call.keywords)]
    if len(calls) != 1 or given[:1] != names[:1] or not _hands_on(calls[0], function, given):
        return None
    calls[0].keywords, function.args.args, function.args.defaults = [], [], []
    return ast.unparse(function)


@functools.cache
def _text_of_head(forward: Callable) -> str | None:
    """The text of a head that gives its arguments to `self.model`, by their names, without these arguments; without
    the number of classes, which our loss does not read, and without what it returns as `self.model` has returned it."""
    text = text_of(forward)
    if text is None or "**" not in text.partition("\n")[0]:
        return None
    text = renamed(text).replace("outputs[0]", "outputs.last_hidden_state")
    function = _Resolved().visit(ast.parse(text)).body[0]
    for_model = [n for n in _names_of_arguments(function) if n not in ("labels", "logits_to_keep", "return_dict")]
    for node in ast.walk(function):
        callee = ast.unparse(node.func) if isinstance(node, ast.Call) else None
        if callee == "self.model":
            node.keywords = [k for k in node.keywords if ast.unparse(k) not in _PASSED]
            if not (_hands_on(node, function, for_model) or _hands_on(node, function, for_model, with_rest=False)):
                return None
            node.keywords = []
        elif callee == "self.loss_function":
            node.keywords = [k for k in node.keywords if k.arg != "vocab_size"]
            node.keywords = [*map(ast.keyword, ("logits", "labels"), node.args), *node.keywords]
            node.args = node.args[3:]  # the third is vocab_size
            if not _hands_on(node, function, ["logits", "labels"]):
                return None
            node.keywords = []
        elif callee is not None and re.search(r"CausalLMOutput(With\w+)?$", callee):
            node.func = ast.Name("Output")
            node.keywords = [k for k in node.keywords if ast.unparse(k.value) != f"outputs.{k.arg}"]
    function.args.args, function.args.defaults = [], []
    function.args.kwarg.arg = "kwargs"
    return ast.unparse(function)


# What our head does, too, where transformers' does.
_PASSED = "return_dict=True", "return_dict=return_dict", "labels=labels", "logits_to_keep=logits_to_keep"


class _Resolved(ast.NodeTransformer):
    """Without the lines in which a head decides what its model would decide as well, without the tuple that it returns
    in place of an output, and without advice to the user."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        name = ast.unparse(node.targets[0])
        default = f"{name} = {name} if {name} is not None else self.config.{name}"
        decided = name in ("output_attentions", "output_hidden_states", "return_dict") and ast.unparse(node) == default
        return None if decided else node

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        advice = all(ast.unparse(line).startswith("logger.warning_once(") for line in node.body)
        as_tuple = ast.unparse(node.test) == "not return_dict"
        return None if (advice or as_tuple) and not node.orelse else self.generic_visit(node)


def _names_of_arguments(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args[1:]]


def _hands_on(call: ast.Call, function: ast.FunctionDef, names: list[str], with_rest: bool = True) -> bool:
    """Whether `call` is given these by their names, the rest of the arguments of `function`, and nothing else."""
    rest = function.args.kwarg
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    expected = {name: name for name in names} | ({None: rest.arg} if rest is not None and with_rest else {})
    return not call.args and rest is not None and given == expected


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def stock_classes(modules: Iterable[nn.Module]) -> list[type[nn.Module]]:
    """The classes of models of transformers that `modules` are of, or are derived from."""
    found = {}
    for cls in dict.fromkeys(map(type, modules)):
        stock = [c for c in cls.__mro__ if c.__module__.startswith(MODELS) or patch_of_llamas(c)]
        found.update(dict.fromkeys([c for c in stock if "forward" in vars(c)][:1]))
    return list(found)


def patch_of_llamas(cls: type) -> type[nn.Module] | None:
    """The patch of a class of Llama's: by the class, which may be one that other code has put there."""
    patch = getattr(llama, cls.__name__, None)
    return patch if isinstance(patch, type) and cls in patch.__bases__ else None
