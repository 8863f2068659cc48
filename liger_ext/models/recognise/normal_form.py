"""The normal form of a function's source: a text without comments, annotations and names that its author chose.

`known.json` lists digests of this text, so every version of Python must produce the same text. `ast.unparse` does not:
Python 3.10 writes `(a, b) = c`, later versions `a, b = c`. `dump_tree` therefore prints the syntax tree itself. This
file and `patching/source.py`, which it imports, otherwise import only the standard library, because
`tests/test_normal_form.py` runs them with other installed Pythons, without torch.
"""

import ast
import difflib
import hashlib
import re
from collections.abc import Callable

from liger_ext.models.patching.source import find_calls, local_names, variables_read


def dump_tree(node: ast.AST, indent: str = "") -> str:
    """Returns a syntax tree as text: a line for each statement, with the name and the set fields of each node."""
    inline, blocks = [], []
    for name in node._fields:
        value = getattr(node, name, None)
        if name in _NO_MEANING or value is None or value == []:
            continue
        if isinstance(value, list) and isinstance(value[0], _STATEMENTS):
            blocks += [f"{indent} {name}:", *(dump_tree(statement, indent + "  ") for statement in value)]
        else:
            inline.append(f"{name}={_dump_value(value)}")
    return "\n".join([f"{indent}{type(node).__name__}({', '.join(inline)})", *blocks])


_NO_MEANING = {"ctx", "kind", "type_comment", "type_params"}
_STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case


def _dump_value(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_dump_value, value))}]"
    return dump_tree(value) if isinstance(value, ast.AST) else ascii(value)


def number_names(
    definition: ast.FunctionDef, attributes: dict[str, str], keeps_name: Callable[[str], bool], variables: bool = True
) -> ast.FunctionDef:
    """Replaces the names in `definition` that its author chose by numbers, in the order of their first use: v0, v1, ...
    for arguments and variables, and a0, a1, ... for attributes of `self`.

    Two functions that differ only in these names then have the same text. Two that use the same names in another order
    have different texts, or bind a number to another attribute.

    Args:
        attributes: the numbers of attributes so far; new ones are added.
        keeps_name: returns whether an attribute keeps its name, because a base class defines it.
        variables: False leaves the names of the function, its arguments and variables.
    """
    return _Numbered(definition, attributes, keeps_name, variables).visit(definition)


class _Numbered(ast.NodeTransformer):
    def __init__(
        self, definition: ast.FunctionDef, attributes: dict[str, str], keeps_name: Callable, variables: bool
    ) -> None:
        self.attributes, self.keeps_name, self.variables = attributes, keeps_name, {}
        self.local_names = local_names(definition) - {"self"} if variables else set()
        if variables:
            definition.name = "f"

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(self._number(node.arg)), node)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self._number(node.id), node.ctx), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.Attribute:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and not self.keeps_name(node.attr):
            node.attr = self.attributes.setdefault(node.attr, f"a{len(self.attributes)}")
        return node

    def _number(self, name: str) -> str:
        return self.variables.setdefault(name, f"v{len(self.variables)}") if name in self.local_names else name


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def difference(text: str, other: str) -> str:
    """Returns the lines that are removed from `text` and added in `other`, with their neighbours: the same line at
    another place may compute something else."""
    changes = list(difflib.unified_diff(text.splitlines(), other.splitlines(), n=1, lineterm=""))
    return "\n".join(change for change in changes[2:] if not change.startswith("@@"))


def reduce_layer(definition: ast.FunctionDef) -> ast.FunctionDef | None:
    """Removes from a decoder layer the arguments that it passes to its attention by name. The layer may withhold some,
    and may have defaults: `DecoderLayer` reads both from the class. None if it uses the arguments in another way."""
    calls = find_calls(definition, "self.self_attn")
    names = _argument_names(definition)
    given = [name for name in names if any(keyword.arg == name for call in calls for keyword in call.keywords)]
    if len(calls) != 1 or given[:1] != names[:1] or not _hands_on(calls[0], definition, given):
        return None
    calls[0].keywords, definition.args.args, definition.args.defaults = [], [], []
    return definition


