"""Each command in a README appears, word for word, in the test that runs it."""

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

# The tests that run commands. Commands of benchmarks and of pytest are found by their patterns:
# these tests read the READMEs.
RUNNERS = (
    "tests/house/test_commands.py",
    "tests/cli/test_readme_commands.py",
    "tests/e2e/test_readme_commands.py",
    "tests/e2e/test_quickstart.py",
    "tests/e2e/test_keyed_launches.py",
    "tests/trainers/test_readme_commands.py",
)
PLACES = ("README.md", "*/README.md", "*/*/README.md", "examples/**/*.py", "reft/**/*.py")
TORCHRUN = re.compile(r"\btorchrun( +(-[^\s`]+|[A-Z_]+=\S+|…))+")


def typed(text: str) -> dict[str, str]:
    """Returns command → the test function that contains it as a string."""
    tests_by_command = {}
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and COMMAND.match(node.value):
                    tests_by_command[normal(node.value)] = function.name
    return tests_by_command


def test_every_command_of_a_readme_is_run():
    commands_in_tests = {command for path in RUNNERS for command in typed((ROOT / path).read_text())}
    commands_in_tests |= {*matching(BENCHMARK), *matching(PYTEST)}
    without_test = [each for each in printed() if each[0] not in commands_in_tests]
    assert not without_test, "\n".join(f"{path}: {command}" for command, path in without_test)
    assert len(list(printed())) > 30, "the test reads the files with such commands"


def test_commands_in_a_page_are_found():
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
        *("make .venv/.ready", "make demo", "make check", "make test", "make test-jobs", "make soak"),
        *("make chaos", "make test-trainers", "make bench", "make bench-report"),
    ],
)
def test_make_knows_the_target(command, tmp_path):
    assert Reader(tmp_path).run(command, MAKEFLAGS="n")


@pytest.mark.parametrize("command", ["reft-daemon --help"])
def test_a_program_prints_its_help(command, tmp_path):
    assert "--listen" in Reader(tmp_path).run(command)


def test_the_example_has_the_lines_that_the_readme_adds():
    added = [
        line.partition("  #")[0].strip()
        for line in re.findall(r"^    \+ (.+)$", (ROOT / "README.md").read_text(), re.M)
    ]
    example = (ROOT / "examples/quickstart.py").read_text()
    assert len(added) == 7 and [line for line in added if line not in example] == []


class OptionsAccepted(Exception):
    """Raised when the benchmark has accepted its options."""


@pytest.mark.parametrize("command", matching(BENCHMARK))
def test_a_benchmark_takes_the_options(command, tmp_path, monkeypatch):
    """Only the options are read here. The benchmark itself runs in tests/e2e."""
    *_, script = re.findall(r"bench/(\w+)\.py", command)
    arguments = shlex.split(command.partition(f"{script}.py")[2])
    parse = argparse.ArgumentParser.parse_args

    def understand(*given, **named):
        parse(*given, **named)
        raise OptionsAccepted

    (tmp_path / "bench/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", understand)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises((OptionsAccepted, SystemExit)) as ended:
        importlib.import_module(f"bench.{script}").main()
    assert ended.type is OptionsAccepted or ended.value.code == 0


def without_backend(text: str) -> list[str]:
    """Returns commands that name a job or an endpoint, but no backend.

    Without a backend, torchrun replaces or ignores both.
    """
    commands = [match.group() for match in TORCHRUN.finditer(text)]
    return [each for each in commands if re.search("--rdzv-(id|endpoint)", each) and "--rdzv-backend" not in each]


def test_every_command_with_a_name_or_an_endpoint_names_the_backend():
    texts: dict[Path, str] = {path: path.read_text() for place in PLACES for path in ROOT.glob(place)}
    assert {path: commands for path, text in texts.items() if (commands := without_backend(text))} == {}
    assert sum("--rdzv-id" in text for text in texts.values()) > 10, "the test reads the files with such commands"


def test_commands_without_a_backend_are_found():
    assert without_backend("so: `torchrun --nproc-per-node=8 --rdzv-id=run1 ... train.py`")
    assert without_backend("torchrun --nnodes=4 --rdzv-endpoint=storehost:29400 …")
    assert not without_backend("torchrun --nnodes=4 --rdzv-backend=c10d --rdzv-id=a train.py")
    assert not without_backend("torchrun --nproc-per-node=8 train.py; the job's name is --rdzv-id")
