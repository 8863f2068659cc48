"""Parses functions into syntax trees, and lists the names and calls in them.

This file imports only the standard library, for the reason in `recognise/normal_form.py`.
"""

import ast
import builtins
import textwrap

# Decorators that change neither what a forward computes nor its gradient. Any other decorator stays in the text.
_HARMLESS = {
    "add_start_docstrings_to_model_forward",
    "auto_docstring",
    "can_return_tuple",
    "capture_outputs",
    "check_model_inputs",
    "deprecate_kwarg",
    "merge_with_config_defaults",
    "replace_return_docstrings",
    "use_kernel_forward_from_hub",
    "use_kernel_func_from_hub",
}


def definition_in(source: str) -> ast.FunctionDef | None:
    """Returns the function that `source` defines, without annotations, comments, docstring and harmless decorators.
    None if `source` defines something else, such as a lambda."""
    try:
        definition = ast.parse(textwrap.dedent(source)).body[0]
    except (SyntaxError, IndexError):
        return None
    if not isinstance(definition, ast.FunctionDef):
        return None
    definition.decorator_list = [d for d in definition.decorator_list if _decorator_name(d) not in _HARMLESS]
    definition.returns = None
    if ast.get_docstring(definition) is not None:
        definition.body = definition.body[1:]
    return _WithoutAnnotations().visit(definition)


def local_names(definition: ast.FunctionDef) -> set[str]:
    """Returns the names of a function's arguments and of the variables that it assigns."""
    nodes = list(ast.walk(definition))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def names_read(definition: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Returns the names that a function reads and does not define, and the attributes of `self` that it reads."""
    nodes = list(ast.walk(definition))
    names, own = [node for node in nodes if isinstance(node, ast.Name)], local_names(definition)
    others = (name.id for name in names if name.id not in own and not hasattr(builtins, name.id))
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    self_names = (attribute.attr for attribute in attributes if attribute.value.id == "self")
    return list(dict.fromkeys(others)), list(dict.fromkeys(self_names))


def variables_read(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def find_calls(tree: ast.AST, callee: str) -> list[ast.Call]:
    """Returns the calls in `tree` whose function is written `callee`."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == callee]


def _decorator_name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.copy_location(ast.arg(node.arg), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        self.generic_visit(node)
        return node if node.value is None else ast.copy_location(ast.Assign([node.target], node.value), node)
