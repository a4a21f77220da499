"""Checks which module may import which: programs -> reft.wire -> reft.core.

Inside each package a subpackage imports only lower ones. No imports form a circle.
"""

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.syntax import tree

ROOT = Path(__file__).resolve().parents[2]

MOST_ENTRIES = 14  # files and folders directly in a package

LEAVES = {
    *("reft.errors", "reft.config", "reft.console", "reft.failpoints", "reft.private_names", "reft.schedules"),
    *("reft.folders", "reft.interrupts", "reft.log_lines"),
}
# The integrations run in the trainer, so they belong to the client program.
PROGRAMS = {
    "reft.client": "client",
    "reft.integrations": "client",
    "reft.elastic": "elastic",
    "reft.cli": "cli",
    "reft.demo": "demo",
    "reft_daemon": "daemon",
    "reft_replayer": "daemon",  # a child of the daemon, in a package of its own because of torch
}
AREAS = PROGRAMS | {"reft.replay": "replay", "reft.wire": "wire", "reft.core": "core"} | {leaf: leaf for leaf in LEAVES}

# Core gets time, random numbers and the outside world as arguments, so a simulator can drive it.
IMPURE = {
    *("asyncio", "concurrent", "mmap", "multiprocessing", "os", "random", "secrets", "selectors"),
    *("socket", "subprocess", "threading", "time", "_thread"),
}
# The subpackages of each package, from the top layer to the bottom. A subpackage imports lower ones
# only.
LAYERS = {
    "reft.client": (
        *(
            "attach",
            "session",
            "schedule",
            "rehearsal",
            "restore",
            "snapshot",
            "records",
            "link",
            "data",
            "state",
            "memory",
            "torch_internals",
        ),
    ),
    "reft.core": (
        *("rehearsal", "status", "persist", "recovery", "commit", "coding", "membership", "pipeline", "layout"),
        *("budget", "text"),
    ),
    "reft.wire": (
        *(
            "rebuild_request",
            "stored_format",
            "inventory",
            "replay_sections",
            "manifest",
            "daemon_launcher",
            "local_socket",
            "rpc",
            "proof",
        ),
        *(
            "messages",
            "job_key",
            "timeline_socket",
            "tls",
            "certificate_role",
            "stored_format",
            "record_format",
            "capsule_format",
            "slot_format",
            "range_pipe",
            "shm",
            "process",
            "v1",
        ),
    ),
    "reft.elastic": (
        *("handler", "rounds", "heartbeat_client", "node", "store_poller", "orphan_reaper", "stores", "warm"),
        *("options", "meeting", "entry_seal", "shared_state", "bounded_json", "torch_internals"),
    ),
    "reft.cli": (
        *(
            "start",
            "main",
            "rehearse",
            "demo",
            "export",
            "go_back",
            "persist",
            "recover",
            "purge_all",
            "recover_view",
            "status_text",
            "status_view",
            "storage",
            "survey",
            "timeline",
            "ask",
        ),
        "signals",
    ),
    "reft_daemon": (
        "__main__",
        "main",
        "server",
        "rebuild",
        "registry",
        "membership",
        "peers",
        "persist",
        "jobs",
        "mover",
        "child",
        "arena",
    ),
}
NO_TORCH = ("reft.core", "reft.wire", "reft.cli", "reft_daemon")


class Import(NamedTuple):
    name: str
    line: int
    late: bool  # in a function, or for a type checker only: does not run at import of the module


def _name_of(function: ast.expr) -> str:
    """Returns the last name of a called function; empty: none."""
    return getattr(function, "attr", getattr(function, "id", ""))


def imports(source: str, module: str, is_package: bool = False) -> list[Import]:
    """Returns every import, with absolute names; `from a import b` counts as a.b."""
    imported: list[Import] = []
    package = module if is_package else module.rpartition(".")[0]

    def visit(node: ast.AST, late: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _name_of(node.func) == "import_module":
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        imported.extend(Import(name, node.lineno, late) for name in names)
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        late = late or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, late)

    visit(tree(source), late=False)
    return imported


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def area(name: str) -> str:
    """Returns the area of a name, or "" for a name that is not ours.

    "face" is reft itself, which leads to the client.
    """
    for prefix, area_name in AREAS.items():
        if within(name, prefix):
            return area_name
    return "face" if within(name, "reft") else ""