def reduce_head(definition: ast.FunctionDef) -> ast.FunctionDef | None:
    """Removes from a head the arguments that it passes to its model by name, those that it does not read, the loss's
    `vocab_size`, which our loss does not read, and the fields that it copies from its model's output. None if it passes
    something else to its model or its loss."""
    if definition.args.kwarg is None:
        return None
    text = renamed(ast.unparse(definition)).replace("outputs[0]", "outputs.last_hidden_state")
    definition = _Resolved().visit(ast.parse(text)).body[0]
    names, read = _argument_names(definition), variables_read(definition)
    if not {"labels", "logits_to_keep"} & read <= {*names}:
        return None
    others = [name for name in names if name not in HEAD_ARGUMENTS]
    for_model = [name for name in others if name in read]
    for node in ast.walk(definition):
        callee = ast.unparse(node.func) if isinstance(node, ast.Call) else None
        if callee == "self.model":
            node.keywords = [k for k in node.keywords if ast.unparse(k) not in _PASSED]
            if not (_hands_on(node, definition, for_model) or _hands_on(node, definition, for_model, with_rest=False)):
                return None
            node.keywords = []
        elif callee == "self.loss_function":
            node.keywords = [k for k in node.keywords if k.arg != "vocab_size"]
            node.keywords = [*map(ast.keyword, ("logits", "labels"), node.args), *node.keywords]
            node.args = node.args[3:]  # the third is vocab_size
            if not _hands_on(node, definition, ["logits", "labels"]):
                return None
            node.keywords = []
        elif callee is not None and re.search(r"CausalLMOutput(With\w+)?$", callee):
            node.func = ast.Name("Output", ast.Load())
            node.keywords = [k for k in node.keywords if ast.unparse(k.value) != f"outputs.{k.arg}"]
    taken = definition.args.args[::-1][: len(definition.args.defaults)][::-1]
    kept = [(a, d) for a, d in zip(taken, definition.args.defaults, strict=True) if a.arg not in others]
    kept = [(a, d) for a, d in kept if ast.unparse(d) != "None"]
    definition.args.args, definition.args.defaults = [a for a, _ in kept], [d for _, d in kept]
    definition.args.kwarg.arg = "kwargs"
    return definition


HEAD_ARGUMENTS = "labels", "logits_to_keep", "return_dict"  # a head's arguments that its model need not receive
# A patched head passes these arguments to its model if transformers' head does.
_PASSED = "return_dict=True", "return_dict=return_dict", "labels=labels", "logits_to_keep=logits_to_keep"


_AS_TUPLE = dump_tree(
    ast.parse(
        "if not return_dict:\n"
        "    output = (logits,) + outputs[1:]\n"
        "    return (loss,) + output if loss is not None else output"
    ).body[0]
)


class _Resolved(ast.NodeTransformer):
    """Removes the lines of a head that set defaults which its model sets as well, the tuple that it returns in place of
    an output, and warnings to the user."""

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | None:
        name = ast.unparse(node.targets[0])
        default = f"{name} = {name} if {name} is not None else self.config.{name}"
        decided = name in ("output_attentions", "output_hidden_states", "return_dict") and ast.unparse(node) == default
        return None if decided else node

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        advice = all(ast.unparse(line).startswith("logger.warning_once(") for line in node.body) and not node.orelse
        return None if advice or dump_tree(node) == _AS_TUPLE else self.generic_visit(node)


def renamed(text: str) -> str:
    """Returns the text of a head with Llama's names for its model, the model's output, and the logits."""
    call = MODEL_CALL.search(text)
    if call is not None:
        name = f"self.{call['model']}("
        text = text.replace(f"{name}input_ids,", f"{name}input_ids=input_ids,").replace(name, "self.model(")
        text = _with_name(text, call["outputs"], "outputs")
    return _with_name(text, "lm_logits", "logits")


def _with_name(text: str, old: str, new: str) -> str:
    """Renames a variable in `text`, unless another variable has the new name."""
    return text if re.search(rf"\b{new}\b(?!=)", text) else re.sub(rf"\b{old}\b", new, text)


# (`self.language_model` is a head itself: see `CausalLMInside`.)
MODEL_CALL = re.compile(
    r"^    (?P<outputs>\w+) = self\.(?P<model>(?!language_model)[\w.]+)\((input_ids=)?input_ids, (?=\w+=)", re.MULTILINE
)


def _argument_names(method: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in method.args.args[1:]]


def _hands_on(call: ast.Call, function: ast.FunctionDef, names: list[str], with_rest: bool = True) -> bool:
    """Returns whether `call` passes the arguments `names` by name, with `with_rest` also the `**` argument of
    `function`, and nothing else."""
    rest = function.args.kwarg
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    expected = {name: name for name in names} | ({None: rest.arg} if rest is not None and with_rest else {})
    return not call.args and rest is not None and given == expected
