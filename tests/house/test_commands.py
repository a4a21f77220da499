"""Each command that a README prints stands, word for word, in the test that runs it."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.commands import BENCHMARK, COMMAND, PYTEST, ROOT, Reader, commands_of, matching, normal, printed

# Where the tests are that type commands. Benchmarks and pytest are found by their patterns: their tests read the READMEs.
RUNNERS = (
    "tests/house/test_commands.py",
    "tests/cli/test_readme_commands.py",
    "tests/e2e/test_readme_commands.py",
    "tests/trainers/test_readme_commands.py",
)
PLACES = ("README.md", "*/README.md", "*/*/README.md", "examples/**/*.py", "reft/**/*.py")
TORCHRUN = re.compile(r"\btorchrun( +(-[^\s`]+|[A-Z_]+=\S+|…))+")


def typed(text: str) -> dict[str, str]:
    """Command → the test that types it, of a test file: what stands as a string in a test, or above it."""
    found = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and COMMAND.match(node.value):
                    found[normal(node.value)] = function.name
    return found


def test_every_command_of_a_readme_is_run():
    run = {command for path in RUNNERS for command in typed((ROOT / path).read_text())}
    run |= {*matching(BENCHMARK), *matching(PYTEST)}
    typed_nowhere = [each for each in printed() if each[0] not in run]
    assert not typed_nowhere, "\n".join(f"{path}: {command}" for command, path in typed_nowhere)
    assert len(list(printed())) > 30, "it reads where such commands are"


def test_it_finds_what_it_looks_for():
    text = (
        "Type `reft-cli status\n--job x`.\n\n    torchrun --nnodes=2 \\\n        a.py   # two\n\n| `make x` |\n`make`\n"
    )
    assert sorted(commands_of(text)) == ["make x", "reft-cli status --job x", "torchrun --nnodes=2 a.py"]
    assert commands_of("```bash\n# so\nanything at all  # it is\n```\n") == ["anything at all"]
    assert commands_of("    stage 0  FFF\n    x = python\n`REFT_JOB=a`\n") == []
    assert typed("def test_a():\n    run('make  x')\ndef b():\n    run('make y')\n") == {"make x": "test_a"}


@pytest.mark.parametrize(
    "command",
    [
        *("make .venv/.ready", "make demo", "make check", "make test", "make soak", "make chaos"),
        *("make test-trainers", "make bench", "make bench-report"),
    ],
)
def test_what_make_would_do(command, tmp_path):
    assert Reader(tmp_path).run(command, MAKEFLAGS="n")


@pytest.mark.parametrize("command", ["reft-daemon --help"])
def test_help_is_given(command, tmp_path):
    assert "--listen" in Reader(tmp_path).run(command)


def test_the_lines_to_add_are_those_of_the_example():
    added = re.findall(r"^    \+ (.+)$", (ROOT / "README.md").read_text(), re.M)
    example = (ROOT / "examples/ddp.py").read_text()
    assert len(added) == 4 and [line for line in added if line.strip() not in example] == []


class Understood(Exception):
    """The options were taken."""


@pytest.mark.parametrize("command", matching(BENCHMARK))
def test_a_benchmark_takes_the_options(command, tmp_path, monkeypatch):
    """The benchmark itself runs in tests/e2e."""
    *_, script = re.findall(r"bench/(\w+)\.py", command)
    arguments = shlex.split(command.partition(f"{script}.py")[2])
    parse = argparse.ArgumentParser.parse_args

    def understand(*given, **named):
        parse(*given, **named)
        raise Understood

    (tmp_path / "bench/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understand)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises((Understood, SystemExit)) as ended:
        importlib.import_module(f"bench.{script}").main()
    assert ended.type is Understood or ended.value.code == 0


def without_backend(text: str) -> list[str]:
    """Commands whose name or endpoint torchrun would replace or leave alone: without a backend it has others in mind."""
    commands = [found.group() for found in TORCHRUN.finditer(text)]
    return [each for each in commands if re.search("--rdzv-(id|endpoint)", each) and "--rdzv-backend" not in each]


def test_every_command_with_a_name_or_an_endpoint_names_the_backend():
    texts: dict[Path, str] = {path: path.read_text() for place in PLACES for path in ROOT.glob(place)}
    assert {path: found for path, text in texts.items() if (found := without_backend(text))} == {}
    assert sum("--rdzv-id" in text for text in texts.values()) > 10, "it reads where such commands are"


def test_it_finds_commands_without_a_backend():
    assert without_backend("so: `torchrun --nproc-per-node=8 --rdzv-id=run1 ... train.py`")
    assert without_backend("torchrun --nnodes=4 --rdzv-endpoint=storehost:29400 …")
    assert not without_backend("torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-id=a train.py")
    assert not without_backend("torchrun --nproc-per-node=8 train.py; the job's name is --rdzv-id")