def forbidden(module: str, imported: Import) -> str:
    """Returns why `module` may not import this name, or ""."""
    importing_area, imported_area, top_level = area(module), area(imported.name), imported.name.partition(".")[0]
    if (
        importing_area == "core"
        and not imported_area
        and (top_level in IMPURE or top_level not in {*sys.stdlib_module_names, "numpy"})
    ):
        return "core imports only numpy, and stdlib modules without time, randomness or I/O"
    if top_level == "torch" and any(within(module, prefix) for prefix in NO_TORCH):
        return "no torch here"
    if top_level == "torch" and (importing_area == "face" or importing_area in LEAVES) and not imported.late:
        return "import reft loads no torch"
    if module == "reft.elastic" and top_level not in sys.stdlib_module_names and not imported.late:
        return "torchrun loads this package at every start: only stdlib at module level"
    if not imported_area or importing_area == imported_area or imported.name == "reft.__version__":
        return ""
    return (
        ""
        if imported_area in reachable(module, importing_area, imported.late)
        else f"{importing_area} may not import {imported_area}"
    )


def reachable(module: str, importing_area: str, late: bool) -> set[str]:
    if importing_area == "core":
        return {"reft.errors"}
    if importing_area == "reft.schedules":
        return LEAVES | {"core"}
    if importing_area in LEAVES:
        return LEAVES - {"reft.schedules"}
    if importing_area == "wire":
        return LEAVES | {"core"}
    if importing_area == "replay":
        return LEAVES | {"wire", "core"}
    if importing_area == "face":
        return LEAVES | ({"client"} if late else set())
    # The demo's trainer is a user's script, so it imports the public API.
    folds = {"replay"} if within(module, "reft.client") or within(module, "reft_replayer") else set()
    return LEAVES | {"wire", "core"} | folds | ({"face"} if importing_area in {"client", "demo"} else set())


def subpackage(package: str, name: str) -> str:
    """Returns the subpackage that a name lies in, or "" for `package` itself and outside."""
    return name.removeprefix(package + ".").partition(".")[0] if name.startswith(package + ".") else ""


def upwards(module: str, imported: Import) -> str:
    """Returns why `module` may not import this name from its own package, or ""."""
    for package, layers in LAYERS.items():
        importing, imported_from = subpackage(package, module), subpackage(package, imported.name)
        if (
            importing not in layers
            or imported_from not in layers
            or layers.index(importing) <= layers.index(imported_from)
        ):
            continue
        return f"{package}.{imported_from} lies above {package}.{importing}"
    return ""


