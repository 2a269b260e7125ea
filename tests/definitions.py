"""Definitions in a file that is not loaded, for the contract tests."""

import ast

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def find_definition(tree: ast.Module, name: str) -> ast.AST | None:
    """The definition of `function`, `Class` or `Class.method` at the top of a file; None if absent."""
    definition: ast.AST = tree
    for part in name.split("."):
        body = getattr(definition, "body", [])
        inner = next((node for node in body if isinstance(node, _DEFINITIONS) and node.name == part), None)
        if inner is None:
            return None
        definition = inner
    return definition
