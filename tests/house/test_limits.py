"""Limits against growth: attributes and methods of a class, imports of a module.

A class with behaviour keeps few attributes: a subject that needs more is two subjects, or has a
frozen record inside. Frozen records, enums, protocols and gRPC servicers have no such limit: they
only name values, or what the wire defines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.house.test_arrows import ROOT, arrows_of, modules
from tests.house.test_words import sources
from tests.support.syntax import classes_of

MOST_ATTRIBUTES = 15  # of an object, with those of its base classes
MOST_METHODS = 20  # that the class itself defines: properties and __init__ count
MOST_IMPORTS = 25  # of reft's modules
RECORDS = {"NamedTuple", "Enum", "IntEnum", "IntFlag", "Flag", "Protocol", "TypedDict"}


def base_names(node: ast.ClassDef) -> list[str]:
    """Returns the names of a class's bases, without packages and type arguments."""
    return [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases]


def is_spared(node: ast.ClassDef) -> bool:
    """Decides whether a class is a frozen record or a gRPC servicer."""
    is_frozen = any("frozen=True" in ast.unparse(each).replace(" ", "") for each in node.decorator_list)
    return is_frozen or any(name in RECORDS or name.endswith("Servicer") for name in base_names(node))


def own_attributes(node: ast.ClassDef) -> set[str]:
    """Returns the fields that a class declares, and the attributes that its methods set."""
    names = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    for method in methods(node):
        for each in ast.walk(method):
            if (
                isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            ):
                names.add(each.attr)
    return names


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]


def large_classes(texts: Mapping[str, str]) -> list[str]:
    """Finds classes with too many attributes or methods.

    Args:
        texts: path → the module's text. Bases are found by name: no class name is used twice.
    """
    classes = [(path, node) for path, text in texts.items() for node in classes_of(text)]
    by_name = {node.name: node for _, node in classes}

    def attributes(node: ast.ClassDef) -> set[str]:
        bases = [by_name[name] for name in base_names(node) if name in by_name and by_name[name] is not node]
        return own_attributes(node).union(*map(attributes, bases))

    def violations(node: ast.ClassDef) -> Iterator[str]:
        if len(attributes(node)) > MOST_ATTRIBUTES:
            yield f"{len(attributes(node))} instance attributes, at most {MOST_ATTRIBUTES}"
        if len(methods(node)) > MOST_METHODS:
            yield f"{len(methods(node))} methods, at most {MOST_METHODS}"

    return [
        f"{path}:{node.lineno}: {node.name} has {each}"
        for path, node in classes
        if not is_spared(node)
        for each in violations(node)
    ]


def wide_modules(texts: Mapping[str, str], packages: set[str]) -> list[str]:
    """Finds modules that import too many of reft's modules, late imports included.

    Args:
        texts: module name → its text.
        packages: the modules that are packages.
    """
    return [
        f"{module} imports {len(imported)} of reft's modules, at most {MOST_IMPORTS}"
        for module, imported in arrows_of(texts, packages).items()
        if len(imported) > MOST_IMPORTS
    ]


def test_no_class_with_behaviour_is_too_large():
    violations = large_classes(sources())
    assert not violations, "\n".join(violations)


def test_no_module_imports_too_much():
    texts = {module: path.read_text() for path, module in modules(ROOT)}
    violations = wide_modules(texts, {module for path, module in modules(ROOT) if path.name == "__init__.py"})
    assert not violations, "\n".join(violations)


def fields(first: int, count: int) -> str:
    return "".join(f"    a{i}: int\n" for i in range(first, first + count))


def assignments(first: int, count: int) -> str:
    targets = ", ".join(f"self.a{i}" for i in range(first, first + count))
    return f"    def __init__(self):\n        {targets} = range({count})\n"


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("class A:\n" + assignments(0, 16), "class A:\n" + assignments(0, 15)),
        ("@dataclass\nclass A:\n" + fields(0, 16), "@dataclass(frozen=True)\nclass A:\n" + fields(0, 16)),
        (
            "class A:\n" + fields(0, 1) + assignments(0, 15) + "    def f(self):\n        self.late += 1\n",
            "class A:\n" + fields(0, 15) + assignments(0, 15) + "    count: ClassVar[int] = 0\n",
        ),
        (
            "class A:\n" + assignments(0, 9) + "class B(A):\n" + assignments(9, 7),
            "class A:\n" + assignments(0, 9) + "class B(A):\n" + assignments(8, 7),
        ),
        ("class A:\n" + "    def f(self): ...\n" * 21, "class A:\n" + "    def f(self): ...\n" * 20),
        (
            "class A:\n    @property\n" + "    async def f(self): ...\n" * 21,
            "class A(pb_grpc.DaemonServicer):\n" + "    async def f(self): ...\n" * 21,
        ),
        ("class A(Thing):\n" + fields(0, 16), "class A(typing.NamedTuple):\n" + fields(0, 16)),
        ("if 1:\n  class A:\n" + fields(0, 16), "class A(Protocol):\n" + fields(0, 16)),
    ],
)
def test_a_large_class_is_found(bad, good):
    assert len(large_classes({"a.py": bad})) == 1
    assert large_classes({"a.py": good}) == []


def test_a_class_with_too_many_attributes_and_methods_is_found_twice():
    text = "class A:\n" + assignments(0, 16) + "    def f(self): ...\n" * 20
    assert large_classes({"a.py": text}) == [
        "a.py:1: A has 16 instance attributes, at most 15",
        "a.py:1: A has 21 methods, at most 20",
    ]


def test_a_module_with_many_imports_is_found():
    others = {f"reft.m{i}": "" for i in range(26)}
    apart = "".join(f"from reft.m{i} import a, b\n" for i in range(25))
    together = "def f():\n    from reft import " + ", ".join(f"m{i}" for i in range(26))
    assert wide_modules({**others, "reft.wide": apart}, {"reft"}) == []
    assert wide_modules({**others, "reft.wide": together}, {"reft"}) == [
        "reft.wide imports 26 of reft's modules, at most 25"
    ]
