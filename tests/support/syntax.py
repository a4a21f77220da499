"""Syntax trees of modules, each parsed once in a process."""

from __future__ import annotations

import ast
import functools


@functools.cache
def tree(text: str) -> ast.Module:
    """Returns the syntax tree of a module; nobody changes the tree."""
    return ast.parse(text)


@functools.cache
def classes_of(text: str) -> list[ast.ClassDef]:
    """Returns all classes of a module."""
    return [node for node in ast.walk(tree(text)) if isinstance(node, ast.ClassDef)]
