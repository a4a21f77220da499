"""Private names of other packages stand in two files; pyproject.toml claims what was tried."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from reft.client import torch_internals
from reft.elastic import torch_internals as elastic_internals
from reft.private_names import versions
from tests.house.test_words import sources
from tests.support.commands import ROOT
from tests.support.syntax import tree

HOMES = ("reft/client/torch_internals.py", "reft/elastic/torch_internals.py")
# Adapters for trainers read private names of these trainers, and check them.
ADAPTERS = (
    "reft/client/state/extract/deepspeed.py",
    "reft/client/state/extract/megatron.py",
    "reft/client/state/extract/megatron_modules.py",
    "reft/client/schedule/hooks/deepspeed.py",
    "reft/client/schedule/hooks/megatron.py",
    "reft/integrations/",
)
# Python documents the first two. No public function runs a module in `__main__`, as python -m does;
# `elastic/torch_internals.py` checks that runpy has the third. The last is reft's own C extension.
SPARED = re.compile(
    r".*\._replace|os\._exit|runpy\._run_module_as_main|reft\.client\.memory\._(streaming|entries|locations)"
)
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Methods of str whose arguments are parts of names.
PARTS = {"startswith", "endswith", "removeprefix", "removesuffix"}


def defined(module: ast.AST) -> set[str]:
    """Returns the names that a module defines: its own, and those of its classes."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def foreign_names(text: str) -> list[str]:
    """Finds private names of objects that the module does not define.

    Finds `x._name`, imports of private names and modules, and texts that are a private name, as in
    getattr(x, "_name"). A subclass may use private names of its base class as `self._name`.
    """
    module = tree(text)
    own = defined(module)
    parts = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PARTS:
            parts |= {id(argument) for argument in node.args}
        elif isinstance(node, ast.JoinedStr):
            parts |= {id(value) for value in node.values}
    return [
        f"{line}: {name}"
        for node in ast.walk(module)
        if id(node) not in parts
        for line, name in found(node)
        if name.rpartition(".")[2] not in own and not SPARED.fullmatch(name)
    ]


def found(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the private names at one node of a syntax tree, with their line."""
    if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr) and not is_own(node.value):
        yield node.lineno, ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and PRIVATE.fullmatch(node.value):
        yield node.lineno, node.value
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        names = [*(base.split(".") if not base.startswith("__") else ()), *(alias.name for alias in node.names)]
        yield from ((node.lineno, f"{base}.{name}") for name in names if PRIVATE.fullmatch(name))
    elif isinstance(node, ast.Import):
        names = [name for alias in node.names for name in alias.name.split(".")]
        yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name))


def test_private_names_of_other_packages_stand_in_two_files():
    violations = [
        f"{path}:{each}"
        for path, text in sources().items()
        if path not in HOMES and not path.startswith(ADAPTERS)
        for each in foreign_names(text)
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        ("tensor._local_tensor", "self._local_tensor"),
        ("a.b()._name", "a.b().__name__"),
        ("super()._go()", "class A(B):\n    def _go(self):\n        super()._go()"),
        ("def f(other):\n    other._x", "class A:\n    def f(self, other):\n        self._x = other._x"),
        ("from torch.optim import _functional", "from torch.optim import adam as _adam"),
        ("from torch._dynamo import config", "from __future__ import annotations"),
        ("import torch._dynamo", "import torch"),
        ("from reft.client.session import _LIVE", "from reft.client.session import Session"),
        ("getattr(module, '_parameters')", "name.endswith('_bytes')"),
        ("attrgetter('_version')", "_version = 1\nattrgetter('_version')"),
        ("vars(flat)['_local_shard']", "f'{kind}_bytes'"),
        ("sys._exit(1)", "os._exit(1)"),
        ("runpy._run_code(x)", "runpy._run_module_as_main(x)"),
        ("window._fields", "window._replace(end=1)"),
    ],
)
def test_a_foreign_name_is_found_and_an_own_one_is_not(bad, good):
    assert len(foreign_names(bad)) == 1
    assert foreign_names(good) == []


def claimed(pyproject: str) -> list[str]:
    """Returns the versions of torch that pyproject.toml accepts, e.g. 2.13 for >=2.13,<2.14."""
    lowest, end = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', pyproject).groups()
    return [f"2.{minor}" for minor in range(int(lowest), int(end))]


def test_pyproject_claims_the_versions_of_torch_that_were_tried():
    client = [*torch_internals.REQUIRED, *torch_internals.OPTIONAL]
    tables = (elastic_internals.REQUIRED, elastic_internals.CACHES, elastic_internals.OUTPUTS)
    elastic = [name for table in tables for names in table.values() for name in names]
    assert claimed((ROOT / "pyproject.toml").read_text()) == versions(client) == versions(elastic)
    assert claimed('"torch>=2.12,<2.14"') == ["2.12", "2.13"]