def circle(arrows: Mapping[str, Collection[str]]) -> list[str]:
    """Returns the names on one circle of imports.

    The first name stands again at the end. Without a circle the list is empty.
    """
    done: set[str] = set()

    def search(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for each in sorted(arrows.get(name, ())):
            if names := search(each, [*path, name]):
                return names
        done.add(name)
        return []

    return next((names for name in sorted(arrows) if (names := search(name, []))), [])


def arrows_of(sources: Mapping[str, str], packages: Collection[str] = ()) -> dict[str, set[str]]:
    """Returns module → the modules of ours that it imports, including late imports.

    Args:
        sources: module name → its text.
        packages: the modules that are packages.
    """
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        arrows[module] = set()
        for each in imports(source, module, module in packages):
            target = each.name if each.name in sources else each.name.rpartition(".")[0]
            if target in sources and target != module:
                arrows[module].add(target)
    return arrows


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    reasons = [(each, forbidden(module, each) or upwards(module, each)) for each in imports(source, module, is_package)]
    return [f"{module}:{each.line}: imports {each.name}: {why}" for each, why in reasons if why]


def modules(root: Path) -> list[tuple[Path, str]]:
    """Returns the path and the import name of every module of ours."""
    paths = []
    for base, package in ((root, "reft"), (root / "daemon", "reft_daemon"), (root / "daemon", "reft_replayer")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            paths.append((path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)))
    return paths


def test_no_import_breaks_a_rule():
    broken_rules = []
    for path, module in modules(ROOT):
        # protoc's output imports google.protobuf, grpc, and of our modules only itself.
        broken_rules += violations(path.read_text(), module, path.name == "__init__.py")
    assert not broken_rules, "\n".join(broken_rules)


def test_imports_form_no_circle():
    sources = {module: path.read_text() for path, module in modules(ROOT)}
    packages = {module for path, module in modules(ROOT) if path.name == "__init__.py"}
    assert circle(arrows_of(sources, packages)) == []


def test_every_subpackage_has_a_layer():
    subpackages = {package: set() for package in LAYERS}
    for _, module in modules(ROOT):
        for package in LAYERS:
            subpackages[package] |= {subpackage(package, module)} - {""}
    assert subpackages == {package: set(layers) for package, layers in LAYERS.items()}


@pytest.mark.parametrize("folder", ["reft/client", "reft/core", "daemon/reft_daemon"])
def test_a_package_has_few_entries(folder):
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {path.removeprefix(folder + "/").partition("/")[0] for path in listed.split()}
    assert 0 < len(entries) <= MOST_ENTRIES, sorted(entries)


def test_a_circle_is_found():
    sources = {"a": "import b", "b": "def f():\n    from c import x", "c": "from a import y", "d": "import a"}
    assert circle(arrows_of(sources)) == ["a", "b", "c", "a"]
    assert circle(arrows_of({**sources, "c": ""})) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("reft.client.memory.threads", "from reft.client.state import tensors"),
        ("reft.client.snapshot.engine", "def f():\n    from reft.client.session import Session"),
        ("reft.core.commit.round", "from reft.core.recovery.recovery import plan"),
        ("reft_daemon.arena.arena", "from reft_daemon.registry import Registry"),
        ("reft.wire.messages", "from reft.wire.manifest import placement_of"),
    ],
)
def test_an_arrow_upwards_is_found(module, source):
    assert len(violations(source, module)) == 1


def test_every_package_has_an_init():
    bare = {path.parent for path, _ in modules(ROOT) if not (path.parent / "__init__.py").exists()}
    assert not bare, "setuptools leaves these out of the wheel"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("reft.core.commit.slots", "import time"),
        ("reft.core.commit.slots", "import grpc"),
        ("reft.core.commit.slots", "from reft import config"),
        ("reft.core.commit.slots", "from ...wire import slot"),
        ("reft.core.commit.slots", "from reft import attach"),
        ("reft.wire.slot", "from reft.client import session"),
        ("reft.wire.slot", "def f():\n    import torch"),
        ("reft.client.session", "import reft_daemon.main"),
        ("reft.cli.main", "def f():\n    from reft.demo import run"),
        ("reft.cli.main", "import reft"),
        ("reft.cli.main", "def f():\n    import torch"),
        ("reft_daemon.main", "import importlib\nimportlib.import_module('reft.client')"),
        ("reft_daemon.main", "import torch"),
        ("reft.demo.main", "from reft import cli"),
        ("reft.config", "from reft.core import slots"),
        ("reft.schedules", "import torch"),
        ("reft.elastic.handler", "from reft.client import session"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("reft.core.commit.slots", "import dataclasses\nimport numpy as np\nfrom reft.errors import ReftError"),
        ("reft.core.commit.slots", "from .version import Version"),
        ("reft.wire.slot", "import grpc\nfrom reft.core import slots\nfrom reft import config"),
        ("reft.client.session", "import torch\nfrom ..wire import slot\nfrom ..core import slots"),
        ("reft.cli.main", "from reft import __version__"),
        ("reft.integrations.transformers", "from reft.client import session\nimport reft"),
        ("reft_daemon.main", "from reft.wire import slot\nfrom reft_daemon import arena"),
        ("reft.elastic.handler", "import torch"),
    ],
)
def test_a_right_import_is_let_through(module, source):
    assert violations(source, module) == []


def test_packages_are_cheap_to_import():
    late = "def f():\n    from . import client\n    from .elastic import handler\n"
    assert violations("from . import client", "reft", is_package=True)
    assert len(violations(late, "reft", is_package=True)) == 1
    assert violations("from .handler import Handler", "reft.elastic", is_package=True)
    assert not violations("def f():\n    from .handler import Handler", "reft.elastic", is_package=True)
